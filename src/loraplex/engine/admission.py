"""admit: requests at the head of the queue become running ones, through one joint transaction each.

A ready request gets a slot, its KV pages and a slot lease at once. A cold one reserves adapter pages and KV
together and starts the copy; it runs when the copy is published, and blocks nobody meanwhile. What is cached
of a request is looked up and referenced before its reservation, which leaves it out; who waits for a block
that is being computed blocks nobody.

Specification: 0x05C (joint admission), 0x08I (look-up), 0x09B (predicates), 0x04E (reserve, copy, validate,
publish).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Final

from loraplex.core.errors import CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.events import RequestAdmitted
from loraplex.engine import constraints, endings, prefixes
from loraplex.engine.request_state import LoadJob, Purpose, RequestRecord, Stage
from loraplex.engine.residency import feasibility, hosting, loads, room, transitions, victims
from loraplex.engine.state import EngineState
from loraplex.engine.token_rules import rules_of
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Demand, Transaction
from loraplex.schedule.predicates import Readiness, eligible, loadable, readiness
from loraplex.schedule.queue import Ticket

LOOKAHEAD: Final = 64
"""Queue heads that one step looks at."""

MAX_SKIPS: Final = 256
"""Steps with a free place among the running ones that a cold request may be passed over in, for lack of
pages, before younger ones wait for it. Steps without such a place let nobody in and do not count.

