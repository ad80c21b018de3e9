"""What the virtual device computes instead of a model: fingerprints, and the token that a history of them
leads to.

A KV position holds a fingerprint of (token, position, adapter image). A sampled token is a hash of all
fingerprints of its history, in order. Images of one kind change the output head alone: their KV positions are
the base's, and the token depends on the image beside the history. `expected_tokens` says what a request alone
would produce; it knows nothing of pages, plans or engines, so a row that ran with a wrong adapter, a stale
page, a lost or doubled position gives another token.

Specification: rulings "Tests" (checkers outside the code under test).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.packed import I32

U64 = npt.NDArray[np.uint64]
_WORD: Final = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_SPREAD: Final = 0x1_0000_01B3
_ROUND: Final = 0xBF58_476D_1CE4_E5B9
_S31, _S29 = np.uint64(31), np.uint64(29)
_GOLDEN64, _SPREAD64, _ROUND64 = np.uint64(_GOLDEN), np.uint64(_SPREAD), np.uint64(_ROUND)


def mix(values: U64) -> U64:
    """A bijection of 64-bit words that spreads every bit."""
    values = (values ^ (values >> _S31)) * _ROUND64
    return values ^ (values >> _S29)


def mix_one(value: int) -> int:
    """`mix` of one word."""
    value = ((value ^ (value >> 31)) * _ROUND) & _WORD
    return value ^ (value >> 29)


def fingerprint_rows(tokens: I32, positions: I32, adapters: U64) -> U64:
    """What each row leaves in its KV position. tokens, positions, adapters (0: base) [T] -> [T]."""
    return mix(tokens.astype(np.uint64) * _GOLDEN64 + positions.astype(np.uint64) * _SPREAD64 + adapters)


def position_weights(count: int) -> U64:
    """Odd weights of positions 0.. in a history's hash."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN64) | np.uint64(1)


def sampled(sums: U64, vocab_size: int) -> I32:
    """Tokens of weighted history sums."""
    return (mix(sums) % np.uint64(vocab_size)).astype(np.int32)


def adapter_number(words: I32) -> int:
    """A number for an adapter image, from its digest's words."""
    return int.from_bytes(words.astype("<i4").tobytes()[:7], "little") | 1


def head_only(adapter: int) -> bool:
    """Whether an image changes the output head alone: one in four does."""
    return adapter & 6 == 6


def split(adapter: int) -> tuple[int, int]:
    """What of an image's number goes into KV positions, and what into the choice of a token."""
    return (0, adapter) if head_only(adapter) else (adapter, 0)


def expected_tokens(
    prompt: I32,
    adapter: int,
    count: int,
    vocab_size: int,
    invoked_at: int = 0,
    let: Callable[[int, Sequence[int]], bool] | None = None,
) -> list[int]:
    """The first `count` tokens that a request alone would produce. adapter: its image's number, 0 for the
    base.

    invoked_at: position from which on the adapter acts. let: whether a token may follow those before it; one
    that may not gives way to the next, around the vocabulary.
    """
    adapter, head = split(adapter)
    positions = np.arange(prompt.size, dtype=np.int32)
    acting = np.where(positions >= invoked_at, np.uint64(adapter), np.uint64(0))
    rows = fingerprint_rows(prompt, positions, acting)
    total = int((rows * position_weights(prompt.size)).sum(dtype=np.uint64))
    out: list[int] = []
    for position in range(prompt.size, prompt.size + count):
        token = mix_one((total + head) & _WORD) % vocab_size
        while let is not None and not let(token, out):
            token = (token + 1) % vocab_size
        out.append(token)
        row = mix_one((token * _GOLDEN + position * _SPREAD + adapter) & _WORD)
        total = (total + row * (mix_one(((position + 1) * _GOLDEN) & _WORD) | 1)) & _WORD
    return out


def next_allowed(token: int, words: I32) -> int:
    """The first token from `token` on, around the vocabulary, that a mask allows."""
    allowed = np.flatnonzero(np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % allowed.size])
