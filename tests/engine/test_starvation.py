"""A cold request among ready ones that never stop coming: how long it waits at most, counted in steps."""

from __future__ import annotations

import pytest
from tests.engine.rig import Rig
from tests.prompts import prompt

from loraplex.core.events import RequestAdmitted
from loraplex.engine.request_state import Stage
from loraplex.schedule.policy import DEFICIT

ANSWER = 12
"""Tokens of each ready request's answer, the longest that runs."""
LOAD = 8
"""Steps beside the bound: of the copy, of plans in flight, of the first row."""


def busy(depth: int) -> Rig:
    """Twelve pages, three ready requests of up to four pages that run and end one after the other, and an
    adapter of ten pages that is cold.
    """
    rig = Rig(depth=depth, pages=13, growth_horizon=0, max_requests=8)
    for index in range(3):
        rig.submit(f"first{index}", prompt(4, index), None, max_tokens=ANSWER - 4 * index)
    for _ in range(3):
        rig.step()
    rig.register("cold", pages=10)
    rig.step()
    assert not rig.engine.state.adapters["cold"].resident
    return rig


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cold_request_waits_no_longer_than_its_skips_and_one_answer(depth: int) -> None:
    """A ready request comes for each that ends: the pool is never empty before its turn has come."""
    rig = busy(depth)
    state = rig.engine.state
    rig.submit("cold", prompt(4, 9), "cold", max_tokens=2)
    waited = turn = sent = 0
    for _ in range(DEFICIT.bound + ANSWER + LOAD):
        live = sum(record.entry is None for record in state.records.values())
        for _ in range(live, 5):
            sent += 1
            rig.submit(f"r{sent}", prompt(4, sent), None, max_tokens=ANSWER - 3 * (sent % 3))
        rig.step()
        record = state.records.get("cold")
        if record is None or record.stage is not Stage.WAITING:
            break
        waited += 1
        turn = turn or (waited if record.owed else 0)
    assert turn > 0  # it was passed over until its turn came
    assert waited - turn <= ANSWER + LOAD
    rig.run()
    rig.assert_answered("cold")
    admitted = [event.request_id for event in rig.log.events if isinstance(event, RequestAdmitted)]
    assert admitted.index("cold") > DEFICIT.bound // ANSWER  # others ran meanwhile


def test_nobody_younger_is_admitted_once_its_turn_has_come() -> None:
    rig = busy(1)
    rig.submit("cold", prompt(4, 9), "cold", max_tokens=2)
    rig.step()
    rig.engine.state.records["cold"].skipped = DEFICIT.bound
    rig.step()
    rig.submit("younger", prompt(4, 3), None, max_tokens=2)
    rig.run()
    admitted = [event.request_id for event in rig.log.events if isinstance(event, RequestAdmitted)]
    assert admitted[-2:] == ["cold", "younger"]
    rig.assert_answered(*rig.prompts)