About the steps of one answer: what ran when it was first passed over has mostly ended by then, so whoever
holds the pages now came after it. From then on nobody younger is admitted and running requests only end: it
waits for the longest answer that runs and no longer, whatever arrives. Fewer would hold back requests that
need no load for one that a finished answer would have let in anyway. `tests/engine/test_starvation.py` counts
both.
"""


class Outcome(StrEnum):
    """What became of one head of the queue."""

    ADMITTED = "admitted"
    PARKED = "parked"
    BLOCKED = "blocked"
    SKIPPED = "skipped"
    EARLY = "early"
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
            case Outcome.EARLY:
                held_back.append(ticket)
            case Outcome.PARKED:
                state.queue.park(ticket, record.awaits)
            case Outcome.ADMITTED | Outcome.GONE:
                pass
    for ticket in held_back:
        state.queue.push(ticket)


def _slots_promised(state: EngineState) -> int:
    return sum(
        1 for job in state.loads.values() if job.record is not None and job.record.stage is Stage.LOADING
    )


def _try(state: EngineState, record: RequestRecord) -> Outcome:
    early = _before_resources(state, record)
    if early is not None:
        return early
    entry = record.entry
    ready = readiness(entry)
    if entry is not None and ready is Readiness.LOADING:
        return _park(record, entry.key)
    refusal = feasibility.impossible(state, entry, state.limits.kv.pages_for(int(record.tokens.size)))
    if refusal is not None:
        return _refuse(state, record, refusal)
    hit = prefixes.look_up(state, record)
    if hit.awaits is not None:
        return _park(record, prefixes.waiting_for(hit.awaits))
    demand = demand_of(state, record, ready, hit.reused)
    if entry is not None and ready is not Readiness.READY:
        return _try_cold(state, record, entry, demand, ready, hit)
    available = state.available_beside(hit.unread)
    reclaimable = victims.reclaimable_pages(state, entry) if available < demand.required else 0
    if not eligible(ready, state.table.free_slots, demand, available, reclaimable):
        return Outcome.BLOCKED
    return _take(state, record, hit, partial(room.take_for_request, state, demand, entry), Outcome.BLOCKED)


def _park(record: RequestRecord, awaited: str) -> Outcome:
    record.awaits = awaited
    return Outcome.PARKED


def _take(
    state: EngineState,
    record: RequestRecord,
    hit: prefixes.Hit,
    reserve: Callable[[], Transaction | None],
    otherwise: Outcome,
) -> Outcome:
    """Reference what is cached, then reserve the rest; a request whose adapter is there runs. Without room it
    lets go again.
    """
    try:
        prefixes.acquire(state, record, hit)
    except InternalFault as fault:
        return _refuse(state, record, fault)
    record.transaction = reserve()
    if record.transaction is None:
        prefixes.release(state, record)
        return otherwise
    if record.entry is None or record.entry.resident:
        bind(state, record)
    return Outcome.ADMITTED


def _before_resources(state: EngineState, record: RequestRecord) -> Outcome | None:
    """A deadline that has passed ends a request; a grammar that is not there yet holds it back.
    None: go on.
    """
    if record.deadline_ns and record.outputs == 0 and state.clock.now_ns() > record.deadline_ns:
        return _refuse(
            state,
            record,
            CapacityError(ErrorCode.DEADLINE_EXCEEDED, "the request could not start before its deadline"),
        )
    if not constraints.begin(state, record):
        return Outcome.EARLY if record.request_id in state.records else Outcome.GONE
    return None


def _try_cold(
    state: EngineState,
    record: RequestRecord,
    entry: AdapterEntry,
    demand: Demand,
    ready: Readiness,
    hit: prefixes.Hit,
) -> Outcome:
    """Bring the image to the host, or reserve adapter and KV pages together and start the load."""
    if ready is Readiness.ABSENT and hosting.want(state, entry):
        return _park(record, entry.key)
    if state.clock.now_ns() < entry.retry_at_ns:
        return Outcome.EARLY  # how many steps its pause lasts says nothing of pages, and must decide nothing
    if ready is Readiness.ABSENT or not loadable(entry):
        return Outcome.SKIPPED
    missing = demand.required - state.available_beside(hit.unread)
    if missing > 0 and missing > victims.reclaimable_pages(state, entry):
        return Outcome.SKIPPED
    outcome = _take(state, record, hit, partial(room.take_for_load, state, demand, entry), Outcome.SKIPPED)
    if record.transaction is not None:
        record.stage = Stage.LOADING
        loads.begin(state, entry, record.transaction, Purpose.ADMISSION, record)
    return outcome


def _refuse(state: EngineState, record: RequestRecord, error: LoraplexError) -> Outcome:
    endings.end(state, record, error=error)
    return Outcome.GONE


def demand_of(state: EngineState, record: RequestRecord, ready: Readiness, reused: int) -> Demand:
    """Pages of the joint reservation: adapter if cold, known tokens without `reused` cached blocks, growth
    horizon, guard.
    """
    kv, known = state.limits.kv, int(record.tokens.size)
    initial = kv.pages_for(known)
    horizon = min(state.limits.growth_horizon, max(record.remaining_outputs - 1, 0))
    cold = record.entry if ready is not Readiness.READY else None
    growth = kv.pages_for(known + horizon) - initial
    return room.demand(state, cold, initial - reused, growth, len(state.by_slot))


def bind(state: EngineState, record: RequestRecord) -> None:
    """Give an admitted request its slot, pages and slot lease; from here on it may take rows."""
    transaction = record.transaction
    assert transaction is not None
    table, sampling = state.table, record.sampling
    cached = record.prefix.receipt.covered if record.prefix is not None else 0
    slot = table.open(record.tokens, record.prompt_tokens, sampling.max_tokens, record.ticket.order, cached)
    incarnation = int(table.incarnation[slot])
    pages = transaction.commit_kv(slot, incarnation)
    transaction.close()
    record.transaction = None
    if record.revision is not None:
        lease = transitions.take_slot_lease(state, record)
        table.adapter_slot[slot], table.adapter_generation[slot] = lease.slot, lease.generation
    table.logprobs[slot] = sampling.logprobs
    table.prompt_logprobs[slot] = sampling.prompt_logprobs
    table.scored[slot] = record.scored
    _hold(state, record, slot)
    table.invoked[slot] = max(record.invoked_at, 0)
    record.slot, record.stage, record.skipped = slot, Stage.RUNNING, 0
    state.by_slot[slot] = record
    state.deltas.open_request(record, slot, incarnation, cached)
    prefixes.bind(state, record)
    state.deltas.page_table(table.add_pages(slot, pages))
    now = state.clock.now_ns()
    state.emit(
        RequestAdmitted(now, record.request_id, now - record.arrival_ns, int(pages.size), record.admissions)
    )
    record.admissions += 1


def _hold(state: EngineState, record: RequestRecord, slot: int) -> None:
    """Note which of a request's tokens need masks, and whether each waits for the one before."""
    table, held = state.table, record.constraint is not None
    rules = record.rules = rules_of(record.sampling, state.limits.vocab_size)
    table.masked[slot] = held
    table.waiting[slot] = held
    if rules is not None:
        table.masked[slot] |= rules.constant or rules.longest > 0
        table.waiting[slot] |= rules.longest > 0
        table.masked_first[slot] = record.sampling.min_tokens


def loaded(state: EngineState, job: LoadJob) -> None:
    """The load that a request's admission started is published: run the request; its transaction ends with
    that.
    """
    record = job.record
    if record is not None and record.stage is Stage.LOADING:
        bind(state, record)
    else:
        job.transaction.close()
