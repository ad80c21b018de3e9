"""Loads: from a host image and reserved pages to a published adapter, or back to where it began.

A load is a transaction. Its copy starts when the last launch that may name its pages has been committed, runs
beside the steps, and is compared by checksum on the device; publication is one point. Until then no row can
bind it. A failure gives pages back, restores the adapters that gave them up, and is tried again; what waits
for it keeps its place.

Specification: 0x04E, 0x05E, 0x05F, 0x07G, 0x09L.
"""

from __future__ import annotations

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import CopyIgnored, RestorationFailed
from loraplex.engine import accounts, prefixes
from loraplex.engine.request_state import LoadJob, Purpose, RequestRecord, Stage
from loraplex.engine.residency import transitions
from loraplex.engine.residency.load_failures import count_failure
from loraplex.engine.state import EngineState
from loraplex.memory import eviction
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Restoration, Transaction


def begin(
    state: EngineState,
    entry: AdapterEntry,
    transaction: Transaction,
    purpose: Purpose,
    record: RequestRecord | None = None,
) -> None:
    """Give a host-ready adapter a slot and its reserved pages; `pump` starts the copy."""
    transitions.occupy(state, entry)
    slot, generation = entry.slot, entry.generation
    state.loads[(slot, generation)] = LoadJob(entry, slot, generation, transaction, purpose, record)


def pump(state: EngineState) -> None:
    """Start copies whose pages may be overwritten, in order of purpose, a few at a time.

    A start reads the image's tables in the step's own time. Where rows run there are few a step, and one at
    most that no request waits for.
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
        if room <= 0 or not eviction.reusable(fence, state.committed_launch, on_compute_stream=same_stream):
            continue
        if not same_stream:
            job.transaction.require_fence(state.committed_launch)
        place = job.transaction.block or job.transaction.adapter_pages
        state.deltas.copy(job.entry.kernel_digest, job.slot, job.generation, place)
        job.started, job.started_ns = True, state.clock.now_ns()
        transitions.start_copy(state, job.entry)
        room -= 1
        unawaited += not job.purpose.awaited


def withdraw(state: EngineState, job: LoadJob) -> None:
    """Undo a load whose copy has not begun and for which nobody was evicted."""
    del state.loads[(job.slot, job.generation)]
    job.transaction.rollback(state.newest_launch)
    transitions.give_up(state, job.entry)
    state.queue.unpark(job.entry.key)


def finish(state: EngineState, slot: int, generation: int, intact: bool) -> LoadJob | None:
    """A copy ended: publish it, or roll it back. Returns its job for whoever waited; None when none is under
    way.
    """
    job = state.loads.get((slot, generation))
    if job is None or not job.started:
        state.emit(CopyIgnored(state.clock.now_ns(), slot, generation, intact))
        return None
    del state.loads[(slot, generation)]
    entry = job.entry
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
    transitions.publish(state, entry, job.transaction)
    for victim in job.transaction.finalize(state.newest_launch):
        transitions.finish_eviction(state, victim)
    if entry.removing:
        transitions.retire(state, entry)
    state.estimates.note_load(state.image_bytes(entry), state.clock.now_ns() - job.started_ns)
    traffic = state.traffic
    traffic.loads += 1
    traffic.copied_pages += entry.own_pages
    traffic.copied_bytes += state.image_bytes(entry)
    traffic.by_purpose[job.purpose.name.lower()] = traffic.by_purpose.get(job.purpose.name.lower(), 0) + 1
    if job.purpose.speculative:
        entry.prefetched = True
        state.speculation.published += 1
    state.queue.unpark(entry.key)


def _roll_back(state: EngineState, job: LoadJob, error: InternalFault) -> None:
    """Pages return, the slot's generation grows, the adapter is back on the host, victims get their pages
    back.
    """
    entry = job.entry
    owed = job.transaction.rollback(state.newest_launch)
    transitions.roll_back(state, entry)
    record = job.record
    if record is not None and record.stage is Stage.LOADING:
        record.transaction = None
        prefixes.release(state, record)
        accounts.requeue(state, record)
    if job.purpose is Purpose.RESTORE:
        pages, nbytes = entry.own_pages, state.image_bytes(entry)
        state.emit(RestorationFailed(state.clock.now_ns(), entry.key, error.code.value, pages, nbytes))
    for place in owed:
        _restore(state, job.transaction, place)
    count_failure(state, entry, job.purpose.name.lower(), error, job.record)
    state.queue.unpark(entry.key)


def _restore(state: EngineState, source: Transaction, place: Restoration) -> None:
    """Load a victim into its own pages again, or into a block, from its host image; one that is no longer
    wanted gives them up.
    """
    victim = place.entry
    if victim.removing or not state.directory.free:
        source.give_up(place, state.newest_launch)
        transitions.finish_eviction(state, victim)
        return
    transaction = Transaction.restoring(state.next_transaction(), source, place)
    transitions.finish_eviction(state, victim)
    state.traffic.restorations += 1
    begin(state, victim, transaction, Purpose.RESTORE)
