"""Early abort: who is too late, how rates follow, and a ledger that leaves nobody out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.schedule.early_abort import AbortLedger, MovingRate, Offered, chosen


def test_the_last_moment_is_in_time() -> None:
    one = Offered("q", 10, 3)
    assert one.latest_start(20) == 27
    assert chosen([one], 27, 20, 1, 0, 0) == ["q"]
    assert chosen([one], 28, 20, 1, 0, 0) == []


def test_a_rate_follows_its_windows() -> None:
    rate = MovingRate(10, 100)
    rate.note(101, 4)
    assert rate.at(109) == 0.0  # its first window is not over
    assert rate.at(110) == pytest.approx(2.8)
    rate.note(119)
    assert rate.at(120) == pytest.approx(0.7 + 0.3 * 2.8)
    assert rate.at(130) == pytest.approx(0.3 * (0.7 + 0.3 * 2.8))
    assert rate.at(10_000_000) == 0.0
    rate.note(10_000_001, 10)
    assert rate.at(10_000_010) == pytest.approx(7.0)


QUEUE = [Offered("a", 1, 1), Offered("b", 2, 1)]
ROW: dict[str, int] = {"offered": 9, "refused": 1, "rejected": 2, "served": 3, "withdrawn": 1, "open": 2}
MALFORMED: dict[str, Callable[[], object]] = {
    "nobody": lambda: Offered("", 1, 1),
    "a number for a name": lambda: Offered(3, 1, 1),  # type: ignore[arg-type]
    "an arrival before time": lambda: Offered("a", -1, 1),
    "a fraction of an arrival": lambda: Offered("a", 0.5, 1),  # type: ignore[arg-type]
    "a prefill that gives time": lambda: Offered("a", 1, -1),
    "an arrival that has not come": lambda: chosen(QUEUE, 1, 9, 2, 1, 1),
    "arrivals out of order": lambda: chosen(QUEUE[::-1], 9, 9, 2, 1, 1),
    "one request twice": lambda: chosen(QUEUE[:1] * 2, 9, 9, 2, 1, 1),
    "a negative limit": lambda: chosen(QUEUE, 9, -9, 2, 1, 1),
    "a negative moment": lambda: chosen([], -1, 9, 2, 1, 1),
    "fewer than none served": lambda: chosen(QUEUE, 9, 9, -2, 1, 1),
    "a negative rate": lambda: chosen(QUEUE, 9, 9, 2, -1.0, 1),
    "no rate": lambda: chosen(QUEUE, 9, 9, 2, 1, float("nan")),
    **{
        f"{name} left out": lambda name=name: AbortLedger(**{**ROW, name: 0})  # type: ignore[misc]
        for name in ("offered", "refused", "rejected", "served", "withdrawn", "open")
    },
    "rejected twice": lambda: AbortLedger(**{**ROW, "rejected": 3}),
    "a negative count": lambda: AbortLedger(**{**ROW, "served": -3, "open": 8}),
    "a count of text": lambda: AbortLedger(**{**ROW, "served": "3"}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_claims_are_refused(case: str) -> None:
    with pytest.raises(InternalFault) as caught:
        MALFORMED[case]()
    assert caught.value.code is ErrorCode.ABORT_LEDGER


def test_a_ledger_that_adds_up() -> None:
    whole: Any = AbortLedger(**ROW)
    assert whole.offered == 9
