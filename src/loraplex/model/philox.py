"""Philox4x32-10, the counter-based random generator, in integer tensor operations.

The same key and counter give the same 32 bits on every device and in every batch: nothing is drawn in
sequence. Owns no state. Specification: rulings "Sampling"; the generator is Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from typing import Final

import torch

_MASK: Final = 0xFFFF_FFFF
_MULTIPLIERS: Final = (0xD251_1F53, 0xCD9E_8D57)
_WEYL: Final = (0x9E37_79B9, 0xBB67_AE85)
_ROUNDS: Final = 10

WORDS: Final = 4
"""32-bit words that one counter gives."""


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words for each counter. All tensors int64 holding unsigned 32-bit values, of shapes that
    broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        if round_index:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        # The product wraps in int64, yet its 64 bits are those of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, p1 & _MASK, high0 ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, from int64 words of 32 uniform bits.

    With v uniform on (0, 1), -log(-log(1 - v)); a small v is the tail that wins, and float32 resolves it
    well.
    """
    v = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp_(max=1.0 - 2.0**-24)))


def vocabulary_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Gumbel noise of every token id for each row. seeds int64 [n, 2] (low, high word), positions int64 [n].

    Returns float32 [n, vocab]. Token t takes word t mod 4 of counter (t div 4, position, 0, 0).
    """
    block = torch.arange(-(-vocab // WORDS), dtype=torch.int64, device=seeds.device).unsqueeze(0)
    words = philox4x32(*_keyed(block, seeds, positions))
    return gumbel(torch.stack(words, dim=2).flatten(1)[:, :vocab])


def token_noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same noise at chosen ids only. ids int64 [n, c], each >= 0; returns float32 [n, c]."""
    words = philox4x32(*_keyed(ids // WORDS, seeds, positions))
    stacked = torch.stack(words, dim=2)
    return gumbel(stacked.gather(2, (ids % WORDS).unsqueeze(2)).squeeze(2))


_Quad = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _keyed(
    block: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[_Quad, tuple[torch.Tensor, torch.Tensor]]:
    zero = torch.zeros((), dtype=torch.int64, device=seeds.device)
    key = (seeds[:, 0:1] & _MASK, seeds[:, 1:2] & _MASK)
    return (block, positions.unsqueeze(1), zero, zero), key
