"""Adapters on this worker: register, load, publish, evict, retire. Decides; the backend copies.

A load is a transaction: pages reserved, image copied, checksum compared on the device, then published at one point.
Until then no row can bind it, and a failure leaves it on the host with its pages returned.

Specification: 0x04E, 0x05D to 0x05F, 0x07F to 0x07I.
"""

from __future__ import annotations

from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.messages import RegisterAdapter, RemoveAdapter, Reply
from loraplex.engine.records import LoadJob, RequestRecord
from loraplex.engine.state import EngineState
from loraplex.memory.pages import PageState
from loraplex.memory.residency import AdapterEntry, AdapterState, choose_victims
from loraplex.memory.transaction import Demand, Transaction


def move(state: EngineState, entry: AdapterEntry, after: AdapterState) -> None:
    """Change an adapter's state along the table, with its event."""
    state.note_move(entry, entry.move(after))


def register(state: EngineState, message: RegisterAdapter) -> None:
    """Take an adapter whose verified image lies on the host; load it at once where free pages allow."""
    known = state.adapters.get(message.key)
    if known is not None and not known.removing:
        if known.kernel_digest != message.kernel_digest:
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID, f"adapter {message.key[:12]} arrived with another kernel image"
            )
        state.outbox.append(Reply(message.call_id, body=describe(known)))
        return
    if message.pages > state.pool.usable:
        raise CallerError(
            ErrorCode.ADAPTER_TOO_LARGE,
            f"the adapter needs {message.pages} pages, the pool has {state.pool.usable}; enlarge the pool",
        )
    entry = AdapterEntry(
        key=message.key,
        kernel_digest=message.kernel_digest,
        page_count=message.pages,
        rank_sum=sum(rank * count for rank, count in message.ranks),
        ranks=message.ranks,
        modules=message.modules,
        host_bytes=message.host_bytes,
        host_source_verified=True,
    )
    state.adapters[message.key] = entry
    move(state, entry, AdapterState.HOST_READY)
    guard = 0 if not state.by_slot else len(state.by_slot)
    if state.directory.free and state.pool.free >= entry.page_count + guard:
        demand = Demand(entry.page_count, 0, 0, guard)
        transaction = Transaction.reserve(state.next_transaction(), state.pool, demand, state.copy_fence)
        if transaction is not None:
            start_load(state, entry, transaction, call_id=message.call_id)
            return
    state.outbox.append(Reply(message.call_id, body=describe(entry)))


def remove(state: EngineState, message: RemoveAdapter) -> None:
    """Stop new requests on an adapter; it leaves, and the call is answered, when its last request has ended."""
    entry = state.adapters.get(message.key)
    if entry is None:
        raise CallerError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter {message.key[:12]} is not registered")
    del state.adapters[message.key]
    entry.removing = True
    if entry.state in (AdapterState.PUBLISHED, AdapterState.ACTIVE, AdapterState.IDLE):
        move(state, entry, AdapterState.RETIRING)
    state.departing.append((entry, message.call_id))
    finish_departures(state)


def finish_departures(state: EngineState) -> None:
    """Reclaim removed adapters whose last lease is gone and that no launch in flight names."""
    still: list[tuple[AdapterEntry, int]] = []
    for entry, call_id in state.departing:
        if entry.revision_leases or entry.refcount or entry.loading or entry.last_plan > state.committed:
            still.append((entry, call_id))
            continue
        if entry.state is AdapterState.RETIRING:
            _reclaim(state, entry)
        move(state, entry, AdapterState.ABSENT)
        state.outbox.append(Reply(call_id, body=describe(entry)))
    state.departing = still


def start_load(
    state: EngineState,
    entry: AdapterEntry,
    transaction: Transaction,
    *,
    record: RequestRecord | None = None,
    call_id: int = 0,
) -> None:
    """Start copying a host-ready adapter into its reserved pages."""
    slot, generation = state.directory.take()
    entry.slot, entry.generation = slot, generation
    move(state, entry, AdapterState.RESERVED)
    state.deltas.copy(entry.kernel_digest, slot, generation, transaction.adapter_pages)
    entry.inflight_events += 1
    move(state, entry, AdapterState.LOADING)
    state.loads[(slot, generation)] = LoadJob(entry, slot, generation, transaction, record, call_id)


