"""The host tier at work: which images are fetched, and which are given up for them.

A revision lease makes sure of the registered image in the disk store; bytes in host memory it has by
preference only: images that nobody leases go first, and one that is on the device, or on its way there, is
never given up, because a rollback restores from it. An image that fails to arrive is tried again with growing
pauses.

Specification: 0x04A, 0x04C (absent, host_ready); rulings "Residency", "Loading".
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import HostDropped, HostFetched
from loraplex.core.ports import Fetched
from loraplex.engine.residency import transitions, victims
from loraplex.engine.residency.load_failures import count_failure
from loraplex.engine.state import EngineState
from loraplex.memory.host import HostState
from loraplex.memory.residency import AdapterEntry


class AllOnHost:
    """`core.ports.Loader` for engines whose images are all in host memory: every fetch has ended at the next
    poll.
    """

    def __init__(self) -> None:
        self._asked: list[str] = []

    def fetch(self, kernel_digest: str) -> None:
        """Nothing is moved."""
        self._asked.append(kernel_digest)

    def drop(self, kernel_digest: str) -> None:
        """Nothing is kept."""

    def poll(self, wait: bool) -> Sequence[Fetched]:
        """Everything asked for."""
        asked, self._asked = self._asked, []
        return [Fetched(digest) for digest in asked]


def want(state: EngineState, entry: AdapterEntry, *, speculative: bool = False) -> bool:
    """See that an absent adapter's image comes; False when it cannot now. speculative: give nothing up for
    it.
    """
    image = state.host.get(entry.kernel_digest)
    if image is not None:
        if image.state is HostState.READY:
            transitions.reach_host(state, entry)
        return True
    if state.clock.now_ns() < entry.retry_at_ns:
        return False
    nbytes = state.image_bytes(entry)
    if not _make_room(state, nbytes, entry, speculative) or not state.host.begin(entry.kernel_digest, nbytes):
        return False
    state.loader.fetch(entry.kernel_digest)
    return True


def poll(state: EngineState) -> bool:
    """Take what the loader finished; whether anything ended."""
    ended = state.loader.poll(state.only_fetching) if state.host.fetching else ()
    for fetched in ended:
        _arrived(state, fetched)
    return bool(ended)


def _arrived(state: EngineState, fetched: Fetched) -> None:
    image = state.host.get(fetched.kernel_digest)
    if image is None or image.state is not HostState.FETCHING:
        return  # a loader that answers twice changes nothing
    state.room_changed()
    sharers = state.sharers.get(fetched.kernel_digest, ())
    if fetched.code is None:
        state.host.arrived(fetched.kernel_digest)
        for entry in sharers:
            state.emit(HostFetched(state.clock.now_ns(), entry.key, image.nbytes))
            transitions.reach_host(state, entry)
        drop_unnamed(state, fetched.kernel_digest)
        return
    state.host.failed(fetched.kernel_digest)
    for entry in sharers:
        known = (
            fetched.code if fetched.code in ErrorCode._value2member_map_ else ErrorCode.ADAPTER_LOAD_FAILED
        )
        message = fetched.message or "its host image could not be made"
        count_failure(state, entry, "fetch", InternalFault(ErrorCode(known), message))


def _make_room(state: EngineState, nbytes: int, asker: AdapterEntry, speculative: bool) -> bool:
    host = state.host
    if nbytes > host.limit_bytes:
        return False
    missing = host.used_bytes + nbytes - host.limit_bytes
    if missing <= 0:
        return True
    if speculative:
        return False
    return free_bytes(state, missing, asker)


def free_bytes(state: EngineState, missing: int, asker: AdapterEntry | None = None) -> bool:
    """Give up host images for `missing` bytes: unleased ones, leased ones, then those of evictable adapters.

    False, with nothing changed, when they do not suffice.
    """
    images = state.host.droppable()
    images.sort(key=lambda image: _leased(state, image.kernel_digest))
    evictable = sorted(victims.evictable(state, asker), key=lambda entry: entry.last_use)
    if sum(i.nbytes for i in images) + sum(state.image_bytes(e) for e in evictable) < missing:
        return False
    for image in images:
        if missing <= 0:
            return True
        drop(state, image.kernel_digest)
        missing -= image.nbytes
    for entry in evictable:
        if missing <= 0:
            break
        transitions.evict(state, entry)
        if state.host.ready(entry.kernel_digest) and entry.kernel_digest in _droppable(state):
            missing -= state.image_bytes(entry)
            drop(state, entry.kernel_digest)
    return True


def _droppable(state: EngineState) -> set[str]:
    return {image.kernel_digest for image in state.host.droppable()}


def _leased(state: EngineState, kernel_digest: str) -> bool:
    return any(entry.revision_leases for entry in state.sharers.get(kernel_digest, ()))


def drop(state: EngineState, kernel_digest: str) -> None:
    """Give one host image up; its adapter is absent from then on."""
    state.room_changed()
    image = state.host.get(kernel_digest)
    state.host.drop(kernel_digest)
    state.loader.drop(kernel_digest)
    for entry in state.sharers.get(kernel_digest, ()):
        transitions.leave_host(state, entry)
        if image is not None:
            state.emit(HostDropped(state.clock.now_ns(), entry.key, image.nbytes))


def drop_unnamed(state: EngineState, kernel_digest: str) -> None:
    """Give up the image of an adapter that has left, unless another entry has it or it is still on
    its way.
    """
    if state.sharers.get(kernel_digest):
        return
    state.sharers.pop(kernel_digest, None)
    if kernel_digest in _droppable(state):
        drop(state, kernel_digest)
