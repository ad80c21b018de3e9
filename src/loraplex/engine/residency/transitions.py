"""Every change of an adapter's residency state, each with its event: nobody else changes a state.

Owns what belongs to a change and must not be done without it: the slot of the directory, pages or block, the
hold on the host image, the delta that the device hears, the slot lease. The table of legal changes is
`memory.residency.TRANSITIONS`. Never decides that an adapter should move: loads, hosting, registration and
those who need pages do.

Specification: 0x04C (state machine), 0x04E (publication), 0x05D (retire, then reuse), 0x07F to 0x07H.
"""

from __future__ import annotations

import numpy as np

from loraplex.core.events import AdapterTransition, PrefetchReleased
from loraplex.core.packed import empty
from loraplex.engine import accounts
from loraplex.engine.request_state import RequestRecord
from loraplex.engine.state import EngineState
from loraplex.memory.leases import SlotLease
from loraplex.memory.pages import PageState
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.transaction import Transaction
from loraplex.schedule.tenant_service import rank_bucket


def _move(state: EngineState, entry: AdapterEntry, after: AdapterState) -> None:
    """Along the table, with the event."""
    note_move(state, entry, entry.move(after))


def note_move(state: EngineState, entry: AdapterEntry, before: AdapterState) -> None:
    """Emit an adapter's change of state, if it changed: no state moves without its event."""
    if entry.state is not before:
        state.room_changed()
        accounts.moved(state, entry)
        state.emit(
            AdapterTransition(
                state.clock.now_ns(),
                entry.key,
                entry.slot,
                entry.generation,
                before,
                entry.state,
                entry.own_pages,
                state.image_bytes(entry),
            )
        )


# ---------------------------------------------------------------- host memory


def reach_host(state: EngineState, entry: AdapterEntry) -> None:
    """An absent adapter's image lies verified in host memory; whoever waited for it is asked again."""
    if entry.state is AdapterState.ABSENT:
        entry.host_source_verified = True
        _move(state, entry, AdapterState.HOST_READY)
        state.queue.unpark(entry.key)


def leave_host(state: EngineState, entry: AdapterEntry) -> None:
    """An adapter's host image was given up."""
    entry.host_source_verified = False
    if entry.state is AdapterState.HOST_READY:
        _move(state, entry, AdapterState.ABSENT)


# ---------------------------------------------------------------- loads


def occupy(state: EngineState, entry: AdapterEntry) -> None:
    """A host-ready adapter whose pages are reserved takes a slot of the directory and holds its image."""
    entry.slot, entry.generation = state.directory.take()
    state.occupied[entry.slot] = entry
    state.occupied_pages += entry.own_pages
    state.host.hold(entry.kernel_digest)
    _move(state, entry, AdapterState.RESERVED)


def start_copy(state: EngineState, entry: AdapterEntry) -> None:
    """The copy into its pages was put into a plan; `publish` or `roll_back` is its end."""
    entry.inflight_events += 1
    _move(state, entry, AdapterState.LOADING)


def publish(state: EngineState, entry: AdapterEntry, transaction: Transaction) -> None:
    """A copy arrived intact: the whole adapter becomes visible at one point."""
    entry.inflight_events -= 1
    _move(state, entry, AdapterState.VALIDATED)
    slot, generation = entry.slot, entry.generation
    if entry.size_class:
        entry.block = transaction.commit_block(slot, generation)
    else:
        entry.pages = transaction.commit_adapter(slot, generation)
    state.entry_of_slot[slot] = entry
    state.rank_sums[slot] = entry.rank_sum
    state.rank_buckets[slot] = rank_bucket(max((rank for rank, _ in entry.ranks), default=0))
    state.deltas.publish(slot, generation)
    entry.last_use = state.newest_launch
    _move(state, entry, AdapterState.PUBLISHED)
    entry.load_failures, entry.retry_at_ns = 0, 0


def roll_back(state: EngineState, entry: AdapterEntry) -> None:
    """A load failed: its slot and image are free again. Its transaction gives the pages back."""
    entry.inflight_events -= 1
    give_up(state, entry)


def give_up(state: EngineState, entry: AdapterEntry) -> None:
    """A load ends without a copy under way: as `roll_back`."""
    _leave_slot(state, entry)
    state.host.let_go(entry.kernel_digest)
    _move(state, entry, AdapterState.HOST_READY)


# ---------------------------------------------------------------- off the device


