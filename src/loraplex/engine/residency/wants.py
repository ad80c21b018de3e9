"""What operators ask of residency, while requests run: load, prefetch, pin, unpin, limits.

A wish is served a little each step: image to the host, pages reserved, copy started. Nothing here waits. A
shadow load evicts for its pages and is refused at once with the shortfall where that does not suffice; a
speculative one takes only what no admitted request will want; a pin is kept and served as soon as it can be.

Specification: 0x04F (pins), 0x07G (shadow copy), 0x09J (prefetch); rulings "Leases".
"""

from __future__ import annotations

from typing import Final

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.messages import LoadAdapter, PinAdapter, PrefetchAdapter, Reply, SetLimits
from loraplex.engine.request_state import Purpose, Want
from loraplex.engine.residency import feasibility, hosting, loads, room, transitions, victims
from loraplex.engine.residency.registration import describe, find
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry, AdapterState

SHADOW_STEPS: Final = 4
"""Steps that a shadow load looks for pages in: what the plans in flight still name is free after them."""


def load(state: EngineState, message: LoadAdapter) -> None:
    """A shadow load (0x07G): replied when the adapter is published."""
    entry = find(state, message.key)
    _require_possible(state, entry)
    other = state.adapters.get(message.beside) if message.beside is not None else None
    host_only = message.beside is not None and (other is None or not (other.resident or other.loading))
    state.wants.append(Want(entry, Purpose.SHADOW, message.call_id, host_only=host_only))


def prefetch(state: EngineState, message: PrefetchAdapter) -> None:
    """An operator's speculative load: replied when it is published, or refused with what is missing."""
    entry = find(state, message.key)
    _require_possible(state, entry)
    state.wants.append(Want(entry, Purpose.PREFETCH, message.call_id))


def pin(state: EngineState, message: PinAdapter) -> None:
    """Add or take away one pin. Replied at once; a pinned adapter that is cold is loaded as soon as it can
    be.
    """
    entry = find(state, message.key)
    if not message.pinned:
        if entry.pin_count < 1:
            raise InternalFault(
                ErrorCode.LEASE_UNDERFLOW, f"adapter {entry.key[:12]} has no pin to take away"
            )
        entry.pin_count -= 1
        if not entry.pin_count:
            del state.pinned[entry.key]
            state.wants = [w for w in state.wants if w.entry is not entry or w.purpose is not Purpose.PIN]
    else:
        feasibility.require_pinnable(state, entry)
        entry.pin_count += 1
        if entry.pin_count == 1:
            state.pinned[entry.key] = entry
            state.wants.append(Want(entry, Purpose.PIN, 0))
    state.outbox.append(Reply(message.call_id, body=describe(state, entry)))


def _require_possible(state: EngineState, entry: AdapterEntry) -> None:
    refusal = feasibility.impossible(state, entry, 0)
    if refusal is not None:
        raise refusal


def set_limits(state: EngineState, message: SetLimits) -> None:
    """Change limits; what is above a lowered one leaves as soon as nothing uses it."""
    pages, slots, host = message.adapter_pages, message.resident_adapters, message.host_bytes
    if pages is not None:
        _within("adapter_pages", pages, 0, state.pool.usable)
        held = feasibility.pinned_pages(state)
        if held > pages:
            raise CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"pins hold {held} pages, more than the new limit of {pages}; unpin first",
            )
    if slots is not None:
        _within("resident_adapters", slots, 0, state.limits.max_adapter_slots - 1)
        if len(state.pinned) > slots:
            raise CapacityError(
                ErrorCode.ADAPTER_SLOTS_EXHAUSTED,
                f"{len(state.pinned)} adapters are pinned, more than the new limit of {slots}; unpin first",
            )
    if host is not None:
        _within("host_bytes", host, 0, 1 << 62)
    caps = state.caps
    caps.adapter_pages = caps.adapter_pages if pages is None else pages
    caps.resident_adapters = caps.resident_adapters if slots is None else slots
    state.host.limit_bytes = state.host.limit_bytes if host is None else host
    enforce(state)
    state.outbox.append(Reply(message.call_id, body=limits_of(state)))


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"{name} must be from {low} to {high}, got {value}", param=name
        )


