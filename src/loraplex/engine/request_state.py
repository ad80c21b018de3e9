"""One request's record: everything about it that is not in the running table's arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from loraplex.core.messages import EngineSampling
from loraplex.core.packed import I32
from loraplex.core.ports import Constraint
from loraplex.engine.token_rules import TokenRules
from loraplex.identity.cache import KeyChain
from loraplex.identity.execution import History
from loraplex.memory.leases import RevisionLease, SlotLease
from loraplex.memory.prefix import EMPTY_RECEIPT, CachedBlock, Receipt
from loraplex.memory.residency import AdapterEntry
from loraplex.memory.transaction import Transaction
from loraplex.schedule.queue import Ticket


class Stage(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class RequestPrefix:
    """What a request has to do with cached blocks. root, history: what its keys begin with. chain: makes the
    keys of its generated blocks. keys: of its full blocks, of which its client made the first `given`.

    looks_up: whether it may take what is cached. receipt: of its last look-up. blocks: cached ones that it
    references, from the first on. computing: keys that others wait for while it computes their blocks.
    matched: blocks that were found.
    """

    root: bytes
    history: History
    chain: KeyChain
    keys: list[bytes]
    given: int
    looks_up: bool
    receipt: Receipt = EMPTY_RECEIPT
    blocks: list[CachedBlock] = field(default_factory=list)
    computing: list[bytes] = field(default_factory=list)
    matched: int = 0


@dataclass(slots=True)
class RequestRecord:
    """A request from enqueue to end.

    tokens: known tokens while it waits (prompt, after a preemption with its output). ticket: its place in the
    queue, given once. grammar: what its output must follow, own_ends: what may end it beside the model's end
    tokens; constraint: how far it has come there, from its first admission on. rules: what its sampling
    parameters forbid, while it runs. load_failures: loads for it that failed; a retry keeps everything else.
    scored: prompt positions whose log probabilities were sent. admissions: how often it was admitted;
    bound_admission: the last of which a client knows what it was bound to. invoked_at: position from which on
    an activated adapter acts, -1 for every other request. prefix: None where nothing of it is cached. awaits:
    what it is parked for. skipped: steps that had a place but no pages for it; overtaken: later ones of its
    tenant and urgency that were let in before it; owed: one of the two reached its bound. found_no_room:
    `EngineState.room` as it was then. account: number of its tenant's. served: positions of its prompt that
    were debited to its tenant. waiting_since_ns: when it began to wait, the last time. hold: reason noted at
    the last look at it as it waited (`engine.holds`), since hold_since_ns. preempting: its pages go as soon
    as nothing of it is in flight.
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
    stage: Stage = Stage.WAITING
    slot: int = -1
    lease: SlotLease | None = None
    transaction: Transaction | None = None
    scored: int = 0
    outputs: int = 0
    admissions: int = 0
    bound_admission: int = 0
    skipped: int = 0
    overtaken: int = 0
    owed: bool = False
    found_no_room: tuple[int, int] | None = None
    load_failures: int = 0
    preempting: bool = False
    grammar: str | None = None
    own_ends: tuple[int, ...] = ()
    constraint: Constraint | None = None
    rules: TokenRules | None = None
    first_token: bool = False
    invoked_at: int = -1
    prefix: RequestPrefix | None = None
    awaits: str = ""
    account: int = -1
    served: int = 0
    waiting_since_ns: int = 0
    hold: str = ""
    hold_since_ns: int = 0

    @property
    def entry(self) -> AdapterEntry | None:
        """The adapter revision that it leased."""
        return self.revision.entry if self.revision is not None else None

    @property
    def remaining_outputs(self) -> int:
        """Output tokens that it may still produce."""
        return self.sampling.max_tokens - self.outputs


class Purpose(IntEnum):
    """Why an adapter is loaded, in the order in which copies are started."""

    RESTORE = 0
    ADMISSION = 1
    SHADOW = 2
    PIN = 3
    PREFETCH = 4
    AHEAD = 5
    REGISTER = 6

    @property
    def speculative(self) -> bool:
        """Whether nobody waits for it: it takes only what no admitted request will want (0x09J)."""
        return self in (Purpose.PREFETCH, Purpose.AHEAD, Purpose.REGISTER)

    @property
    def awaited(self) -> bool:
        """Whether requests wait for it, or may: those that run pay for its start, so that these
        start sooner.
        """
        return self in (Purpose.RESTORE, Purpose.ADMISSION)


@dataclass(slots=True)
class LoadJob:
    """A load into (slot, generation). record: the request whose admission started it, if one did.

    started: its copy was put into a plan, at started_ns; before, it waits for the last launch that may name
    its pages.
    """

    entry: AdapterEntry
    slot: int
    generation: int
    transaction: Transaction
    purpose: Purpose
    record: RequestRecord | None = None
    started: bool = False
    started_ns: int = 0


@dataclass(slots=True)
class Want:
    """A call that wants an adapter on the device. fruitless_steps: steps in which it found no pages, the last
    of them when plan `tried_at` was the newest that had been committed. host_only: its image in host memory
    is enough.
    """

    entry: AdapterEntry
    purpose: Purpose
    call_id: int
    fruitless_steps: int = 0
    tried_at: int = -1
    host_only: bool = False

    def found_nothing(self, committed: int) -> None:
        """Note a step without pages or bytes for it. committed: newest committed plan."""
        self.fruitless_steps += 1
        self.tried_at = committed

    def stalled(self, committed: int) -> bool:
        """Whether only something that somebody does could move it on: a pin that found no room, and no commit
        since.
        """
        return self.purpose is Purpose.PIN and self.tried_at == committed
