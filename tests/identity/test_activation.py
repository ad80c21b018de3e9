"""Where an activated adapter is invoked: the last exact occurrence, to the letter of 0x08E and 0x08G."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.identity.activation import last_invocation

CASES = {
    "the worked prompt": ([11, 12, 99, 100], [99, 100], 2),
    "the last of two": ([99, 100, 11, 99, 100, 12], [99, 100], 3),
    "the whole prompt": ([99, 100], [99, 100], 0),
    "one token": ([7, 5, 7, 5], [7], 2),
    "occurrences that overlap": ([1, 1, 1, 1], [1, 1], 2),
    "a beginning without its end": ([99, 100, 99], [99, 100], 0),
    "its tokens in another order": ([100, 99], [99, 100], None),
    "its tokens with another between": ([99, 1, 100], [99, 100], None),
    "longer than the prompt": ([99], [99, 100], None),
    "no prompt": ([], [99], None),
    "bytes that would match across tokens": ([0x00010000, 0x00000001], [0x00000100], None),
}


@pytest.mark.parametrize(("tokens", "invocation", "expected"), CASES.values(), ids=CASES)
def test_where_the_last_invocation_begins(
    tokens: list[int], invocation: list[int], expected: int | None
) -> None:
    assert last_invocation(tokens, invocation) == expected


def test_against_every_start_in_turn() -> None:
    rng = random.Random(8)
    for _ in range(500):
        tokens = rng.choices((1, 2, 3), k=rng.randrange(20))
        invocation = rng.choices((1, 2, 3), k=rng.randrange(1, 4))
        size = len(invocation)
        starts = [at for at in range(len(tokens)) if tokens[at : at + size] == invocation]
        assert all(a < b for a, b in pairwise(starts))
        assert last_invocation(tokens, invocation) == (starts[-1] if starts else None)


def test_an_invocation_has_tokens() -> None:
    with pytest.raises(InternalFault) as caught:
        last_invocation([1, 2], [])
    assert caught.value.code is ErrorCode.IDENTITY_INVALID
