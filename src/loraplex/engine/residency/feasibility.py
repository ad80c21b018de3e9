"""What can never be had, however long one waits: pins, limits and the pool leave too little.

Says why, as the typed refusal. Looks at sizes, pins and limits alone, never at who runs now (that is
`room`'s) and never at who could go (`victims`').

Specification: 0x09B (feasible); rulings "Leases" (pins).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry


def impossible(state: EngineState, entry: AdapterEntry | None, kv_pages: int) -> LoraplexError | None:
    """Why no waiting would help: pins and limits leave too little. None when it could be had."""
    if entry is None:
        needed = kv_pages
    else:
        needed = kv_pages + least_pages(state, entry)
        if entry.page_count > state.caps.adapter_pages:
            return CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"the adapter needs {entry.page_count} pages, the limit leaves adapters "
                f"{state.caps.adapter_pages}; raise it",
            )
        refusal = None if entry.resident else _beside_pins(state, entry)
        if refusal is not None:
            return refusal
        pinned_bytes = sum(state.image_bytes(other) for other in state.pinned.values() if other is not entry)
        if state.image_bytes(entry) + pinned_bytes > state.host.limit_bytes:
            return CapacityError(
                ErrorCode.HOST_MEMORY_EXHAUSTED,
                f"the adapter's image has {state.image_bytes(entry)} bytes, pinned ones have {pinned_bytes}, "
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
