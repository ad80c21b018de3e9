"""The two leases of a request on its adapter, each released exactly once.

A *revision lease* is taken at enqueue and kept to the request's end: it holds the catalog entry and host
bytes, not device pages. A *slot lease* is taken at joint admission: it counts in the slot's refcount, is
given up at preemption and taken again on the same revision, perhaps in another slot.

Specification: 0x07H, 0x04F; rulings "Leases".
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.memory.residency import UNLEASED, AdapterEntry, AdapterState


@dataclass(slots=True)
class RevisionLease:
    """A live request's hold on an adapter revision. generation: the revision's, as it was bound."""

    entry: AdapterEntry
    generation: int
    open: bool = True

    @staticmethod
    def take(entry: AdapterEntry) -> RevisionLease:
        """Bind one request to the revision for its whole life."""
        if entry.removing:
            raise InternalFault(ErrorCode.LEASE_MISMATCH, f"adapter {entry.key[:12]} takes no new requests")
        entry.revision_leases += 1
        return RevisionLease(entry, entry.revision)

    def release(self) -> None:
        """End the hold; a second release raises `lease_underflow`."""
        if not self.open or self.entry.revision_leases < 1:
            raise InternalFault(
                ErrorCode.LEASE_UNDERFLOW, f"revision lease on {self.entry.key[:12]} released twice"
            )
        self.open = False
        self.entry.revision_leases -= 1


@dataclass(slots=True)
class SlotLease:
    """A running request's hold on a published slot at one generation."""

    entry: AdapterEntry
    slot: int
    generation: int
    open: bool = True

    @staticmethod
    def take(revision: RevisionLease, launch: int) -> SlotLease:
        """Bind a request to the published slot of the revision that it leased; a retiring slot still serves
        it.
        """
        entry = revision.entry
        if not revision.open or not entry.resident:
            raise InternalFault(
                ErrorCode.LEASE_MISMATCH,
                f"adapter {entry.key[:12]} is {entry.state}, not published: no row binds it",
            )
        if entry.state in UNLEASED:
            entry.move(AdapterState.ACTIVE)
        entry.refcount += 1
        entry.last_use = launch
        return SlotLease(entry, entry.slot, entry.generation)

    @property
    def valid(self) -> bool:
        """Whether the slot still holds what was leased."""
        return self.open and (self.entry.slot, self.entry.generation) == (self.slot, self.generation)

    def release(self, launch: int) -> None:
        """End the hold; the last one leaves the adapter idle. A second release raises `lease_underflow`."""
        if not self.open or self.entry.refcount < 1:
            raise InternalFault(
                ErrorCode.LEASE_UNDERFLOW, f"slot lease on {self.entry.key[:12]} released twice"
            )
        self.open = False
        self.entry.refcount -= 1
        self.entry.last_use = launch
        if self.entry.refcount == 0 and self.entry.state is AdapterState.ACTIVE:
            self.entry.move(AdapterState.IDLE)
