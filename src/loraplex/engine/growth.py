"""reserve: every selected row gets a page for its position, or leaves the selection.

Oldest requests get pages first. When the pool runs out, idle adapters go, then the youngest running request
is preempted: its pages return, its tokens stay, and it is computed again later with equal output. Nothing is
dropped.

Specification: 0x05 (joint pressure), rulings "Frontiers and depth", "Leases".
"""

from __future__ import annotations

import numpy as np

from loraplex.core.events import RequestPreempted
from loraplex.core.packed import I32
from loraplex.engine import accounts, endings, urgency
from loraplex.engine.request_state import RequestRecord, Stage
from loraplex.engine.residency import room
from loraplex.engine.state import EngineState
from loraplex.memory.pages import PageState
from loraplex.schedule.running import Slots
from loraplex.schedule.select import Selection


def grow(state: EngineState, selection: Selection) -> Selection:
    """The part of `selection` whose rows all have pages."""
    table, kv = state.table, state.limits.kv
    ends = table.planned[selection.slots] + selection.rows
    need = -(-ends // kv.page_tokens) - table.pages[selection.slots]
    keep = np.ones(selection.slots.size, dtype=np.bool_)
    wanting = np.flatnonzero((need > 0) & ~table.stopping[selection.slots])
    if wanting.size and int(need[wanting].sum()) <= state.available_pages:
        _give_all(state, selection.slots[wanting], need[wanting])
        wanting = wanting[:0]
    for index in wanting.tolist():
        slot = int(selection.slots[index])
        if not table.stopping[slot] and slot in state.by_slot:
            keep[index] = _give(state, slot, int(need[index]))
    alive = table.active[selection.slots] & ~table.stopping[selection.slots]
    if selection.slots.size and not (keep & alive).any() and not state.flights:
        _make_way(state)
    return selection.keep(keep & alive)


def _make_way(state: EngineState) -> None:
    """No selected row got its page and nothing is in flight that would free one: the youngest request gives
    way.

    The rows may all be young ones that took the whole budget, while an older request that could preempt them
    had none.
    """
    if len(state.by_slot) > 1:
        preempt(state, max(state.by_slot.values(), key=lambda record: record.ticket.order))


def _give_all(state: EngineState, slots: Slots, counts: I32) -> None:
    """Pages for every slot at once, where enough are free."""
    pages, txn = room.take_for_rows(state, int(counts.sum()))
    incarnations = state.table.incarnation[slots]
    state.pool.own(pages, txn, PageState.KV, np.repeat(slots, counts), np.repeat(incarnations, counts))
    state.deltas.page_table(state.table.add_pages_each(slots, counts, pages))


def _give(state: EngineState, slot: int, count: int) -> bool:
    while state.available_pages < count:
        if room.evict_for(state, count - state.available_pages):
            continue
        if not _preempt_younger(state, slot):
            return False
    pages, txn = room.take_for_rows(state, count)
    state.pool.own(pages, txn, PageState.KV, slot, int(state.table.incarnation[slot]))
    state.deltas.page_table(state.table.add_pages(slot, pages))
    return True


def _preempt_younger(state: EngineState, slot: int) -> bool:
    """Preempt the youngest request behind `slot`; False when none can give pages in this step."""
    if any(record.preempting for record in state.by_slot.values()):
        return False
    order = state.table.order[slot]
    younger = [r for r in state.by_slot.values() if r.ticket.order > order and r.stage is Stage.RUNNING]
    if not younger:
        return False
    victim = max(younger, key=lambda r: r.ticket.order)
    if state.table.inflight[victim.slot]:
        victim.preempting = True
        state.table.stopping[victim.slot] = True
        return False
    preempt(state, victim)
    return True


def preempt(state: EngineState, record: RequestRecord) -> None:
    """Take a running request off the device; it waits again with its arrival, tokens and revision lease."""
    table, slot = state.table, record.slot
    record.tokens = table.known_tokens(slot)
    record.scored = int(table.scored[slot])
    record.served = int(table.served[slot])
    state.emit(
        RequestPreempted(
            state.clock.now_ns(), record.request_id, int(table.pages[slot]), int(table.committed[slot])
        )
    )
    endings.release_slot(state, record)
    record.preempting = False
    state.preemptions += 1
    accounts.requeue(state, record)
    urgency.watch(state, record)
