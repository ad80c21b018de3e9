"""One request's record: everything about it that is not in the running table's arrays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex.core.messages import EngineSampling
from loraplex.core.packed import I32
from loraplex.memory.leases import RevisionLease, SlotLease
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Transaction
from loraplex.schedule.queue import Ticket


class Phase(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class RequestRecord:
    """A request from enqueue to end.

    tokens: known tokens while it waits (prompt, after a preemption with its output). ticket: its place in the queue,
    given once. scored: prompt positions whose log probabilities were sent. admissions: how often it was admitted;
    bound_admission: the last of which a client knows what it was bound to. preempting: its pages go as soon as nothing
    of it is in flight.
    """

    request_id: str
    adapter: str | None
    tenant: str
    arrival_ns: int
    deadline_ns: int
    ticket: Ticket
    sampling: EngineSampling
    stop_ids: frozenset[int]
    prompt_tokens: int
    tokens: I32
    revision: RevisionLease | None
    phase: Phase = Phase.WAITING
    slot: int = -1
    lease: SlotLease | None = None
    transaction: Transaction | None = None
    scored: int = 0
    outputs: int = 0
    admissions: int = 0
    bound_admission: int = 0
    skipped: int = 0
    preempting: bool = False
    first_token: bool = False

    @property
    def entry(self) -> AdapterEntry | None:
        """The adapter revision that it leased."""
        return self.revision.entry if self.revision is not None else None

    @property
    def remaining_outputs(self) -> int:
        """Output tokens that it may still produce."""
        return self.sampling.max_tokens - self.outputs


@dataclass(slots=True)
class LoadJob:
    """A copy under way into (slot, generation). record: the request whose admission started it, if one did.

    call_id: the registration that waits for it, or 0.
    """

    entry: AdapterEntry
    slot: int
    generation: int
    transaction: Transaction
    record: RequestRecord | None = None
    call_id: int = 0
