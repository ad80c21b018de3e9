"""A request that cannot run now holds nobody up within the policy's bound: cold, infeasible, oversized, or
ready and without pages; and it is passed over itself no longer than that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.rig import Rig, both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core.events import RequestAdmitted
from loraplex.core.messages import SetLimits
from loraplex.engine.admission import TRIES
from loraplex.engine.request_state import Stage
from loraplex.schedule.policy import DEFICIT, POLICIES, Policy

EVERY = pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)


def admitted(rig: Rig) -> list[str]:
    return [event.request_id for event in rig.log.events if isinstance(event, RequestAdmitted)]


def crowded(depth: int, policy: Policy, **changes: int) -> Rig:
    """Eleven pages, of which one request holds five for a while."""
    rig = Rig(depth=depth, pages=12, growth_horizon=0, policy=policy, **changes)
    rig.submit("runs", prompt(16, 1), max_tokens=24)
    for _ in range(3):
        rig.step()
    return rig


@EVERY
@both_depths
def test_a_ready_request_without_pages_is_passed_over(depth: int, policy: Policy) -> None:
    rig = crowded(depth, policy)
    rig.submit("large", prompt(36, 2), max_tokens=2)
    rig.submit("small", prompt(4, 3), max_tokens=2)
    rig.step()
    assert admitted(rig) == ["runs", "small"]
    rig.run()
    rig.assert_answered("runs", "large", "small")


@both_depths
def test_it_is_passed_over_as_often_as_the_policy_says(depth: int) -> None:
    """One small request after the other, each of which could run beside the one before."""
    bound = 4
    rig = crowded(depth, replace(DEFICIT, bound=bound))
    rig.submit("large", prompt(36, 2), max_tokens=2)
    sent = 0
    while "large" not in admitted(rig):
        for _ in range(sum(record.stage is Stage.WAITING for record in rig.engine.state.records.values()), 3):
            sent += 1
            rig.submit(f"small{sent}", prompt(4, sent), max_tokens=2)
        rig.step()
        assert sent < 40
    order = admitted(rig)
    assert order.index("large") - 1 <= bound
    rig.run()
    rig.assert_answered(*rig.prompts)


@EVERY
def test_requests_behind_many_without_pages_are_reached_in_further_steps(policy: Policy) -> None:
    rig = crowded(1, policy)
    for index in range(TRIES + 4):
        rig.submit(f"large{index}", prompt(36, index), max_tokens=1)
    rig.submit("small", prompt(4, 3), max_tokens=2)
    rig.step()
    assert "small" not in admitted(rig)  # a step asks so many and no more
    rig.step()
    assert admitted(rig)[-1] == "small"
    rig.run()
    rig.assert_answered(*rig.prompts)


@EVERY
@both_depths
def test_a_cold_request_whose_load_never_ends_holds_nobody_up(depth: int, policy: Policy) -> None:
    rig = SlowRig(depth=depth, policy=policy)
    rig.register("a")
    rig.run()
    make_cold(rig, "a")
    rig.device.held = True
    rig.submit("cold", prompt(4, 1), "a", max_tokens=2)
    for index in range(6):
        rig.submit(f"r{index}", prompt(4, index + 2), max_tokens=3)
    for _ in range(30):
        rig.step()
    assert rig.engine.state.records["cold"].stage is Stage.LOADING
    rig.assert_answered(*(f"r{index}" for index in range(6)))
    rig.device.held = False
    rig.run()
    rig.assert_answered("cold")


@EVERY
def test_a_request_that_became_infeasible_is_refused_and_those_behind_it_run(policy: Policy) -> None:
    rig = SlowRig(policy=policy, max_requests=1)
    rig.register("a")
    rig.run()
    make_cold(rig, "a")
    rig.submit("runs", prompt(4, 1), max_tokens=6)
    rig.step()
    rig.submit("cold", prompt(4, 1), "a", max_tokens=2)
    rig.submit("behind", prompt(4, 2), max_tokens=2)
    rig.call(SetLimits, adapter_pages=1)
    rig.run()
    assert [end.code for end in rig.mailbox.ended["cold"]] == ["pool_exhausted"]
    rig.assert_answered("runs", "behind")


def test_an_oversized_request_is_refused_when_it_comes() -> None:
    rig = Rig(pages=12)
    rig.submit("oversized", prompt(40, 1), max_tokens=20)
    rig.submit("behind", prompt(4, 2), max_tokens=2)
    rig.step()
    assert [end.code for end in rig.mailbox.ended["oversized"]] == ["request_exceeds_pool"]
    rig.run()
    rig.assert_answered("behind")


@both_depths
def test_nobody_is_asked_again_before_something_of_the_room_changed(depth: int) -> None:
    rig = crowded(depth, DEFICIT)
    rig.submit("large", prompt(36, 2), max_tokens=2)
    rig.step()
    record = rig.engine.state.records["large"]
    before = record.skipped
    for _ in range(5):
        rig.step()
    assert rig.engine.state.fruitless is not None
    assert record.skipped == before
    rig.submit("small", prompt(4, 3), max_tokens=2)
    rig.step()
    assert record.skipped == before + 6  # steps that asked nobody count all the same
    rig.run()
    rig.assert_answered("runs", "large", "small")
