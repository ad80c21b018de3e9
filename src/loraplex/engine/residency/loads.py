"""Loads: from a host image and reserved pages to a published adapter, or back to where it began.

A load is a transaction. Its copy starts when the last launch that may name its pages has been committed, runs beside the
steps, and is compared by checksum on the device; publication is one point. Until then no row can bind it. A failure
gives pages back, restores the adapters that gave them up, and is tried again; what waits for it keeps its place.

Specification: 0x04E, 0x05E, 0x05F, 0x07G, 0x09L.
"""

from __future__ import annotations

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import CopyIgnored, RestorationFailed
from loraplex.engine.request_state import LoadJob, Phase, Purpose, RequestRecord
from loraplex.engine.residency.load_failures import count_failure
from loraplex.engine.residency.offers import image_bytes
from loraplex.engine.residency.pressure import leave_slot, move
from loraplex.engine.state import EngineState
from loraplex.memory import eviction
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.transaction import Restoration, Transaction


def begin(
    state: EngineState,
    entry: AdapterEntry,
    transaction: Transaction,
    purpose: Purpose,
    record: RequestRecord | None = None,
) -> None:
    """Give a host-ready adapter a slot and its reserved pages; `pump` starts the copy."""
    slot, generation = state.directory.take()
    entry.slot, entry.generation = slot, generation
    state.occupied[slot] = entry
    state.occupied_pages += entry.own_pages
    state.host.hold(entry.kernel_digest)
    move(state, entry, AdapterState.RESERVED)
    state.loads[(slot, generation)] = LoadJob(entry, slot, generation, transaction, purpose, record)


def pump(state: EngineState) -> None:
    """Start copies whose pages may be overwritten, in order of purpose, a few at a time.

    A start reads the image's tables in the step's own time. Where rows run there are few a step, and one at most that no
    request waits for.
    """
    waiting = [job for job in state.loads.values() if not job.started]
    if not waiting:
        return
    room = state.limits.copies_in_flight - (len(state.loads) - len(waiting))
    if state.by_slot:
        room = min(room, state.limits.copy_starts)
    unawaited = 0
    for job in sorted(waiting, key=lambda job: job.purpose):
        if state.by_slot and unawaited and not job.purpose.awaited:
            break
        fence = job.transaction.adapter_fence
        same_stream = state.limits.copies_on_compute_stream
        if room <= 0 or not eviction.reusable(fence, state.committed, on_compute_stream=same_stream):
            continue
        if not same_stream:
            job.transaction.require_fence(state.committed)
        place = job.transaction.block or job.transaction.adapter_pages
        state.deltas.copy(job.entry.kernel_digest, job.slot, job.generation, place)
        job.entry.inflight_events += 1
        job.started = True
        move(state, job.entry, AdapterState.LOADING)
        room -= 1
        unawaited += not job.purpose.awaited


def finish(state: EngineState, slot: int, generation: int, intact: bool) -> LoadJob | None:
    """A copy ended: publish it, or roll it back. Returns its job for whoever waited; None when none is under way."""
    job = state.loads.get((slot, generation))
    if job is None or not job.started:
        state.emit(CopyIgnored(state.clock.now_ns(), slot, generation, intact))
        return None
    del state.loads[(slot, generation)]
    entry = job.entry
    entry.inflight_events -= 1
    if intact:
        _publish(state, job)
    else:
        error = InternalFault(
            ErrorCode.COPY_CHECKSUM, f"adapter {entry.key[:12]} did not arrive intact on the device"
        )
        _roll_back(state, job, error)
    return job


def _publish(state: EngineState, job: LoadJob) -> None:
    entry = job.entry
    move(state, entry, AdapterState.VALIDATED)
    if entry.size_class:
        entry.block = job.transaction.commit_block(job.slot, job.generation)
    else:
        entry.pages = job.transaction.commit_adapter(job.slot, job.generation)
    state.entry_of_slot[job.slot] = entry
    state.rank_sums[job.slot] = entry.rank_sum
    state.deltas.publish(job.slot, job.generation)
    entry.last_touch = state.launched
    move(state, entry, AdapterState.PUBLISHED)
    entry.failures, entry.retry_at_ns = 0, 0
    for victim in job.transaction.finalize(state.launched):
        _gone(state, victim)
    traffic = state.traffic
    traffic.loads += 1
    traffic.copied_pages += entry.own_pages
    traffic.copied_bytes += image_bytes(state, entry)
    traffic.by_purpose[job.purpose.name.lower()] = traffic.by_purpose.get(job.purpose.name.lower(), 0) + 1
    if job.purpose.speculative:
        entry.prefetched = True
        state.speculation.published += 1
    if entry.removing:
        move(state, entry, AdapterState.RETIRING)
    state.queue.unpark(entry.key)


def _gone(state: EngineState, victim: AdapterEntry) -> None:
    """A victim's eviction is final."""
    state.host.let_go(victim.kernel_digest)
    move(state, victim, AdapterState.HOST_READY)
    state.queue.unpark(victim.key)


def _roll_back(state: EngineState, job: LoadJob, error: InternalFault) -> None:
    """Pages return, the slot's generation grows, the adapter is back on the host, victims get their pages back."""
    entry = job.entry
    owed = job.transaction.rollback(state.launched)
    leave_slot(state, entry)
    record = job.record
    if record is not None and record.phase is Phase.LOADING:
        record.transaction, record.phase = None, Phase.WAITING
        state.queue.push(record.ticket)
    state.host.let_go(entry.kernel_digest)
    move(state, entry, AdapterState.HOST_READY)
    if job.purpose is Purpose.RESTORE:
        pages, nbytes = entry.own_pages, image_bytes(state, entry)
        state.emit(RestorationFailed(state.clock.now_ns(), entry.key, error.code.value, pages, nbytes))
    for place in owed:
        _restore(state, job.transaction, place)
    count_failure(state, entry, job.purpose.name.lower(), error, job.record)
    state.queue.unpark(entry.key)


def _restore(state: EngineState, source: Transaction, place: Restoration) -> None:
    """Load a victim into its own pages again, or into a block, from its host image; one that is no longer wanted gives them up."""
    victim = place.entry
    if victim.removing or not state.directory.free:
        source.give_up(place, state.launched)
        _gone(state, victim)
        return
    transaction = Transaction.restoring(state.next_transaction(), source, place)
    _gone(state, victim)
    state.traffic.restorations += 1
    begin(state, victim, transaction, Purpose.RESTORE)
