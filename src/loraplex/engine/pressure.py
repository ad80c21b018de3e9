"""Pressure on the pool: who gives pages up for whom, and what can never be had.

Eligibility, ranking and reuse are `memory.eviction`'s; here they are applied to the engine's adapters. Eviction for
requests' growth frees pages at once, because that work is ordered after every launch that used them. A load takes its
victims' pages inside its transaction.

Specification: 0x05C, 0x05D; DESIGN 4 "Residency", "Leases" (pins).
"""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError
from loraplex.core.events import PrefetchReleased
from loraplex.engine.state import EngineState
from loraplex.memory import eviction
from loraplex.memory.eviction import Candidate, PageClass
from loraplex.memory.pages import PageState
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.transaction import Demand, Transaction


def move(state: EngineState, entry: AdapterEntry, after: AdapterState) -> None:
    """Change an adapter's state along the table, with its event."""
    state.note_move(entry, entry.move(after))


def adapter_pages(state: EngineState) -> int:
    """Pages that adapters hold or have reserved."""
    return state.occupied_pages


def candidates(state: EngineState, keep: AdapterEntry | None = None) -> list[tuple[Candidate, AdapterEntry]]:
    """Adapters that satisfy the full eviction predicate, priced. Two of them may have one key: one is leaving."""
    page_ns = state.pool.page_bytes * 1_000_000_000 // state.limits.copy_bytes_per_s
    return [
        (
            Candidate(
                PageClass.ADAPTER, entry.key, entry.page_count, entry.page_count * page_ns, entry.last_touch
            ),
            entry,
        )
        for entry in state.occupied.values()
        if entry is not keep and eviction.eligible(entry, state.committed)
    ]


def choose(
    state: EngineState, pages_needed: int, *, keep: AdapterEntry | None = None, count: int = 0, floor: int = 0
) -> list[AdapterEntry] | None:
    """Victims that cover `pages_needed` and free `count` slots, or None. floor: adapter pages that stay."""
    offered = candidates(state, keep)
    chosen = eviction.choose(
        [candidate for candidate, _ in offered],
        pages_needed,
        now=state.launched,
        ranking=eviction.RANKINGS[state.limits.ranking],
        held={PageClass.ADAPTER: adapter_pages(state)},
        floors={PageClass.ADAPTER: floor},
        count_needed=count,
    )
    if chosen is None:
        return None
    entries = {id(candidate): entry for candidate, entry in offered}
    return [entries[id(candidate)] for candidate in chosen]


def reclaimable_pages(state: EngineState, keep: AdapterEntry | None = None) -> int:
    """Pages of adapters that satisfy the full eviction predicate (0x05C)."""
    return sum(candidate.pages for candidate, _ in candidates(state, keep))


def evict_for(state: EngineState, pages_needed: int, keep: AdapterEntry | None = None) -> bool:
    """Evict idle adapters until `pages_needed` pages were freed; False, with nothing changed, when they do not."""
    victims = choose(state, pages_needed, keep=keep, floor=state.limits.adapter_floor)
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
    state.free_pages(entry.pages, PageState.ADAPTER, entry.slot, entry.generation)
    entry.pages = entry.pages[:0]
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
    state.occupied_pages -= entry.page_count
    entry.slot = entry.generation = 0


def note_prefetch(state: EngineState, entry: AdapterEntry, *, used: bool) -> None:
    """A speculative load was used, or goes unused."""
    entry.prefetched = False
    state.speculation.used += used
    state.speculation.wasted_pages += 0 if used else entry.page_count
    state.emit(PrefetchReleased(state.clock.now_ns(), entry.key, entry.page_count, used))


def reserve(state: EngineState, demand: Demand, entry: AdapterEntry, *, evicting: bool) -> Transaction | None:
    """The joint transaction for a load of `entry`, victims retired inside it; None, with nothing changed, without pages.

    evicting: whether other adapters may be evicted for it.
    """
    over = adapter_pages(state) + demand.adapter - state.caps.adapter_pages
    pages = max(demand.required - state.pool.free, over, 0)
    slots = len(state.occupied) + 1 - min(state.caps.resident_adapters, state.limits.max_adapter_slots - 1)
    victims: list[AdapterEntry] | None = []
    if pages or slots > 0:
        victims = choose(state, pages, keep=entry, count=max(slots, 0)) if evicting else None
    if victims is None:
        return None
    for victim in victims:
        retire(state, victim)
    transaction = Transaction.reserve(
        state.next_transaction(), state.pool, demand, victims=victims, last_launch=state.launched
    )
    for victim in victims:
        unpublish(state, victim)
    return transaction


def shortfall(state: EngineState, demand: Demand, entry: AdapterEntry) -> str:
    """Why `reserve` found nothing, in numbers."""
    reclaimable = reclaimable_pages(state, entry)
    missing = max(
        demand.required - state.pool.free - reclaimable,
        adapter_pages(state) + demand.adapter - reclaimable - state.caps.adapter_pages,
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
        needed = kv_pages + entry.page_count
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
    held = pinned_pages(state.pinned.values(), entry)
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
    held = pinned_pages(state.pinned.values(), entry)
    if entry.page_count + held > state.caps.adapter_pages:
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


def pinned_pages(pinned: Iterable[AdapterEntry], but: AdapterEntry | None = None) -> int:
    """Pages that pins hold or will hold, without those of `but`."""
    return sum(entry.page_count for entry in pinned if entry is not but)


def image_bytes(state: EngineState, entry: AdapterEntry) -> int:
    """Bytes of an adapter's image in host memory."""
    return entry.page_count * state.pool.page_bytes
