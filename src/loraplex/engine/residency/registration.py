"""Adapters of this worker: registered, described, removed, revoked.

Registering takes an image that lies verified in the disk store; whether it goes on to host and device is
decided by calls (`wants`), by requests (`admission`) and by the queue. Removal stops new requests at once and
waits for nobody: the adapter leaves when its last lease, its copy and the last launch that names it are gone,
and cached blocks made under it go with it. Revocation ends its requests.

Specification: 0x07F to 0x07I; rulings "Residency".
"""

from __future__ import annotations

from typing import Final

from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.events import AdapterRevoked
from loraplex.core.layout import MAX_SIZE_CLASS, block_bytes
from loraplex.core.messages import RegisterAdapter, RemoveAdapter, Reply, RevokeAdapter
from loraplex.engine import endings, prefixes
from loraplex.engine.request_state import Purpose, Want
from loraplex.engine.residency import transitions
from loraplex.engine.residency.hosting import drop_unnamed
from loraplex.engine.state import EngineState
from loraplex.identity.canonical import check_digest
from loraplex.identity.execution import adapter_execution
from loraplex.memory.residency import BINDABLE, AdapterEntry

_HEXADECIMAL: Final = frozenset("0123456789abcdef")


def register(state: EngineState, message: RegisterAdapter) -> None:
    """Take an adapter; it is loaded at once where free bytes and pages allow it."""
    known = state.adapters.get(message.key)
    if known is not None:
        if known.kernel_digest != message.kernel_digest:
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID, f"adapter {message.key[:12]} arrived with another kernel image"
            )
        state.outbox.append(Reply(message.call_id, body=describe(state, known)))
        return
    _require_sound(message, state.pool.page_bytes, state.limits.vocab_size)
    if message.pages > state.pool.usable:
        raise CallerError(
            ErrorCode.ADAPTER_TOO_LARGE,
            f"the adapter needs {message.pages} pages, the pool has {state.pool.usable}; enlarge the pool",
        )
    state.registrations += 1
    entry = AdapterEntry(
        key=message.key,
        kernel_digest=message.kernel_digest,
        page_count=message.pages,
        rank_sum=sum(rank * count for rank, count in message.ranks),
        ranks=message.ranks,
        modules=message.modules,
        host_bytes=message.host_bytes,
        size_class=message.size_class,
        execution=_execution(state, message),
        invocation=message.invocation,
        revision=state.registrations,
    )
    state.adapters[entry.key] = entry
    state.sharers.setdefault(entry.kernel_digest, []).append(entry)
    state.wants.append(Want(entry, Purpose.REGISTER, message.call_id))


def _execution(state: EngineState, message: RegisterAdapter) -> str:
    """What acts where the adapter is on, as far as KV rows can tell; raises `identity_invalid`. Empty where
    nothing is cached.
    """
    if not state.limits.prefix_cache:
        return ""
    if message.execution:
        return check_digest("execution", message.execution)
    return adapter_execution(message.key)


def _require_sound(message: RegisterAdapter, page_bytes: int, vocab_size: int) -> None:
    """What a preparation says of its image must at least be possible; nothing else here looks at it before a
    copy.
    """
    for name, digest in (("key", message.key), ("kernel digest", message.kernel_digest)):
        if not digest:
            raise InternalFault(ErrorCode.IDENTITY_INVALID, f"an adapter was registered without a {name}")
    if len(message.kernel_digest) != 64 or not set(message.kernel_digest) <= _HEXADECIMAL:
        raise InternalFault(
            ErrorCode.IDENTITY_INVALID,
            f"kernel digest {message.kernel_digest[:12]!r} is not 64 lower-case hexadecimal digits",
        )
    if message.pages < 1 or message.host_bytes < 0 or any(r < 1 or n < 1 for r, n in message.ranks):
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT,
            f"an image of {message.pages} pages, {message.host_bytes} bytes and ranks {message.ranks} cannot "
            "be",
        )
    if not all(0 <= token < vocab_size for token in message.invocation):
        raise CallerError(
            ErrorCode.TOKEN_OUT_OF_RANGE,
            f"an invocation of the token ids {message.invocation} leaves the vocabulary of {vocab_size}",
        )
    size_class = message.size_class
    exists = 0 <= size_class <= MAX_SIZE_CLASS and block_bytes(page_bytes, size_class) > 0
    if not exists or (size_class and message.pages != 1):
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT,
            f"an image of {message.pages} pages cannot take a block of size class {size_class} of "
            f"{page_bytes} bytes",
        )


def find(state: EngineState, key: str) -> AdapterEntry:
    """A registered adapter; `adapter_not_found` otherwise."""
    entry = state.adapters.get(key)
    if entry is None:
        raise CallerError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter {key[:12]} is not registered")
    return entry


def remove(state: EngineState, message: RemoveAdapter) -> None:
    """Stop new requests on an adapter; it leaves, and the call is answered, when its last request
    has ended.
    """
    entry = find(state, message.key)
    transitions.withdraw(state, entry, message.call_id)
    if entry.state in BINDABLE:
        if entry.prefetched:
            transitions.end_prefetch(state, entry, used=False)
        transitions.retire(state, entry)
    finish_departures(state)


def revoke(state: EngineState, message: RevokeAdapter) -> None:
    """End every request on an adapter that was found bad, and let it leave."""
    entry = find(state, message.key)
    entry.revoked = True
    bound = [record for record in state.records.values() if record.entry is entry]
    for record in bound:
        endings.end(
            state,
            record,
            error=CallerError(
                ErrorCode.ADAPTER_REVOKED, f"adapter {entry.key[:12]} was revoked while it served"
            ),
        )
    state.emit(AdapterRevoked(state.clock.now_ns(), entry.key, len(bound)))
    prefixes.drop(state, entry)
    remove(state, RemoveAdapter(message.call_id, message.key))


def finish_departures(state: EngineState) -> None:
    """Reclaim removed adapters whose last lease is gone and that no launch in flight names."""
    still: list[tuple[AdapterEntry, int]] = []
    for entry, call_id in state.departing:
        if (
            entry.revision_leases
            or entry.refcount
            or entry.loading
            or entry.evicting
            or entry.last_launch > state.committed_launch
        ):
            still.append((entry, call_id))
            continue
        transitions.leave(state, entry)
        if all(entry.key != other.key for other in state.adapters.values()):
            prefixes.drop(state, entry)
        state.sharers[entry.kernel_digest] = [e for e in state.sharers[entry.kernel_digest] if e is not entry]
        drop_unnamed(state, entry.kernel_digest)
        if call_id:
            state.outbox.append(Reply(call_id, body=describe(state, entry)))
    state.departing = still


def describe(state: EngineState, entry: AdapterEntry) -> dict[str, object]:
    """The engine's view of one adapter, for replies. device_pages: of its own; a block counts in device_bytes
    alone.
    """
    placed = entry.block is not None or entry.pages.size > 0
    return {
        "key": entry.key,
        "state": entry.state.value,
        "residency": entry.residency.value,
        "slot": entry.slot,
        "generation": entry.generation,
        "device_pages": int(entry.pages.size),
        "device_bytes": state.image_bytes(entry) if placed else 0,
        "size_class": entry.size_class,
        "page_count": entry.page_count,
        "host_bytes": entry.host_bytes,
        "on_host": entry.host_source_verified,
        "leases": entry.revision_leases,
        "slot_leases": entry.refcount,
        "pinned": entry.pin_count > 0,
        "pins": entry.pin_count,
        "removing": entry.removing,
        "failures": entry.load_failures,
    }
