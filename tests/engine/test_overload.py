"""Early abort in the engine: who is refused before anything is spent, and a ledger that adds up."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.rig import Rig, both_depths
from tests.prompts import prompt

from loraplex.core.errors import CallerError
from loraplex.core.messages import Abort, Inspect

LIMIT_NS = 80_000
"""Eighty steps; a window of the estimates is ten."""


def ledger(rig: Rig) -> dict[str, int]:
    rig.calls += 1
    rig.mailbox.inbox.append(Inspect(rig.calls))
    rig.step()
    figures: dict[str, int] = rig.mailbox.replies[rig.calls].body["early_abort"]
    return figures


def rig_of(depth: int, **changes: Any) -> Rig:
    fields = {"early_abort_ns": LIMIT_NS, "max_requests": 2}
    return Rig(depth=depth, pages=65, growth_horizon=0, **{**fields, **changes})


def codes(rig: Rig) -> dict[str, str | None]:
    return {name: ended[0].code for name, ended in rig.mailbox.ended.items()}


@both_depths
def test_who_cannot_be_in_time_is_refused_while_others_run(depth: int) -> None:
    rig = rig_of(depth, max_requests=1, max_model_len=200)
    rig.submit("long", prompt(4, 1), max_tokens=120)
    rig.step()
    rig.submit("late", prompt(4, 2), max_tokens=2)
    for _ in range(80):
        rig.step()
    assert "late" not in rig.mailbox.ended  # a prefill takes about nothing on this device
    for _ in range(3):
        rig.step()
    assert codes(rig)["late"] == "early_abort"
    rig.run()
    rig.assert_answered("long")
    assert ledger(rig) == {
        "offered": 2, "refused": 0, "rejected": 1, "served": 1, "withdrawn": 0, "open": 0
    }  # fmt: skip


@both_depths
def test_under_overload_the_newest_are_served_and_nobody_is_left_out(depth: int) -> None:
    rig = rig_of(depth)
    for index in range(120):
        rig.submit(f"r{index}", prompt(4, index), max_tokens=4)
        rig.step()
    figures = ledger(rig)
    assert figures["offered"] == 120 == sum(figures.values()) - figures["offered"]
    rig.run()
    ended = codes(rig)
    rejected = [int(name[1:]) for name, code in ended.items() if code == "early_abort"]
    served = [name for name, code in ended.items() if code is None]
    assert len(ended) == 120
    assert rejected
    assert max(rejected) < 119  # the last ones arrived when the newest were kept
    rig.assert_answered(*served)
    assert ledger(rig) == {
        "offered": 120, "refused": 0, "rejected": len(rejected), "served": len(served), "withdrawn": 0,
        "open": 0,
    }  # fmt: skip
    assert len(served) > 120 // 3  # places were never empty


@both_depths
def test_what_is_refused_at_the_door_or_withdrawn_is_offered_too(depth: int) -> None:
    rig = rig_of(depth)
    rig.submit("a", prompt(4, 1), max_tokens=2)
    rig.submit("nobody", prompt(4, 1), "unknown")
    rig.submit("gone", prompt(4, 1), max_tokens=2)
    rig.mailbox.inbox.append(Abort("gone"))
    rig.run()
    assert ledger(rig) == {
        "offered": 3, "refused": 1, "rejected": 0, "served": 1, "withdrawn": 1, "open": 0
    }  # fmt: skip


def test_a_burst_that_can_be_served_in_time_is_served() -> None:
    """Arrivals exceed admissions for a moment only."""
    rig = rig_of(1)
    for index in range(8):
        rig.submit(f"r{index}", prompt(4, index), max_tokens=4)
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert ledger(rig)["served"] == 8


def test_without_the_option_nobody_is_refused_and_nothing_is_counted() -> None:
    rig = rig_of(1, early_abort_ns=0)
    rig.submit("a", prompt(4, 1), max_tokens=2)
    assert ledger(rig) is None
    with pytest.raises(CallerError, match="early_abort_ns must be at least 0"):
        rig_of(1, early_abort_ns=-1)
