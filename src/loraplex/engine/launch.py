"""plan and execute: a selection becomes a frozen plan, is validated against current state, and is launched.

Launch validation compares every generation that the plan observed with its owner's (0x01G): request
incarnation and planned frontier, adapter slot and its lease. A plan that no longer fits is discarded before
anything moved.
"""

from __future__ import annotations

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import PlanDiscarded
from loraplex.core.plan import BatchPlan
from loraplex.core.plan_check import check_plan
from loraplex.core.ports import Backend
from loraplex.engine import constraints
from loraplex.engine.state import EngineState, Flight
from loraplex.memory.pages import PageState
from loraplex.schedule.planner import plan_selection
from loraplex.schedule.select import Selection


def make_flight(state: EngineState, selection: Selection) -> Flight | None:
    """Plan the selection and the pending deltas; None when there is neither.

    While copies are under way a plan without either asks how they are, once nothing else is in flight: a
    backend may take its time over such a plan, and a request may wait for the commit of the one before it.
    """
    started = state.clock.now_ns()
    selection, masks = constraints.masks_for(state, selection)
    if not selection.slots.size and not state.deltas and (state.flights or not state.copying):
        return None
    deltas = state.deltas.take(state.table, state.loads, state.directory)
    plan = plan_selection(
        state.table,
        selection,
        generation=state.newest_launch + 1,
        newest_launched=state.newest_in_flight,
        deltas=deltas,
        masks=masks,
    )
    return Flight(plan, selection, deltas, state.clock.now_ns() - started)


def launch(state: EngineState, backend: Backend, flight: Flight) -> bool:
    """Validate and launch; False when the plan was discarded and must be built again."""
    plan = flight.plan
    try:
        check_plan(plan, state.limits.bounds)
        validate_launch(state, plan)
    except InternalFault as fault:
        state.emit(PlanDiscarded(state.clock.now_ns(), plan.generation, fault.code.value, fault.message))
        state.deltas.restore(flight.deltas)
        if fault.code not in _REBUILDABLE:
            raise
        return False
    backend.launch(plan.pack())
    state.newest_launch = plan.generation
    selection = flight.selection
    state.table.advance_planned(selection.slots, selection.rows, selection.samples)
    samplers = plan.sample_slots.astype(np.int64)
    state.table.note_samples(selection.slots, samplers, plan.generation)
    entry_of_slot, generation = state.entry_of_slot, plan.generation
    for slot in plan.group_adapters.tolist():
        entry_of_slot[slot].last_launch = generation
    state.pool.name(plan.scrub_pages, plan.generation)
    state.pool.slabs.name(plan.scrub_blocks, plan.generation)
    state.flights.append(flight)
    return True


def _validate_adapters(state: EngineState, plan: BatchPlan) -> None:
    """Each row names what its request leased, or the base before an invocation, and each leased slot still
    holds that generation, published.

    The plan's groups are its distinct adapters: `check_plan` has seen to that.
    """
    table, slots = state.table, plan.requests.slot
    adapters, generations = plan.requests.adapter_slot, plan.requests.adapter_generation
    acting, at = table.acting(slots)
    wrong = (acting != adapters) | (at != generations)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        slot = int(slots[index])
        leased = (int(acting[index]), int(at[index]))
        named = (int(adapters[index]), int(generations[index]))
        raise InternalFault(
            ErrorCode.STALE_SLOT_GENERATION,
            f"request slot {slot} leased adapter slot {leased}, the plan names {named}",
        )
    current = np.zeros(state.limits.max_adapter_slots, dtype=np.int32)
    current[adapters] = generations
    if (current[adapters] != generations).any():
        raise InternalFault(ErrorCode.STALE_SLOT_GENERATION, "one adapter slot is named at two generations")
    distinct, occupied = plan.group_adapters, state.occupied
    for adapter, generation in zip(distinct.tolist(), current[distinct].tolist(), strict=True):
        entry = occupied.get(adapter)
        if entry is None or entry.generation != generation or not entry.resident:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"adapter slot {adapter} is not published at generation {generation}",
            )


_REBUILDABLE = frozenset(
    {ErrorCode.STALE_REQUEST_GENERATION, ErrorCode.STALE_SLOT_GENERATION, ErrorCode.STALE_KV_FRONTIER}
)


def validate_launch(state: EngineState, plan: BatchPlan) -> None:
    """Compare each generation in the plan with its owner's; raises the stale component's code."""
    table, requests = state.table, plan.requests
    slots = requests.slot
    live = table.active[slots] & ~table.stopping[slots]
    if not live.all() or not np.array_equal(table.incarnation[slots], requests.incarnation):
        raise InternalFault(
            ErrorCode.STALE_REQUEST_GENERATION, "a planned request has ended or was preempted"
        )
    if not np.array_equal(table.planned_generation[slots], requests.frontier) or not np.array_equal(
        table.planned[slots], requests.kv_start
    ):
        raise InternalFault(
            ErrorCode.STALE_KV_FRONTIER, "a request's planned frontier moved since the plan was made"
        )
    ends = requests.kv_end
    if (table.pages[slots] * state.limits.kv.page_tokens < ends).any():
        raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, "a row has no page for its position")
    _validate_adapters(state, plan)
    owned = table.page_table[plan.page_deltas.slot, plan.page_deltas.index]
    if not np.array_equal(owned, plan.page_deltas.page):
        raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, "a page delta disagrees with its request's page table")
    grown = np.unique(plan.page_deltas.slot)
    if grown.size:
        pages, owners, blocks = table.pages_each(grown)
        own, cached = blocks == 0, blocks > 0
        sound = state.pool.owners(pages[own], PageState.KV, owners[own], table.incarnation[owners[own]])
        if not sound or not state.pool.owners(pages[cached], PageState.PREFIX, blocks[cached], 0):
            raise InternalFault(
                ErrorCode.PLAN_PAGE_TABLE,
                f"a request in slots {grown.tolist()} names a page that is neither its own nor a cached "
                "block's",
            )
