"""admit: requests at the head of the queue become running ones, through one joint transaction each.

A ready request gets a slot, its KV pages and a slot lease at once. A cold one reserves adapter pages and KV together
and starts the copy; it runs when the copy is published, and blocks nobody meanwhile.

Specification: 0x05C (joint admission), 0x09B (predicates), 0x04E (reserve, copy, validate, publish).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.core.events import RequestAdmitted
from loraplex.engine import residency
from loraplex.engine.records import LoadJob, Phase, RequestRecord
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Demand, Transaction
from loraplex.schedule.predicates import Readiness, eligible, load_eligible, readiness
from loraplex.schedule.queue import Ticket

LOOKAHEAD: Final = 64
"""Queue heads that one step looks at."""

MAX_SKIPS: Final = 256
"""Steps that a cold request may be passed over for lack of pages before younger ones wait for it."""


class Outcome(StrEnum):
    """What became of one head of the queue."""

    ADMITTED = "admitted"
    PARKED = "parked"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    GONE = "gone"


def admit(state: EngineState) -> None:
    """Admit from the head of the queue until slots, pages or the look-ahead run out."""
    held_back: list[Ticket] = []
    for _ in range(LOOKAHEAD):
        if state.table.free_slots - _slots_promised(state) <= 0:
            break
        ticket = state.queue.pop()
        if ticket is None:
            break
        record = state.records[ticket.request_id]
        match _try(state, record):
            case Outcome.BLOCKED:
                held_back.append(ticket)
                break
            case Outcome.SKIPPED:
                held_back.append(ticket)
                record.skipped += 1
                if record.skipped > MAX_SKIPS:
                    break
            case Outcome.PARKED:
                assert record.entry is not None
                state.queue.park(ticket, record.entry.key)
            case Outcome.ADMITTED | Outcome.GONE:
                pass
    for ticket in held_back:
        state.queue.push(ticket)


def _slots_promised(state: EngineState) -> int:
    return sum(
        1 for job in state.loads.values() if job.record is not None and job.record.phase is Phase.LOADING
    )


def _try(state: EngineState, record: RequestRecord) -> Outcome:
    if record.deadline_ns and record.outputs == 0 and state.clock.now_ns() > record.deadline_ns:
        state.end(
            record,
            error=CapacityError(
                ErrorCode.DEADLINE_EXCEEDED, "the request could not start before its deadline"
            ),
        )
        return Outcome.GONE
    entry = record.entry
    ready = readiness(entry)
    if ready is Readiness.LOADING:
        return Outcome.PARKED
    demand = demand_of(state, record, ready)
    held_back = Outcome.SKIPPED if ready is Readiness.COLD else Outcome.BLOCKED
    shortfall = demand.required - state.pool.free
    reclaimable = residency.reclaimable_pages(state, entry) if shortfall > 0 else 0
    if not eligible(ready, state.table.free_slots, demand, state.pool.free, reclaimable):
        return held_back
    if ready is Readiness.COLD and not _can_load(state, entry):
        return held_back
    shortfall = demand.required - state.pool.free
    if shortfall > 0 and not residency.evict_for(state, shortfall, entry):
        return held_back
    transaction = Transaction.reserve(state.next_transaction(), state.pool, demand, state.copy_fence)
    if transaction is None:
        return held_back
    record.transaction = transaction
    if ready is Readiness.COLD and entry is not None:
        record.phase = Phase.LOADING
        residency.start_load(state, entry, transaction, record=record)
    else:
        bind(state, record)
    return Outcome.ADMITTED


def _can_load(state: EngineState, entry: AdapterEntry | None) -> bool:
    """Whether a load may start now; frees an adapter slot for it where one can be had."""
    if entry is None or not load_eligible(entry):
        return False
    return state.directory.free > 0 or residency.evict_for(state, 1, entry)


def demand_of(state: EngineState, record: RequestRecord, ready: Readiness) -> Demand:
    """Pages of the joint reservation: adapter if cold, known tokens, growth horizon, guard."""
    kv, known = state.limits.kv, int(record.tokens.size)
    initial = kv.pages_for(known)
    horizon = min(state.limits.growth_horizon, max(record.remaining_outputs - 1, 0))
    adapter = record.entry.page_count if ready is Readiness.COLD and record.entry is not None else 0
    return Demand(adapter, initial, kv.pages_for(known + horizon) - initial, len(state.by_slot))


def bind(state: EngineState, record: RequestRecord) -> None:
    """Give an admitted request its slot, pages and slot lease; from here on it may take rows."""
    transaction = record.transaction
    assert transaction is not None
    table, sampling = state.table, record.sampling
    slot = table.open(record.tokens, record.prompt_tokens, sampling.max_tokens, record.ticket.order)
    incarnation = int(table.incarnation[slot])
    pages = transaction.commit_kv(slot, incarnation)
    transaction.close()
    record.transaction = None
    if record.revision is not None:
        lease = state.take_slot_lease(record)
        table.adapter_slot[slot], table.adapter_generation[slot] = lease.slot, lease.generation
    table.logprobs[slot] = sampling.logprobs
    table.prompt_logprobs[slot] = sampling.prompt_logprobs
    table.scored[slot] = record.scored
    state.deltas.open_request(record, slot, incarnation)
    state.deltas.page_table(table.add_pages(slot, pages))
    record.slot, record.phase, record.skipped = slot, Phase.RUNNING, 0
    state.by_slot[slot] = record
    now = state.clock.now_ns()
    state.emit(
        RequestAdmitted(now, record.request_id, now - record.arrival_ns, int(pages.size), record.admissions)
    )
    record.admissions += 1


def loaded(state: EngineState, job: LoadJob, intact: bool) -> None:
    """The copy that a request's admission started has ended: run the request, or end it typed."""
    record = job.record
    if record is None or record.phase is Phase.ENDED:
        if intact:
            job.transaction.close()
        return
    if intact:
        bind(state, record)
        return
    record.transaction = None
    state.end(
        record,
        error=residency.load_error(job.entry),
    )