def retire(state: EngineState, entry: AdapterEntry) -> None:
    """Stop new binds of a published adapter, before anything of it is reused."""
    if entry.state is not AdapterState.RETIRING:
        _move(state, entry, AdapterState.RETIRING)
    if entry.prefetched:
        end_prefetch(state, entry, used=False)


def unpublish(state: EngineState, entry: AdapterEntry) -> None:
    """Take a retiring adapter out of the device's table; a transaction has its pages."""
    state.deltas.retire(entry.slot, entry.generation)
    accounts.moved(state, entry)
    _leave_slot(state, entry)


def finish_eviction(state: EngineState, entry: AdapterEntry) -> None:
    """The transaction that took a victim's pages keeps them, or has given them up: its host image is all that
    is left.
    """
    state.host.let_go(entry.kernel_digest)
    _move(state, entry, AdapterState.HOST_READY)
    state.queue.unpark(entry.key)


def evict(state: EngineState, entry: AdapterEntry) -> None:
    """Take an idle adapter off the device at once; its verified host source stays."""
    retire(state, entry)
    reclaim(state, entry)
    _move(state, entry, AdapterState.HOST_READY)


def reclaim(state: EngineState, entry: AdapterEntry) -> None:
    """Give a retiring adapter's pages, slot and hold on its image back."""
    _free_place(state, entry)
    unpublish(state, entry)
    state.host.let_go(entry.kernel_digest)


def withdraw(state: EngineState, entry: AdapterEntry, call_id: int = 0) -> None:
    """Take an adapter out of the registered ones; `call_id` hears when it has left."""
    del state.adapters[entry.key]
    state.pinned.pop(entry.key, None)
    entry.pin_count = 0  # a pin follows the name, and this revision has none any more
    entry.removing = True
    state.departing.append((entry, call_id))


def leave(state: EngineState, entry: AdapterEntry) -> None:
    """A withdrawn adapter that nobody uses any more is nowhere."""
    if entry.state is AdapterState.RETIRING:
        reclaim(state, entry)
    if entry.state is not AdapterState.ABSENT:
        _move(state, entry, AdapterState.ABSENT)


def end_prefetch(state: EngineState, entry: AdapterEntry, *, used: bool) -> None:
    """A speculative load was used, or goes unused."""
    entry.prefetched = False
    state.speculation.used += used
    nbytes = state.image_bytes(entry)
    state.speculation.wasted_pages += 0 if used else entry.own_pages
    state.speculation.wasted_bytes += 0 if used else nbytes
    state.emit(PrefetchReleased(state.clock.now_ns(), entry.key, entry.own_pages, nbytes, used))


def _leave_slot(state: EngineState, entry: AdapterEntry) -> None:
    """Its generation grows, so that no handle to it is valid again."""
    state.directory.give_back(entry.slot, entry.generation)
    del state.occupied[entry.slot]
    state.occupied_pages -= entry.own_pages
    entry.slot = entry.generation = 0


def _free_place(state: EngineState, entry: AdapterEntry) -> None:
    """Its pages or its block go back to the pool, scrubbed first where tests ask for it."""
    block = entry.block
    if block is None:
        state.free_pages(entry.pages, PageState.ADAPTER, entry.slot, entry.generation)
    else:
        emptied = state.pool.slabs.release(block, entry.slot, entry.generation, state.fence)
        if state.limits.scrub and emptied:
            state.deltas.scrub(np.array([block.page], dtype=np.int32))
        elif state.limits.scrub:
            state.deltas.scrub_block(block.page, block.size_class, block.index)
    entry.pages, entry.block = empty(), None


# ---------------------------------------------------------------- slot leases


def take_slot_lease(state: EngineState, record: RequestRecord) -> SlotLease:
    """Bind a request to the published slot of the revision that it leased: the first lease makes it
    active.
    """
    assert record.revision is not None
    entry = record.revision.entry
    before = entry.state
    record.lease = SlotLease.take(record.revision, state.newest_launch)
    note_move(state, entry, before)
    if entry.prefetched:
        end_prefetch(state, entry, used=True)
    return record.lease


def release_slot_lease(state: EngineState, record: RequestRecord) -> None:
    """End a request's hold on its adapter slot, if it has one: the last one leaves the adapter idle."""
    if record.lease is None:
        return
    entry = record.lease.entry
    before = entry.state
    record.lease.release(state.newest_launch)
    record.lease = None
    note_move(state, entry, before)
