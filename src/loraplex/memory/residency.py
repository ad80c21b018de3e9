"""Where each adapter is: one transition table, one directory of adapter slots.

Owns residency states, slot generations and the counts that make an adapter evictable; never moves bytes,
never chooses victims (`eviction`) and never chooses when to load. No row binds before the whole adapter is
published, and a slot's generation grows at each new occupation, so that a stale handle can never become valid
again (ABA).

Specification: 0x04C (state machine), 0x04F (counts), 0x07F to 0x07H (handles and leases), 0x09A (its
projection).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from loraplex.core.errors import CapacityError, ErrorCode, InternalFault
from loraplex.core.layout import block_bytes
from loraplex.core.packed import I32, empty
from loraplex.memory.slabs import Block


class AdapterState(StrEnum):
    """Residency of one adapter revision on this worker."""

    ABSENT = "absent"
    HOST_READY = "host_ready"
    RESERVED = "reserved"
    LOADING = "loading"
    VALIDATED = "validated"
    PUBLISHED = "published"
    ACTIVE = "active"
    IDLE = "idle"
    RETIRING = "retiring"


_S = AdapterState
TRANSITIONS: Final[dict[AdapterState, frozenset[AdapterState]]] = {
    _S.ABSENT: frozenset({_S.HOST_READY}),
    _S.HOST_READY: frozenset({_S.RESERVED, _S.ABSENT}),
    _S.RESERVED: frozenset({_S.LOADING, _S.HOST_READY}),
    _S.LOADING: frozenset({_S.VALIDATED, _S.HOST_READY}),
    _S.VALIDATED: frozenset({_S.PUBLISHED, _S.HOST_READY}),
    _S.PUBLISHED: frozenset({_S.ACTIVE, _S.IDLE, _S.RETIRING}),
    _S.ACTIVE: frozenset({_S.IDLE, _S.RETIRING}),
    _S.IDLE: frozenset({_S.ACTIVE, _S.RETIRING}),
    _S.RETIRING: frozenset({_S.HOST_READY, _S.ABSENT}),
}
"""Every legal change of state.

HOST_READY after RETIRING is an eviction: the host source stays. HOST_READY after RESERVED, LOADING or
VALIDATED is a load that was rolled back. ABSENT after HOST_READY is a host image that was given up. RETIRING
after ACTIVE is a removal or a swap under requests that go on.
"""

BINDABLE: Final = (_S.ACTIVE, _S.IDLE, _S.PUBLISHED)
"""In the order in which a launch meets them: each adapter of each step is looked up here, and a hash of a
state costs more.
"""
LOADING: Final = frozenset({_S.RESERVED, _S.LOADING, _S.VALIDATED})
UNLEASED: Final = frozenset({_S.PUBLISHED, _S.IDLE})


class Residency(StrEnum):
    """The scheduler's five words for the same thing (0x09A)."""

    COLD = "cold"
    LOADING = "loading"
    RESIDENT = "resident"
    RETIRING = "retiring"
    FAILED = "failed"


@dataclass(slots=True)
class AdapterEntry:
    """One adapter revision. key: semantic digest; kernel_digest: names its host image.

    page_count: pages that it fills. size_class: 0 where they are its own; else it takes one block of a slab
    page of this class, and page_count is 1, what it needs where no slab has a block for it. pages, block:
    what it owns now. slot, generation: its entry in the row-table directory while it has pages, else 0.
    refcount: slot leases; pin_count: explicit pins; inflight_events: copies that may still write its pages;
    last_launch: newest launch that names it; last_use: launch at which a slot lease was last taken or given
    back. revision_leases: live requests bound to the revision, running or not. removing: no new requests; it
    goes when its last lease does. revoked: found bad after it was published. evicting: the transaction that
    took its pages and may have to give them back, else 0. load_failures: loads and fetches in a row that
    failed; retry_at_ns: none is tried before. prefetched: loaded on speculation, not used yet. execution:
    digest of what acts where it is on, as far as KV rows can tell; empty where nothing is cached. invocation:
    token ids that switch an activated adapter on, none for one that is always on. revision: number of its
    registration here, which requests lease.
    """

    key: str
    kernel_digest: str
    page_count: int
    rank_sum: int
    ranks: tuple[tuple[int, int], ...]
    modules: tuple[int, ...]
    host_bytes: int
    state: AdapterState = AdapterState.ABSENT
    slot: int = 0
    generation: int = 0
    pages: I32 = field(default_factory=empty)
    refcount: int = 0
    pin_count: int = 0
    inflight_events: int = 0
    last_launch: int = 0
    last_use: int = 0
    revision_leases: int = 0
    host_source_verified: bool = False
    removing: bool = False
    revoked: bool = False
    evicting: int = 0
    load_failures: int = 0
    retry_at_ns: int = 0
    prefetched: bool = False
    size_class: int = 0
    block: Block | None = None
    execution: str = ""
    invocation: tuple[int, ...] = ()
    revision: int = 1

    @property
    def own_pages(self) -> int:
        """Pages that it has for itself while it is on the device: none where it takes a block."""
        return 0 if self.size_class else self.page_count

    def image_bytes(self, page_bytes: int) -> int:
        """Bytes of its image, on the host and on the device: of its pages, or of its block."""
        return self.page_count * block_bytes(page_bytes, self.size_class)

    def move(self, after: AdapterState) -> AdapterState:
        """Change state along the table; returns the state before."""
        before = self.state
        if after not in TRANSITIONS[before]:
            raise InternalFault(
                ErrorCode.RESIDENCY_TRANSITION, f"adapter {self.key[:12]} cannot go from {before} to {after}"
            )
        self.state = after
        return before

    @property
    def resident(self) -> bool:
        """Whether it is published, for new binds or, while it retires, for requests that leased its revision.

        One whose pages a transaction has taken is not: its bytes may be overwritten.
        """
        return self.state in BINDABLE or (self.state is AdapterState.RETIRING and not self.evicting)

    @property
    def loading(self) -> bool:
        """Whether a load is under way."""
        return self.state in LOADING

    @property
    def residency(self) -> Residency:
        """The projection onto the scheduler's words."""
        if self.state in BINDABLE:
            return Residency.RESIDENT
        if self.state is AdapterState.RETIRING:
            return Residency.RETIRING
        if self.state in LOADING:
            return Residency.LOADING
        return Residency.FAILED if self.load_failures else Residency.COLD


class SlotDirectory:
    """The row-table directory: adapter slots 1.. with a generation each; slot 0 is the base."""

    def __init__(self, max_slots: int) -> None:
        """max_slots: directory size, slot 0 included."""
        self._generation = np.zeros(max_slots, dtype=np.int64)
        self._free = list(range(max_slots - 1, 0, -1))

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A free slot at a fresh generation."""
        if not self._free:
            raise CapacityError(
                ErrorCode.ADAPTER_SLOTS_EXHAUSTED,
                f"all {self._generation.size - 1} adapter slots are taken; remove or unpin an adapter",
            )
        slot = self._free.pop()
        self._generation[slot] += 1
        return slot, int(self._generation[slot])

    def give_back(self, slot: int, generation: int) -> None:
        """Free a slot; its generation grows so that handles to it are stale from now on."""
        if int(self._generation[slot]) != generation:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"slot {slot} is at generation {int(self._generation[slot])}, given back at {generation}",
            )
        self._generation[slot] += 1
        self._free.append(slot)

    def generation(self, slot: int) -> int:
        """Current generation of a slot."""
        return int(self._generation[slot])