def finish_load(state: EngineState, slot: int, generation: int, intact: bool) -> LoadJob:
    """A copy ended: publish it, or roll it back. Returns its job for whoever waited."""
    job = state.loads.pop((slot, generation), None)
    if job is None:
        raise InternalFault(
            ErrorCode.RESIDENCY_TRANSITION,
            f"a copy into slot {slot} at generation {generation} was not under way",
        )
    entry = job.entry
    entry.inflight_events -= 1
    if not intact:
        fail_load(
            state, job, InternalFault(ErrorCode.COPY_CHECKSUM, f"adapter {entry.key[:12]} arrived damaged")
        )
        return job
    move(state, entry, AdapterState.VALIDATED)
    entry.pages = job.transaction.commit_adapter(slot, generation)
    state.entry_of_slot[slot] = entry
    state.deltas.publish(slot, generation)
    entry.last_touch = state.launched
    move(state, entry, AdapterState.PUBLISHED)
    if entry.removing:
        move(state, entry, AdapterState.RETIRING)
    if job.call_id:
        state.outbox.append(Reply(job.call_id, body=describe(entry)))
    state.queue.unpark(entry.key)
    return job


def fail_load(state: EngineState, job: LoadJob, error: LoraplexError) -> None:
    """Roll a load back: pages returned, slot generation grown, the adapter back on the host."""
    job.transaction.rollback(state.launched)
    state.directory.give_back(job.slot, job.generation)
    job.entry.slot = job.entry.generation = 0
    move(state, job.entry, AdapterState.HOST_READY)
    if job.call_id:
        state.outbox.append(Reply(job.call_id, error.code.value, error.message))
    state.queue.unpark(job.entry.key)


def evict_for(state: EngineState, pages_needed: int, keep: AdapterEntry | None = None) -> bool:
    """Evict idle adapters until `pages_needed` pages were freed; False, with nothing changed, when they do not."""
    candidates = [entry for entry in state.adapters.values() if entry is not keep]
    victims = choose_victims(candidates, pages_needed, state.committed)
    if victims is None:
        return False
    for victim in victims:
        evict(state, victim)
    return True


def evict(state: EngineState, entry: AdapterEntry) -> None:
    """Take an idle adapter off the device; its verified host source stays."""
    move(state, entry, AdapterState.RETIRING)
    _reclaim(state, entry)
    move(state, entry, AdapterState.HOST_READY)


def reclaimable_pages(state: EngineState, keep: AdapterEntry | None = None) -> int:
    """Pages of adapters that satisfy the full eviction predicate (0x05C)."""
    candidates = [entry for entry in state.adapters.values() if entry is not keep]
    total = 0
    for entry in candidates:
        if choose_victims([entry], 1, state.committed):
            total += entry.page_count
    return total


def _reclaim(state: EngineState, entry: AdapterEntry) -> None:
    """Unpublish a retiring adapter and give its pages back."""
    state.deltas.retire(entry.slot, entry.generation)
    state.free_pages(entry.pages, PageState.ADAPTER, entry.slot, entry.generation)
    state.directory.give_back(entry.slot, entry.generation)
    entry.pages = entry.pages[:0]
    entry.slot = entry.generation = 0


def describe(entry: AdapterEntry) -> dict[str, object]:
    """The engine's view of one adapter, for replies."""
    return {
        "key": entry.key,
        "state": entry.state.value,
        "slot": entry.slot,
        "generation": entry.generation,
        "device_pages": int(entry.pages.size),
        "page_count": entry.page_count,
        "host_bytes": entry.host_bytes,
        "leases": entry.revision_leases,
        "slot_leases": entry.refcount,
        "pinned": entry.pin_count > 0,
        "removing": entry.removing,
    }


def load_error(entry: AdapterEntry) -> InternalFault:
    """What a request hears whose adapter could not be copied intact."""
    return InternalFault(
        ErrorCode.ADAPTER_LOAD_FAILED, f"adapter {entry.key[:12]} could not be loaded intact; try again"
    )
