"""Loads ahead: first fit over all wishes within one ledger, and what is given up before its copy begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.schedule.prefetch import Ledger, Obsolete, Pending, Wish, first_fit, given_up


def ledger(**changes: int) -> Ledger:
    return Ledger(**{"available": 6, "growth": 0, "safety": 0, "adapters": 6, "slots": 8, **changes})


def names(taken: list[Wish]) -> str:
    return "".join(wish.adapter for wish in taken)


WISHES = [Wish("a", 3), Wish("b", 4), Wish("a", 3), Wish("c", 2), Wish("d", 0), Wish("e", 2)]


@pytest.mark.parametrize(
    ("changes", "most", "taken"),
    [
        ({}, 9, "acd"),
        ({"available": 9, "adapters": 9}, 9, "abcd"),
        ({"growth": 1}, 9, "acd"),
        ({"growth": 2}, 9, "ad"),
        ({"growth": 2, "safety": 2}, 9, "cd"),
        ({"growth": 7}, 9, ""),
        ({"adapters": 2}, 9, "cd"),
        ({"slots": 2}, 9, "ac"),
        ({}, 1, "a"),
        ({}, 0, ""),
    ],
)
def test_first_fit_within_every_bound_of_the_ledger(changes: dict[str, int], most: int, taken: str) -> None:
    assert names(first_fit(WISHES, ledger(**changes), most)) == taken


PENDING = [Pending("a", 3, True), Pending("b", 2, False), Pending("c", 2, True), Pending("d", 0, True)]


@pytest.mark.parametrize(
    ("growth", "gone"),
    [
        (6, [("b", Obsolete.UNWANTED)]),
        (8, [("b", Obsolete.UNWANTED)]),
        (9, [("b", Obsolete.UNWANTED), ("c", Obsolete.PAGES)]),
        (10, [("b", Obsolete.UNWANTED), ("c", Obsolete.PAGES)]),
        (11, [("b", Obsolete.UNWANTED), ("c", Obsolete.PAGES), ("a", Obsolete.PAGES)]),
        (99, [("b", Obsolete.UNWANTED), ("c", Obsolete.PAGES), ("a", Obsolete.PAGES)]),
    ],
)
def test_unwanted_loads_go_then_the_newest_that_hold_pages(growth: int, gone: list[Any]) -> None:
    assert given_up(PENDING, ledger(growth=growth)) == gone


MALFORMED: dict[str, Callable[[], object]] = {
    "a negative figure": lambda: ledger(available=-1),
    "growth that shrinks": lambda: ledger(growth=-1),
    "a negative safety": lambda: ledger(safety=-2),
    "adapters beyond their limit": lambda: ledger(adapters=-1),
    "fewer slots than none": lambda: ledger(slots=-1),
    "half a page": lambda: ledger(available=2.5),  # type: ignore[arg-type]
    "true pages": lambda: ledger(available=True),
    "no figure": lambda: ledger(growth=None),  # type: ignore[arg-type]
    "a wish for nobody": lambda: Wish("", 1),
    "a wish for a number": lambda: Wish(7, 1),  # type: ignore[arg-type]
    "a wish that gives pages": lambda: Wish("a", -1),
    "a wish of text": lambda: Wish("a", "1"),  # type: ignore[arg-type]
    "one adapter in two sizes": lambda: first_fit([Wish("a", 1), Wish("a", 2)], ledger(), 2),
    "fewer loads than none": lambda: first_fit(WISHES, ledger(), -1),
    "a load of nobody": lambda: Pending("", 1, True),
    "a load that owes pages": lambda: Pending("a", -1, True),
    "a load that may be wanted": lambda: Pending("a", 1, None),  # type: ignore[arg-type]
    "one adapter loaded twice": lambda: given_up([Pending("a", 1, True)] * 2, ledger()),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_ledgers_are_refused(case: str) -> None:
    with pytest.raises(InternalFault) as caught:
        MALFORMED[case]()
    assert caught.value.code is ErrorCode.PREFETCH_LEDGER
