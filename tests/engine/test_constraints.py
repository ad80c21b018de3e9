"""Constrained output in the engine: masks follow committed tokens, and only the constrained request waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.engine.chains import Chains, chained
from tests.engine.rig import VOCAB, Rig, both_depths
from tests.prompts import prompt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import PlanDiscarded, RequestPreempted, StepFailed
from loraplex.core.plan import BatchPlan
from loraplex.core.plan_check import check_plan


def make(depth: int, grammars: Chains, **changes: int) -> Rig:
    return Rig(depth=depth, grammars=grammars, **changes)


@both_depths
def test_output_follows_the_grammar_and_ends_with_it(depth: int) -> None:
    rig = make(depth, Chains())
    rig.submit("held", prompt(7, 1), grammar="9", max_tokens=20)
    rig.submit("short", prompt(7, 2), grammar="9", max_tokens=4)
    for index in range(3):
        rig.submit(f"free{index}", prompt(6, 3 + index))
    rig.run()
    assert rig.mailbox.tokens["held"] == chained(prompt(7, 1), 9)
    assert rig.mailbox.tokens["short"] == chained(prompt(7, 2), 9)[:4]
    assert [e.finish_reason for e in rig.mailbox.ended["held"]] == ["stop"]
    assert [e.finish_reason for e in rig.mailbox.ended["short"]] == ["length"]
    rig.assert_answered("free0", "free1", "free2")


def test_at_depth_one_only_the_held_request_waits() -> None:
    rig = make(1, Chains(), pages=65)
    rig.submit("held", prompt(5, 1), grammar="12", max_tokens=20)
    for index in range(3):
        rig.submit(f"free{index}", prompt(5, 3 + index), max_tokens=30)
    rig.run()
    plans = [BatchPlan.unpack(plan) for plan in rig.device.plans]
    sampled = [plan for plan in plans if len(plan.samples)]
    held = [index for index, plan in enumerate(sampled) if plan.mask_samples.size]
    assert len(held) == 12
    assert min(np.diff(held)) >= 2, "a plan was made before the token that its mask needs"
    free = [len(plan.samples) - plan.mask_samples.size for plan in sampled[1:29]]
    assert free == [3] * len(free), "somebody else waited"
    assert all(plan.reference < 0 for plan in sampled if len(plan.samples) == plan.mask_samples.size)


@both_depths
def test_preemption_keeps_the_place_in_the_grammar(depth: int) -> None:
    rig = make(depth, Chains(), pages=17, growth_horizon=0)
    for index in range(6):
        rig.submit(f"r{index}", prompt(6, index), max_tokens=20, grammar="20" if index % 2 else None)
    rig.run()
    assert any(isinstance(event, RequestPreempted) for event in rig.log.events)
    for index in range(6):
        expected = chained(prompt(6, index), 20) if index % 2 else rig.expected(f"r{index}")
        assert rig.mailbox.tokens[f"r{index}"] == expected


@both_depths
def test_a_discarded_plan_and_a_failed_one(depth: int) -> None:
    rig = make(depth, Chains())
    rig.faults.stale_plans |= {3}
    rig.submit("held", prompt(7, 1), grammar="9", max_tokens=20)
    rig.run()
    assert any(isinstance(event, PlanDiscarded) for event in rig.log.events)
    assert rig.mailbox.tokens["held"] == chained(prompt(7, 1), 9)
    rig.faults.fail_plans |= {rig.engine.state.newest_launch + 3}
    rig.submit("lost", prompt(7, 1), grammar="9", max_tokens=20)
    rig.run()
    assert any(isinstance(event, StepFailed) for event in rig.log.events)
    assert [e.code for e in rig.mailbox.ended["lost"]] == ["backend_failed"]


@both_depths
def test_a_grammar_that_is_being_compiled_holds_nobody_up(depth: int) -> None:
    grammars = Chains(late=20)
    rig = make(depth, grammars, pages=65)
    rig.submit("held", prompt(7, 1), grammar="5", max_tokens=20)
    rig.submit("free", prompt(7, 2), max_tokens=6)
    for _ in range(12):
        rig.step()
    assert rig.mailbox.ended.get("free")
    assert "held" not in rig.mailbox.tokens
    rig.run()
    rig.assert_answered("free")
    assert rig.mailbox.tokens["held"] == chained(prompt(7, 1), 5)


@both_depths
def test_refused_and_stuck_grammars_end_their_own_request(depth: int) -> None:
    grammars = Chains()
    rig = make(depth, grammars)
    rig.submit("bad", prompt(7, 1), grammar="x")
    rig.submit("free", prompt(7, 2))
    rig.run()
    grammars.stuck = True
    rig.submit("stuck", prompt(20, 3), grammar="5")
    rig.submit("also", prompt(7, 4))
    rig.run()
    rig.assert_answered("free", "also")
    for name in ("bad", "stuck"):
        assert [e.code for e in rig.mailbox.ended[name]] == ["schema_unsupported"], name
        assert name not in rig.mailbox.tokens


def test_an_engine_without_grammars_refuses() -> None:
    rig = Rig()
    rig.submit("r", prompt(7, 1), grammar="5")
    rig.run()
    assert [e.code for e in rig.mailbox.ended["r"]] == ["unsupported_option"]


def masked_plan() -> BatchPlan:
    rig = make(0, Chains())
    rig.submit("free", prompt(7, 2))
    rig.submit("held", prompt(7, 1), grammar="9", max_tokens=20)
    rig.run()
    plans = [BatchPlan.unpack(plan) for plan in rig.device.plans]
    return next(plan for plan in plans if plan.mask_samples.size and len(plan.samples) == 2)


@pytest.mark.parametrize("fault", ["words", "sample", "twice", "nothing", "beyond"])
def test_a_mask_that_does_not_fit_its_plan_is_refused(fault: str) -> None:
    plan, bounds = masked_plan(), make(0, Chains()).limits.bounds
    check_plan(plan, bounds)
    samples, mask = plan.mask_samples.copy(), plan.mask_words.copy()
    match fault:
        case "words":
            mask = mask[:-1]
        case "sample":
            samples = samples + 2
        case "twice":
            samples, mask = np.repeat(samples, 2), np.tile(mask, 2)
        case "nothing":
            mask[:] = 0
        case "beyond":
            mask[-1] |= np.int32(1 << (VOCAB % 32))
    broken = replace(plan, mask_samples=samples, mask_words=mask)
    with pytest.raises(InternalFault) as refused:
        check_plan(broken, bounds)
    assert refused.value.code is ErrorCode.PLAN_MASKS
