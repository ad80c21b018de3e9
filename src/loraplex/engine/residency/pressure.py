"""Pressure on the pool: who gives pages up for whom, and what can never be had.

What could give way is `offers`'. Eviction for requests' growth frees pages at once, because that work is ordered after
every launch that used them. A load takes its victims' pages inside its transaction.

Specification: 0x05C, 0x05D; rulings "Residency", "Leases" (pins).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.events import PrefetchReleased
from loraplex.engine.residency import offers
from loraplex.engine.residency.offers import image_bytes
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.transaction import Demand, Transaction, block_pages


def move(state: EngineState, entry: AdapterEntry, after: AdapterState) -> None:
    """Change an adapter's state along the table, with its event."""
    state.note_move(entry, entry.move(after))


def reclaimable_pages(state: EngineState, keep: AdapterEntry | None = None) -> int:
    """Pages of what satisfies the full eviction predicate (0x05C)."""
    return sum(offer.candidate.pages for offer in offers.of_pages(state, keep))


def demand(
    state: EngineState, entry: AdapterEntry | None, kv_initial: int = 0, kv_growth: int = 0, guard: int = 0
) -> Demand:
    """The joint demand of a cold adapter, or of none, with KV pages (0x05C): a small one costs a page only where no block is free."""
    if entry is None:
        return Demand(0, kv_initial, kv_growth, guard)
    pages = block_pages(state.pool, entry.size_class) if entry.size_class else entry.page_count
    return Demand(pages, kv_initial, kv_growth, guard, entry.size_class)


def evict_for(state: EngineState, pages_needed: int, keep: AdapterEntry | None = None) -> bool:
    """Evict idle adapters until `pages_needed` pages were freed; False, with nothing changed, when they do not."""
    victims = offers.choose(state, pages_needed, keep=keep, floor=state.limits.adapter_floor)
    if victims is None:
        return False
    for victim in victims:
        evict(state, victim)
    return True


def evict(state: EngineState, entry: AdapterEntry) -> None:
    """Take an idle adapter off the device at once; its verified host source stays."""
    retire(state, entry)
    reclaim(state, entry)
    move(state, entry, AdapterState.HOST_READY)


def retire(state: EngineState, entry: AdapterEntry) -> None:
    """Stop new binds of a published adapter, before anything of it is reused."""
    if entry.state is not AdapterState.RETIRING:
        move(state, entry, AdapterState.RETIRING)
    if entry.prefetched:
        note_prefetch(state, entry, used=False)


def reclaim(state: EngineState, entry: AdapterEntry) -> None:
    """Unpublish a retiring adapter and give its pages back."""
    state.free_place(entry)
    unpublish(state, entry)
    state.host.let_go(entry.kernel_digest)


def unpublish(state: EngineState, entry: AdapterEntry) -> None:
    """Take a published adapter out of the device's table."""
    state.deltas.retire(entry.slot, entry.generation)
    leave_slot(state, entry)


def leave_slot(state: EngineState, entry: AdapterEntry) -> None:
    """Give a slot back: its generation grows, so that no handle to it is valid again."""
    state.directory.give_back(entry.slot, entry.generation)
    del state.occupied[entry.slot]
    state.occupied_pages -= entry.own_pages
    entry.slot = entry.generation = 0


def note_prefetch(state: EngineState, entry: AdapterEntry, *, used: bool) -> None:
    """A speculative load was used, or goes unused."""
    entry.prefetched = False
    state.speculation.used += used
    nbytes = image_bytes(state, entry)
    state.speculation.wasted_pages += 0 if used else entry.own_pages
    state.speculation.wasted_bytes += 0 if used else nbytes
    state.emit(PrefetchReleased(state.clock.now_ns(), entry.key, entry.own_pages, nbytes, used))


def reserve(state: EngineState, demand: Demand, entry: AdapterEntry, *, evicting: bool) -> Transaction | None:
    """The joint transaction for a load of `entry`, victims retired inside it; None, with nothing changed, without pages.

    evicting: whether other adapters may be evicted for it.
    """
    room = _room(state, demand, entry, evicting)
    if room is None:
        return None
    demand, victims = room
    for victim in victims:
        retire(state, victim)
    transaction = Transaction.reserve(
        state.next_transaction(), state.pool, demand, victims=victims, last_launch=state.launched
    )
    if transaction is None:
        raise InternalFault(
            ErrorCode.TRANSACTION_STATE,
            f"{len(victims)} victims were chosen for {demand} and do not cover it",
        )
    for victim in victims:
        unpublish(state, victim)
    return transaction


def _room(
    state: EngineState, demand: Demand, entry: AdapterEntry, evicting: bool
) -> tuple[Demand, list[AdapterEntry]] | None:
    """The victims that make room, and the demand that is left; None when nothing does.

    A small adapter for which a page would have to be cut may take the block of one of its class instead: whichever of
    the two ranking gives up first, and the other where that does not suffice.
    """
    if demand.size_class and not demand.adapter:
        return _with_victims(
            state, demand, entry, evicting, spared=state.pool.slabs.next_page(demand.size_class)
        )
    as_pages = _with_victims(state, demand, entry, evicting)
    if not demand.size_class or not evicting or (as_pages is not None and not as_pages[1]):
        return as_pages
    donors = offers.of_blocks(state, entry, demand.size_class)
    order = offers.ranked(state, offers.of_pages(state, entry) + donors)
    donor = next((offer for offer in order if not offer.candidate.pages), None)
    if donor is None or donor.entries[0].block is None:
        return as_pages
    if as_pages is not None and order[0] is not donor:
        return as_pages
    block = donor.entries[0].block
    return _with_victims(
        state, replace(demand, adapter=0), entry, evicting, spared=block.page, first=[donor.entries[0]]
    )


