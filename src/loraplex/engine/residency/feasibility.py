"""What can never be had, however long one waits: pins, limits and the pool leave too little.

Counts need and room for `schedule.predicates`, and says why not as the typed refusal. Looks at sizes, pins
and limits alone, never at who runs now (that is `room`'s) and never at who could go (`victims`').

Specification: 0x09B (feasible); rulings "Leases" (pins).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry
from loraplex.schedule.predicates import Infeasible, unreservable
from loraplex.schedule.snapshot import Need, Room


def need_of(state: EngineState, entry: AdapterEntry | None, kv_pages: int) -> Need:
    """What `kv_pages` and an adapter, or the base, take at least."""
    if entry is None:
        return Need(kv_pages=kv_pages)
    return Need(
        kv_pages=kv_pages,
        adapter_pages=entry.page_count,
        least_pages=least_pages(state, entry),
        image_bytes=state.image_bytes(entry),
        slot=not entry.resident,
    )


def room_of(state: EngineState, entry: AdapterEntry | None) -> Room:
    """What limits and pins of other adapters leave, were nobody running."""
    others = [other for other in state.pinned.values() if other is not entry]
    return Room(
        pages=state.pool.usable,
        adapter_pages=state.caps.adapter_pages,
        adapter_slots=min(state.caps.resident_adapters, state.limits.max_adapter_slots - 1),
        host_bytes=state.host.limit_bytes,
        pinned_pages=pages_of(others),
        pinned_adapters=len(others),
        pinned_bytes=sum(state.image_bytes(other) for other in others),
    )


def impossible(state: EngineState, entry: AdapterEntry, kv_pages: int) -> LoraplexError | None:
    """Why no waiting would help: pins and limits leave too little. None when it could be had."""
    need, room = need_of(state, entry, kv_pages), room_of(state, entry)
    reason = unreservable(need, room)
    return None if reason is None else sentence(reason, need, room)


def sentence(reason: Infeasible, need: Need, room: Room) -> CapacityError:
    """What cannot be reserved, in numbers."""
    match reason:
        case Infeasible.ADAPTER_LIMIT:
            return CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"the adapter needs {need.adapter_pages} pages, the limit leaves adapters "
                f"{room.adapter_pages}; raise it",
            )
        case Infeasible.PINNED_SLOTS:
            return CapacityError(
                ErrorCode.ADAPTER_SLOTS_EXHAUSTED,
                f"{room.pinned_adapters} adapters are pinned, {room.adapter_slots} may be resident; unpin "
                "one",
            )
        case Infeasible.PINNED_ADAPTER_PAGES:
            return CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"the adapter needs {need.adapter_pages} pages, pinned ones hold {room.pinned_pages} of the "
                f"{room.adapter_pages} that adapters may take; unpin one",
            )
        case Infeasible.HOST_MEMORY:
            return CapacityError(
                ErrorCode.HOST_MEMORY_EXHAUSTED,
                f"the adapter's image has {need.image_bytes} bytes, pinned ones have {room.pinned_bytes}, "
                f"the host limit is {room.host_bytes}; raise it or unpin",
            )
        case _:
            return CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"{need.kv_pages + need.least_pages} pages are needed, pinned adapters hold "
                f"{room.pinned_pages} of {room.pages}; unpin one",
            )


def too_large(state: EngineState, pages: int) -> CallerError | None:
    """Why not even the empty pool would do."""
    if pages <= state.pool.usable:
        return None
    return CallerError(
        ErrorCode.REQUEST_EXCEEDS_POOL,
        f"the request needs {pages} pages, the pool has {state.pool.usable}; shorten it or enlarge the pool",
    )


def require_pinnable(state: EngineState, entry: AdapterEntry) -> None:
    """Raise why one more pin on `entry` would leave too little for what is pinned or under way."""
    refusal = impossible(state, entry, 0)
    if refusal is not None:
        raise refusal
    pages = pinned_with(state, entry)
    if pages > state.caps.adapter_pages:
        raise CapacityError(
            ErrorCode.POOL_EXHAUSTED,
            f"pins would hold {pages} pages of the {state.caps.adapter_pages} that adapters may take; unpin "
            "one first",
        )
    for record in state.records.values():
        total = state.limits.kv.pages_for(record.prompt_tokens + record.sampling.max_tokens)
        other = record.entry if record.entry is not None and record.entry.key not in state.pinned else None
        needed = total + (other.page_count if other is not None and other is not entry else 0)
        if needed > state.pool.usable - pages:
            raise CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"a request under way may need {needed} pages, pins would leave {state.pool.usable - pages}; "
                "pin when it has ended",
            )
    if len(state.pinned) - (entry.key in state.pinned) >= state.caps.resident_adapters:
        raise CapacityError(
            ErrorCode.ADAPTER_SLOTS_EXHAUSTED,
            f"{len(state.pinned)} adapters are pinned, {state.caps.resident_adapters} may be resident; unpin "
            "one first",
        )


def pages_of(entries: Iterable[AdapterEntry]) -> int:
    """Pages that adapters hold or will hold together.

    Small ones count the slab pages that they lie in, once each; those that are not on the device are counted
    as packed into blocks of these pages that are none of theirs, and into new ones. They may come to lie
    further apart; then they count what they hold.
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
    """Pages that an adapter needs beside the pinned ones: none where one of their slabs has a block
    for it.
    """
    return pinned_with(state, entry) - pinned_pages(state, entry)
