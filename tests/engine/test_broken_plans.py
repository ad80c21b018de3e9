"""Plans that a broken scheduler would make, in the running engine: each is refused by the code of its failure
(0x0DB) before it runs, and the next plan serves everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.engine.rig import Rig, both_depths
from tests.prompts import prompt
from tests.sections import changed

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import PlanDiscarded
from loraplex.core.plan import BatchPlan
from loraplex.engine import launch
from loraplex.engine.state import EngineState, Flight
from loraplex.schedule.select import Selection

Change = Callable[[BatchPlan], BatchPlan]


def part(name: str, select: Callable[[Any], Any]) -> Change:
    return lambda plan: replace(plan, **{name: select(getattr(plan, name))})


def moved(index: int, by: int) -> Callable[[np.ndarray], np.ndarray]:
    def move(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] += by
        return array

    return move


def repeated(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[1] = array[0]
    return array


BROKEN: dict[str, tuple[Change, ErrorCode]] = {
    "row_permutation_not_bijective": (part("group_rows", repeated), ErrorCode.PLAN_GROUPS),
    "segment_identity_drift": (part("segment_adapters", lambda a: np.roll(a, 1)), ErrorCode.PLAN_SEGMENTS),
    "combine_metadata_loss": (part("group_adapters", lambda a: a[::-1].copy()), ErrorCode.PLAN_GROUPS),
    "phase_row_count_drift": (part("doff", lambda doff: doff - 1), ErrorCode.PLAN_PHASE_BOUNDARY),
    "sampling_inverse_missing": (
        part("samples", lambda s: s[[1, 0, *range(2, len(s))]]),
        ErrorCode.PLAN_SAMPLE_ROWS,
    ),
    "attention_boundary_alias": (part("prefill_indptr", moved(1, 1)), ErrorCode.PLAN_PHASE_BOUNDARY),
    "page_named_by_two": (
        part("page_deltas", lambda d: changed(d, 0, page=lambda page: page + 1)),
        ErrorCode.PLAN_PAGE_TABLE,
    ),
    "token_reference_astray": (
        lambda plan: replace(plan, reference=plan.generation),
        ErrorCode.PLAN_TOKEN_REFERENCE,
    ),
}


def mixed(depth: int) -> Rig:
    """Three requests that decode, two of them under adapters; two more arrive."""
    rig = Rig(depth=depth, pages=65)
    for key in "ab":
        rig.register(key)
    rig.run()
    for index, key in enumerate(("a", "b", None)):
        rig.submit(f"decodes{index}", prompt(5, index), key, max_tokens=20)
    while len([name for name in rig.prompts if rig.mailbox.tokens.get(name)]) < len(rig.prompts):
        rig.step()
    for index, key in enumerate(("a", "b")):
        rig.submit(f"arrives{index}", prompt(5, 8 + index), key)
    return rig


@both_depths
@pytest.mark.parametrize("failure", BROKEN)
def test_a_broken_plan_is_refused_before_it_runs(
    failure: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, code = BROKEN[failure]
    rig, real, launched, broken = mixed(depth), launch.make_flight, list[int](), list[int]()
    rig.device.on_plan = lambda plan, _: launched.append(plan.generation)

    def make_flight(state: EngineState, selection: Selection) -> Flight | None:
        flight = real(state, selection)
        if flight is None or flight.plan.prefills < 2 or broken:
            return flight
        broken.append(flight.plan.generation)
        return replace(flight, plan=change(flight.plan))

    monkeypatch.setattr(launch, "make_flight", make_flight)
    with pytest.raises(InternalFault) as refused:
        rig.run()
    assert refused.value.code is code
    assert broken[0] not in launched
    rig.run()
    assert broken[0] in launched
    discarded = [event for event in rig.log.events if isinstance(event, PlanDiscarded)]
    assert [(event.step, event.code) for event in discarded] == [(broken[0], code.value)]
    rig.assert_answered(*rig.prompts)
