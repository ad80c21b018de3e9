"""Prompts of random tokens for tests over any model: one function, so that a length is never taken for a
seed.
"""

from __future__ import annotations

import numpy as np

TOKENS = 131
"""Token ids stay below it. No vocabulary of the tests' models is smaller."""


def prompt(length: int, seed: int) -> list[int]:
    """`length` token ids, the same for the same seed."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, TOKENS, length).tolist()
    return tokens
