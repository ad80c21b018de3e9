"""Deadlines of first tokens in the engine: refused in time wherever a request stands, and urgent
before that.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.rig import Rig, both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core.events import RequestAdmitted
from loraplex.engine.request_state import Stage

STEP = 1000
"""Nanoseconds of the rig's clock between two steps."""


def due_in(rig: Rig, name: str, steps: int, adapter: str | None = None, **changes: Any) -> int:
    """A request whose deadline is so many steps away; the deadline."""
    rig.submit(name, prompt(4, 7), adapter, **changes)
    deadline = rig.clock.now + steps * STEP
    rig.mailbox.inbox[-1] = _with(rig.mailbox.inbox[-1], deadline_ns=deadline, arrival_ns=rig.clock.now)
    return deadline


def _with(message: Any, **fields: Any) -> Any:
    return type(message)(**{**{n: getattr(message, n) for n in message.__struct_fields__}, **fields})


def refused_at(rig: Rig, name: str, limit: int = 60) -> int:
    for _ in range(limit):
        rig.step()
        if name in rig.mailbox.ended:
            assert [end.code for end in rig.mailbox.ended[name]] == ["deadline_exceeded"]
            return rig.clock.now
    raise AssertionError(f"{name} is still open")


@both_depths
def test_a_full_server_refuses_in_time(depth: int) -> None:
    rig = Rig(depth=depth, max_requests=1)
    rig.submit("runs", prompt(4, 1), max_tokens=50)
    rig.step()
    deadline = due_in(rig, "waits", 20)
    assert refused_at(rig, "waits") <= deadline + STEP
    rig.run()
    rig.assert_answered("runs")


@both_depths
def test_a_parked_request_is_refused_in_time(depth: int) -> None:
    """Its adapter's image never arrives; nobody unparks it."""
    rig = SlowRig(depth=depth, host_bytes=1 << 20)
    rig.loader.held = True
    rig.register("a")
    for _ in range(3):
        rig.step()
    deadline = due_in(rig, "waits", 20, "a")
    for _ in range(5):
        rig.step()
    assert rig.engine.state.queue._parked
    assert refused_at(rig, "waits") <= deadline + STEP
    assert not rig.engine.state.queue._parked
    rig.loader.held = False
    rig.run()


@both_depths
def test_a_request_whose_adapter_is_being_loaded_is_refused_in_time(depth: int) -> None:
    rig = SlowRig(depth=depth)
    rig.register("a")
    rig.run()
    make_cold(rig, "a")
    rig.device.held = True
    deadline = due_in(rig, "waits", 20, "a")
    rig.step()
    rig.step()
    assert rig.engine.state.records["waits"].stage is Stage.LOADING
    assert refused_at(rig, "waits") <= deadline + STEP
    rig.device.held = False
    rig.submit("next", prompt(4, 3), "a")
    rig.run()
    rig.assert_answered("next")


def test_who_cannot_make_it_any_more_is_refused_before_the_deadline() -> None:
    """Prefill takes 1,000 ns a row by what was measured: 12 rows do not come in what is left."""
    rig = Rig(max_requests=1, token_budget=16)
    rig.submit("runs", prompt(4, 1), max_tokens=50)
    rig.step()
    for rows in (4, 8, 16, 12):
        rig.engine.state.estimates.note_step(rows, rows * STEP)
    rig.submit("waits", prompt(12, 2))
    deadline = rig.clock.now + 30 * STEP
    rig.mailbox.inbox[-1] = _with(rig.mailbox.inbox[-1], deadline_ns=deadline, arrival_ns=rig.clock.now)
    at = refused_at(rig, "waits")
    assert deadline - 13 * STEP < at <= deadline - 11 * STEP
    assert "12.0" not in rig.mailbox.ended["waits"][0].message  # milliseconds, not steps
    assert "0.0 ms" in rig.mailbox.ended["waits"][0].message


def test_a_load_that_takes_longer_than_what_is_left_is_refused_at_once() -> None:
    rig = SlowRig(max_requests=2)
    rig.register("a")
    rig.run()
    make_cold(rig, "a")
    rig.engine.state.estimates.note_load(1, 1 << 30)
    deadline = due_in(rig, "waits", 50, "a")
    rig.step()
    assert [end.code for end in rig.mailbox.ended["waits"]] == ["deadline_exceeded"]
    assert rig.clock.now < deadline
    due_in(rig, "base", 50)
    rig.run()
    rig.assert_answered("base")


@pytest.mark.parametrize(("steps", "first"), [(40, "pressed"), (400, "older")])
def test_half_of_its_time_gone_a_request_goes_before_its_priority(steps: int, first: str) -> None:
    rig = Rig(max_requests=1)
    rig.submit("runs", prompt(4, 1), max_tokens=25)
    rig.step()
    rig.submit("older", prompt(4, 2), max_tokens=2)
    rig.step()
    due_in(rig, "pressed", steps, max_tokens=2)
    rig.run()
    admitted = [event.request_id for event in rig.log.events if isinstance(event, RequestAdmitted)]
    assert admitted[1] == first
    rig.assert_answered("runs", "older", "pressed")


def test_a_first_token_in_time_lets_the_answer_take_as_long_as_it_does() -> None:
    rig = Rig(max_requests=2)
    due_in(rig, "r", 6, max_tokens=40)
    rig.run()
    rig.assert_answered("r")
    assert len(rig.engine.state.deadlines) == 0
