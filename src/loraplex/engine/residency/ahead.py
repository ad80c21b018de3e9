"""Loads ahead of the requests that wait for a place to run, and those of them that are given up.

What to load and what to give up is `schedule.prefetch`'s word; here wishes and the ledger are read off the
engine's state, and the word is carried out. A load whose copy has begun is left alone: it becomes an ordinary
entry, and counts as wasted if nobody uses it.

Specification: 0x09F (prefetch), 0x09J (one ledger), 0x09L (a prediction that became obsolete).
"""

from __future__ import annotations

from typing import Final

from loraplex.core import limits
from loraplex.core.events import PrefetchWithdrawn
from loraplex.engine.request_state import LoadJob, Purpose
from loraplex.engine.residency import hosting, loads, room
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.schedule.prefetch import Ledger, Pending, Wish, first_fit, given_up

LOOKAHEAD: Final = 16
"""Waiting requests whose adapters are wished for."""


def load_ahead(state: EngineState) -> None:
    """Give up loads ahead that became obsolete, and begin others where there is room."""
    pending = [job for job in state.loads.values() if job.purpose is Purpose.AHEAD and not job.started]
    if pending:
        _give_up(state, pending, _ledger(state))
    under_way = sum(job.purpose.speculative for job in state.loads.values())
    places = min(limits.MAX_SPECULATIVE_LOADS - under_way, state.limits.copies_in_flight - len(state.loads))
    if places <= 0 or not len(state.queue):
        return
    wishes = _wishes(state)
    for wish in first_fit(wishes, _ledger(state), places) if wishes else ():
        entry = state.adapters[wish.adapter]
        demand = room.demand(state, entry, guard=len(state.by_slot))
        transaction = room.take_spare(state, demand, entry)
        if transaction is not None:  # of two that counted on one free block, the second may find none
            loads.begin(state, entry, transaction, Purpose.AHEAD)


def _ledger(state: EngineState) -> Ledger:
    slots = min(state.caps.resident_adapters, state.limits.max_adapter_slots - 1)
    return Ledger(
        available=state.available_pages,
        growth=room.committed_growth(state),
        safety=len(state.by_slot),
        adapters=max(state.caps.adapter_pages - state.adapter_pages, 0),
        slots=max(slots - len(state.occupied), 0),
    )


def _wishes(state: EngineState) -> list[Wish]:
    """What the requests next in the queue need on the device. Images that are not in host memory are sent
    for.
    """
    wishes = []
    now = state.clock.now_ns()
    for request_id in state.queue.heads(LOOKAHEAD):
        entry = state.records[request_id].entry
        if entry is None or entry.removing or now < entry.retry_at_ns:
            continue
        if entry.state is AdapterState.ABSENT:
            hosting.want(state, entry, speculative=True)
        elif entry.state is AdapterState.HOST_READY:
            wishes.append(Wish(entry.key, room.demand(state, entry).adapter))
    return wishes


def _give_up(state: EngineState, pending: list[LoadJob], ledger: Ledger) -> None:
    jobs = {f"{job.slot}@{job.generation}": job for job in pending}
    held = [Pending(load, _reserved(job), _wanted(state, job.entry)) for load, job in jobs.items()]
    for load, reason in given_up(held, ledger):
        job = jobs[load]
        state.speculation.withdrawn += 1
        pages = _reserved(job)
        loads.withdraw(state, job)
        state.emit(PrefetchWithdrawn(state.clock.now_ns(), job.entry.key, pages, reason.value))


def _reserved(job: LoadJob) -> int:
    """Pages that go back with a load: none for one that shares a slab page."""
    return int(job.transaction.adapter_pages.size)


def _wanted(state: EngineState, entry: AdapterEntry) -> bool:
    """Whether a request leased the revision or an operator asked for it."""
    return entry.revision_leases > 0 or any(wanted.entry is entry for wanted in state.wants)