def _with_victims(
    state: EngineState,
    demand: Demand,
    entry: AdapterEntry,
    evicting: bool,
    *,
    spared: int = 0,
    first: Sequence[AdapterEntry] = (),
) -> tuple[Demand, list[AdapterEntry]] | None:
    """What goes beside `first` for this demand. spared: the slab page that the demand's block lies in."""
    over = state.adapter_pages + demand.adapter - state.caps.adapter_pages
    pages = max(demand.required - state.pool.free, over, 0)
    slots = len(state.occupied) + 1 - min(state.caps.resident_adapters, state.limits.max_adapter_slots - 1)
    slots = max(slots - len(first), 0)
    if not pages and not slots:
        return demand, list(first)
    victims = (
        offers.choose(state, pages, keep=entry, count=slots, spared=spared, gone=first) if evicting else None
    )
    return None if victims is None else (demand, [*first, *victims])


def shortfall(state: EngineState, demand: Demand, entry: AdapterEntry) -> str:
    """Why `reserve` found nothing, in numbers."""
    reclaimable = reclaimable_pages(state, entry)
    missing = max(
        demand.required - state.pool.free - reclaimable,
        state.adapter_pages + demand.adapter - reclaimable - state.caps.adapter_pages,
    )
    if missing > 0:
        return (
            f"{demand.required} pages are needed, {state.pool.free} are free and {reclaimable} can be reclaimed, "
            f"adapters may take {state.caps.adapter_pages}: {missing} are missing"
        )
    return f"all {state.caps.resident_adapters} adapters that may be resident are in use"


def impossible(state: EngineState, entry: AdapterEntry | None, kv_pages: int) -> LoraplexError | None:
    """Why no waiting would help: pins and limits leave too little. None when it could be had."""
    if entry is None:
        needed = kv_pages
    else:
        needed = kv_pages + least_pages(state, entry)
        if entry.page_count > state.caps.adapter_pages:
            return CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"the adapter needs {entry.page_count} pages, the limit leaves adapters {state.caps.adapter_pages}; raise it",
            )
        refusal = None if entry.resident else _beside_pins(state, entry)
        if refusal is not None:
            return refusal
        pinned_bytes = sum(image_bytes(state, other) for other in state.pinned.values() if other is not entry)
        if image_bytes(state, entry) + pinned_bytes > state.host.limit_bytes:
            return CapacityError(
                ErrorCode.HOST_MEMORY_EXHAUSTED,
                f"the adapter's image has {image_bytes(state, entry)} bytes, pinned ones have {pinned_bytes}, "
                f"the host limit is {state.host.limit_bytes}; raise it or unpin",
            )
    held = pinned_pages(state, entry)
    if needed > state.pool.usable - held:
        return CapacityError(
            ErrorCode.POOL_EXHAUSTED,
            f"{needed} pages are needed, pinned adapters hold {held} of {state.pool.usable}; unpin one",
        )
    return None


def _beside_pins(state: EngineState, entry: AdapterEntry) -> CapacityError | None:
    """Why an adapter that is not on the device can never get there beside the pinned ones."""
    others = len(state.pinned) - (entry.key in state.pinned)
    slots = min(state.caps.resident_adapters, state.limits.max_adapter_slots - 1)
    if others >= slots:
        return CapacityError(
            ErrorCode.ADAPTER_SLOTS_EXHAUSTED,
            f"{others} adapters are pinned, {slots} may be resident; unpin one",
        )
    held = pinned_pages(state, entry)
    if least_pages(state, entry) + held > state.caps.adapter_pages:
        return CapacityError(
            ErrorCode.POOL_EXHAUSTED,
            f"the adapter needs {entry.page_count} pages, pinned ones hold {held} of the "
            f"{state.caps.adapter_pages} that adapters may take; unpin one",
        )
    return None


def too_large(state: EngineState, pages: int) -> CallerError | None:
    """Why not even the empty pool would do."""
    if pages <= state.pool.usable:
        return None
    return CallerError(
        ErrorCode.REQUEST_EXCEEDS_POOL,
        f"the request needs {pages} pages, the pool has {state.pool.usable}; shorten it or enlarge the pool",
    )


def pages_of(entries: Iterable[AdapterEntry]) -> int:
    """Pages that adapters hold or will hold together.

    Small ones count the slab pages that they lie in, once each; those that are not on the device are counted as packed
    into blocks of these pages that are none of theirs, and into new ones. They may come to lie further apart; then they
    count what they hold.
    """
    pages = 0
    placed: dict[int, Counter[int]] = {}
    coming: Counter[int] = Counter()
    for entry in entries:
        if not entry.size_class:
            pages += entry.page_count
        elif entry.block is not None:
            placed.setdefault(entry.size_class, Counter())[entry.block.page] += 1
        else:
            coming[entry.size_class] += 1
    for size_class in placed.keys() | coming.keys():
        slabs = placed.get(size_class, Counter())
        spare = (len(slabs) << size_class) - slabs.total()
        pages += len(slabs) - (-max(coming[size_class] - spare, 0) >> size_class)
    return pages


def pinned_pages(state: EngineState, but: AdapterEntry | None = None) -> int:
    """Pages that pins hold or will hold, without those of `but`."""
    return pages_of(entry for entry in state.pinned.values() if entry is not but)


def pinned_with(state: EngineState, entry: AdapterEntry) -> int:
    """Pages that pins would hold if `entry` had one."""
    return pages_of([*(other for other in state.pinned.values() if other is not entry), entry])


def least_pages(state: EngineState, entry: AdapterEntry) -> int:
    """Pages that an adapter needs beside the pinned ones: none where one of their slabs has a block for it."""
    return pinned_with(state, entry) - pinned_pages(state, entry)
