"""What the sampling parameters of one request forbid: which tokens its next one may be.

Owns the masks of `allowed_token_ids`, `bad_words` and `min_tokens`. They follow from how many tokens the
output has and from its last ones, so that nothing is kept that a preemption could lose. Never decides who
samples.

Specification: rulings "Sampling" (rows that need a host mask).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import EngineSampling
from loraplex.core.packed import I32
from loraplex.core.plan import mask_width


def check_rules(sampling: EngineSampling) -> None:
    """Raise `invalid_sampling` where the parameters leave no token that could come first."""
    if not sampling.allowed_token_ids:
        return
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned |= set(sampling.late_token_ids)
    if banned.issuperset(sampling.allowed_token_ids):
        raise CallerError(
            ErrorCode.INVALID_SAMPLING,
            f"allowed_token_ids allows {len(sampling.allowed_token_ids)} tokens, and bad_words and "
            "min_tokens forbid every one of them; allow another",
            param="allowed_token_ids",
        )


class TokenRules:
    """The rules of one request, over a vocabulary of `vocab_size` tokens.

    constant: they forbid the same tokens always, beside those of `min_tokens`. longest: how many of the last
    tokens of the output matter.
    """

    def __init__(self, sampling: EngineSampling, vocab_size: int) -> None:
        self._min_tokens = sampling.min_tokens
        allowed = sampling.allowed_token_ids
        self._words = _some(allowed, vocab_size) if allowed else _all(vocab_size)
        _forbid(self._words, (word[0] for word in sampling.bad_words if len(word) == 1))
        self._early = self._words.copy() if sampling.min_tokens else self._words
        if sampling.min_tokens:
            _forbid(self._early, sampling.late_token_ids)
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for word in sampling.bad_words:
            if len(word) > 1:
                self._lasts.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(prefix) for prefix in self._lasts})
        self.constant = bool(sampling.allowed_token_ids) or any(len(word) == 1 for word in sampling.bad_words)
        self.longest = max(self._lengths, default=0)

    def words(self, outputs: int, last: I32) -> I32:
        """The mask of the next token, int32 [ceil(vocabulary / 32)]. outputs: tokens before it. last: the
        latest of them, `longest` where there are so many.
        """
        words = self._early if outputs < self._min_tokens else self._words
        tokens = tuple(last.tolist())
        ends = [tokens[-length:] for length in self._lengths if length <= len(tokens)]
        banned = [token for end in ends for token in self._lasts.get(end, ())]
        if banned:
            words = words.copy()
            _forbid(words, banned)
        return words


def rules_of(sampling: EngineSampling, vocab_size: int) -> TokenRules | None:
    """The rules of a request; None where there are none."""
    if not (sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words):
        return None
    return TokenRules(sampling, vocab_size)


def _all(vocab_size: int) -> I32:
    words = np.full(mask_width(vocab_size), -1, dtype=np.int32)
    spare = words.size * 32 - vocab_size
    words[-1:].view(np.uint32)[:] >>= np.uint32(spare)
    return words


def _some(tokens: Iterable[int], vocab_size: int) -> I32:
    words = np.zeros(mask_width(vocab_size), dtype=np.int32)
    np.bitwise_or.at(words.view(np.uint32), *_places(tokens))
    return words


def _forbid(words: I32, tokens: Iterable[int]) -> None:
    """Take tokens out of a mask, in place."""
    where, bits = _places(tokens)
    np.bitwise_and.at(words.view(np.uint32), where, ~bits)


def _places(tokens: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """The word of each token, and its bit in it."""
    ids = np.fromiter(tokens, dtype=np.int64)
    return ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32)