def limits_of(state: EngineState) -> dict[str, int]:
    """Limits and what is above them still."""
    return {
        "adapter_pages": state.caps.adapter_pages,
        "adapter_floor_pages": state.limits.adapter_floor,
        "prefix_floor_pages": state.limits.prefix_floor,
        "resident_adapters": state.caps.resident_adapters,
        "host_bytes": state.host.limit_bytes,
        "adapter_pages_over": max(state.adapter_pages - state.caps.adapter_pages, 0),
        "resident_adapters_over": max(len(state.occupied) - state.caps.resident_adapters, 0),
        "host_bytes_over": state.host.excess_bytes,
    }


def enforce(state: EngineState) -> None:
    """Let go of what is above the limits and can go now."""
    over_pages = state.adapter_pages - state.caps.adapter_pages
    over_slots = len(state.occupied) - state.caps.resident_adapters
    if over_pages > 0 or over_slots > 0:
        for entry in victims.choose(state, over_pages, count=over_slots).victims:
            transitions.evict(state, entry)
    if state.host.excess_bytes:
        nbytes = sum(image.nbytes for image in state.host.droppable())
        hosting.free_bytes(state, min(state.host.excess_bytes, nbytes) if nbytes else state.host.excess_bytes)


def serve(state: EngineState) -> None:
    """Move every wish on by what is possible now."""
    if state.wants:
        waiting, state.wants = state.wants, []
        for wanted in waiting:
            try:
                done = _advance(state, wanted)
            except LoraplexError as error:
                if wanted.call_id:
                    state.outbox.append(Reply(wanted.call_id, error.code.value, error.message))
                continue
            if not done:
                state.wants.append(wanted)
            elif wanted.call_id:
                state.outbox.append(Reply(wanted.call_id, body=describe(state, wanted.entry)))


def _advance(state: EngineState, wanted: Want) -> bool:
    """One move of one wish; whether it has come to its end. Raises its refusal."""
    entry, purpose = wanted.entry, wanted.purpose
    if entry.removing:
        raise CallerError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter {entry.key[:12]} was removed meanwhile")
    if entry.resident or (wanted.host_only and entry.state is not AdapterState.ABSENT):
        return True
    if entry.loading or entry.evicting or state.clock.now_ns() < entry.retry_at_ns:
        return False
    if entry.state is AdapterState.ABSENT:
        return _advance_to_host(state, wanted)
    demand = room.demand(state, entry, guard=len(state.by_slot))
    if purpose.speculative:
        transaction = room.take_spare(state, demand, entry)
    else:
        transaction = room.take_for_load(state, demand, entry)
    if transaction is not None:
        loads.begin(state, entry, transaction, purpose)
        return False
    wanted.found_nothing(state.committed_launch)
    match purpose:
        case Purpose.REGISTER:
            return True
        case Purpose.PREFETCH:
            raise CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"a prefetch takes only pages that nobody will want: {demand.adapter} are needed, "
                f"{max(state.available_pages - room.committed_growth(state) - len(state.by_slot), 0)} are "
                "left; pin or use the adapter",
            )
        case Purpose.SHADOW if wanted.fruitless_steps >= SHADOW_STEPS:
            raise CapacityError(
                ErrorCode.POOL_EXHAUSTED,
                f"there is no room beside the old revision: {room.shortfall(state, demand, entry)}; "
                "try again later, or ask for a swap that drains",
            )
        case _:
            return False


def _advance_to_host(state: EngineState, wanted: Want) -> bool:
    entry, purpose = wanted.entry, wanted.purpose
    if hosting.want(state, entry, speculative=purpose.speculative):
        return False
    wanted.found_nothing(state.committed_launch)
    if purpose is Purpose.REGISTER:
        return True
    if purpose is Purpose.PIN or wanted.fruitless_steps < SHADOW_STEPS:
        return False
    raise CapacityError(
        ErrorCode.HOST_MEMORY_EXHAUSTED,
        f"the image needs {state.image_bytes(entry)} bytes of host memory, {state.host.used_bytes} of "
        f"{state.host.limit_bytes} are taken; raise the limit or try again later",
    )
