"""admit: waiting requests become running ones in the policy's order, through one joint transaction each.

A ready request gets a slot, its KV pages and a slot lease at once. A cold one reserves adapter pages and KV
together and starts the copy; it runs when the copy is published, and blocks nobody meanwhile. What is cached
of a request is looked up and referenced before its reservation, which leaves it out; who waits for a block
that is being computed blocks nobody.

Specification: 0x05C (joint admission), 0x08I (look-up), 0x09B (predicates), 0x04E (reserve, copy, validate,
publish).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Final

from loraplex.core.errors import CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.events import RequestAdmitted
from loraplex.engine import candidates, constraints, endings, prefixes, snapshots
from loraplex.engine.request_state import LoadJob, Purpose, RequestRecord, Stage
from loraplex.engine.residency import hosting, loads, room, transitions, victims
from loraplex.engine.state import NO_BOUND, EngineState
from loraplex.engine.token_rules import rules_of
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.transaction import Demand, Transaction, admissible
from loraplex.schedule.predicates import Readiness, eligible, load_eligible, readiness

LOOKAHEAD: Final = 64
"""Waiting requests that one step looks at."""
TRIES: Final = 16
"""Of them, those that may turn out to find no room; the next step goes on behind them."""


class Outcome(StrEnum):
    """What became of one head of the queue."""

    ADMITTED = "admitted"
    PARKED = "parked"
    SKIPPED = "skipped"
    EARLY = "early"
    GONE = "gone"


@dataclass(slots=True)
class _Pass:
    """One look at the queue. seen: requests that it looked at and that may still be overtaken. tries: how
    many more may turn out to find no room. moved: whether anybody's try came to something else.
    """

    seen: dict[str, RequestRecord] = field(default_factory=dict)
    tries: int = TRIES
    moved: bool = False


def admit(state: EngineState) -> None:
    """Admit in the policy's order until places, pages or the look-ahead run out.

    Where nobody found room the last time, nobody is asked before something of it changed or somebody came.
    """
    if not _places(state):
        return
    state.offers += 1
    visible = (*state.room, state.queue.pushes)
    if state.fruitless == visible:
        return
    look, walk = _Pass(), state.queue.walk()
    try:
        for _ in range(0, LOOKAHEAD, state.limits.policy.window):
            window = list(islice(walk, state.limits.policy.window))
            if not window or not _admit_window(state, candidates.in_order(state, window), look):
                break
    finally:
        walk.close()
    state.passed_at = state.offers
    state.fruitless = visible if not look.moved and look.tries else None


def _places(state: EngineState) -> int:
    """Request slots that are free and that no load promises to its request."""
    return state.table.free_slots - sum(
        1 for job in state.loads.values() if job.record is not None and job.record.stage is Stage.LOADING
    )


def _admit_window(state: EngineState, window: Sequence[RequestRecord], look: _Pass) -> bool:
    """Try the requests of a window, the preferred one first; whether those behind them may be tried.

    A request that may be overtaken no more, or passed over in no more steps, is owed the next turn: until it
    is let in, nobody behind it is.
    """
    look.seen.update((record.request_id, record) for record in window)
    youngest = NO_BOUND
    for record in window:
        if record.ticket.order > youngest or not state.service.may_run(record.tenant):
            continue
        if _places(state) <= 0:
            return False
        known = record.found_no_room == state.room
        outcome = Outcome.SKIPPED if known else _try(state, record)
        if outcome is Outcome.SKIPPED:
            record.found_no_room = state.room
            look.tries -= not known
            _count_skip(state, record)
            if record.owed or not look.tries:
                return False
            if record.admissions:  # it gave its pages to older ones: nobody younger takes them
                youngest = min(youngest, record.ticket.order)
            continue
        look.moved = True
        del look.seen[record.request_id]
        if outcome is Outcome.PARKED:
            state.queue.park(record.ticket, record.awaits)
        elif outcome is Outcome.ADMITTED:
            state.queue.take(record.ticket)
            if not _count_overtaken(state, record, look.seen.values()):
                return False
    return youngest == NO_BOUND


def _count_skip(state: EngineState, record: RequestRecord) -> None:
    """Note the steps that had a place and no pages for `record`, this one and those since the last look."""
    record.skipped += state.offers - state.passed_at if record.skipped else 1
    if record.skipped > state.limits.policy.bound and not record.owed:
        _owe(state, record)


def _count_overtaken(state: EngineState, admitted: RequestRecord, seen: Iterable[RequestRecord]) -> bool:
    """Note whom `admitted` overtook; whether each of them may be overtaken once more."""
    ticket, go_on = admitted.ticket, True
    for record in seen:
        other = record.ticket
        if ticket.order > other.order and ticket.tenant == other.tenant and ticket.urgency >= other.urgency:
            record.overtaken += 1
            if record.overtaken >= state.limits.policy.bound and not record.owed:
                _owe(state, record)
                go_on = False
    return go_on


def _owe(state: EngineState, record: RequestRecord) -> None:
    record.owed = True
    state.queue.owe(record.ticket)


def _try(state: EngineState, record: RequestRecord) -> Outcome:
    early = _before_resources(state, record)
    if early is not None:
        return early
    entry = record.entry
    ready = readiness(entry)
    if entry is not None and ready is Readiness.LOADING:
        return _park(record, entry.key)
    request = snapshots.waiting_of(state, record)
    worker = snapshots.worker_of(state, entry, record.request_id)
    refusal = snapshots.refusal(request, worker)
    if refusal is not None:
        return _refuse(state, record, refusal)
    hit = prefixes.look_up(state, record)
    if hit.awaits is not None:
        return _park(record, prefixes.waiting_for(hit.awaits))
    demand = demand_of(state, record, ready, hit.reused)
    if entry is not None and ready is not Readiness.READY:
        return _try_cold(state, record, entry, demand, hit, load_eligible(request, worker))
    available = state.available_beside(hit.unread)
    missing = demand.required - available
    if missing > 0 and missing > victims.reclaimable_at_most(state):
        return Outcome.SKIPPED
    reclaimable = victims.reclaimable_pages(state, entry) if missing > 0 else 0
    legal = state.table.free_slots > 0 and admissible(demand, available, reclaimable)
    if not eligible(request, worker, legal):
        return Outcome.SKIPPED
    return _take(state, record, hit, partial(room.take_for_request, state, demand, entry))


def _park(record: RequestRecord, awaited: str) -> Outcome:
    record.awaits = awaited
    return Outcome.PARKED


def _take(
    state: EngineState,
    record: RequestRecord,
    hit: prefixes.Hit,
    reserve: Callable[[], Transaction | None],
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
        return Outcome.SKIPPED
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
    hit: prefixes.Hit,
    loadable: bool,
) -> Outcome:
    """Bring the image to the host, or reserve adapter and KV pages together and start the load."""
    if entry.state is AdapterState.ABSENT and hosting.want(state, entry):
        return _park(record, entry.key)
    if state.clock.now_ns() < entry.retry_at_ns:
        return Outcome.EARLY  # how many steps its pause lasts says nothing of pages, and must decide nothing
    if not loadable:
        return Outcome.SKIPPED
    missing = demand.required - state.available_beside(hit.unread)
    if missing > 0 and missing > victims.reclaimable_at_most(state):
        return Outcome.SKIPPED
    outcome = _take(state, record, hit, partial(room.take_for_load, state, demand, entry))
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
    record.slot, record.stage = slot, Stage.RUNNING
    record.skipped, record.overtaken, record.owed = 0, 0, False
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
