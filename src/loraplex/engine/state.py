"""All state of one engine, and the few primitives that more than one step call needs.

Nothing here waits, and nothing here knows a backend: the calls of `step.py` read and change this in turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from loraplex.core.events import Event
from loraplex.core.messages import FromEngine
from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan, Deltas
from loraplex.core.ports import Clock, Grammars, Loader
from loraplex.engine.deltas import PendingDeltas
from loraplex.engine.request_state import LoadJob, RequestRecord, Want
from loraplex.engine.sizes import EngineLimits
from loraplex.memory.host import HostTier
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.prefix import PrefixIndex
from loraplex.memory.residency import AdapterEntry, SlotDirectory
from loraplex.schedule.deadlines import Deadlines
from loraplex.schedule.early_abort import Offers
from loraplex.schedule.estimates import Estimates
from loraplex.schedule.queue import WaitingQueue
from loraplex.schedule.running import RunningTable
from loraplex.schedule.select import Selection
from loraplex.schedule.starvation import StarvationWatch
from loraplex.schedule.tenant_service import TenantService

NO_BOUND: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched plan that is not committed yet, with what undoes it."""

    plan: BatchPlan
    selection: Selection
    deltas: Deltas
    plan_ns: int


@dataclass(slots=True)
class Caps:
    """What adapters may take, changed at run time: pages of the pool, and entries of the slot directory."""

    adapter_pages: int
    resident_adapters: int


@dataclass(slots=True)
class Speculation:
    """How prefetches fared (0x09K): loads published, those used before they were evicted, whole pages and
    bytes wasted; loads given up before their copies began.
    """

    published: int = 0
    used: int = 0
    wasted_pages: int = 0
    wasted_bytes: int = 0
    withdrawn: int = 0


@dataclass(slots=True)
class Traffic:
    """Whole pages and bytes that loads moved, for load amplification; failures of loads and fetches."""

    copied_pages: int = 0
    copied_bytes: int = 0
    loads: int = 0
    failures: int = 0
    restorations: int = 0
    by_purpose: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Reuse:
    """What cached prefixes saved: positions looked up and not computed again, at first admissions; blocks by
    their fate.
    """

    queried: int = 0
    reused: int = 0
    published: int = 0
    given_up: dict[str, int] = field(default_factory=dict)


class EngineState:
    """Pool, adapters, requests, queue, flights, outgoing messages and events.

    adapters: registered ones by key. rank_sums: of the adapter that was last published in each adapter slot.
    departing: removed ones that are still in use, with the call that hears of their end. occupied: adapter
    slots that are taken, with or without a published adapter; occupied_pages: pages that adapters have for
    themselves. sharers: adapters that have not left, by the kernel digest of their image. pinned: those with
    a pin. prefix: cached blocks; computing: keys of blocks that a running request is about to compute, with
    its id. service: tenants' accounts. rank_buckets: as rank_sums, indices into
    `schedule.tenant_service.BUCKETS`. starvation: clocks of those who wait. full_since_ns: since when no
    place is free, 0 where one is. estimates: how long prefills and loads take. offers: steps in which a place
    was free; passed_at: the last of them in which the queue was looked at; fruitless: what was to be seen
    then, where nobody was let in. early_abort: requests without a first token, None where no limit is set.
    """

    def __init__(self, limits: EngineLimits, clock: Clock, grammars: Grammars, loader: Loader) -> None:
        self.limits = limits
        self.clock = clock
        self.grammars = grammars
        self.loader = loader
        self.host = HostTier(limits.host_bytes if limits.host_bytes is not None else NO_BOUND)
        self.pool = PagePool(limits.num_pages, limits.kv.page_bytes)
        self.prefix = PrefixIndex(limits.kv.page_tokens)
        self.computing: dict[bytes, str] = {}
        self.reuse = Reuse()
        self.directory = SlotDirectory(limits.max_adapter_slots)
        self.table = RunningTable(limits.max_requests, limits.max_pages_per_request, limits.max_model_len)
        self.service = TenantService()
        self.starvation = StarvationWatch(limits.service_starved_ns, limits.load_starved_ns)
        self.full_since_ns = 0
        self.queue = WaitingQueue(self._rank)
        self.deadlines = Deadlines()
        self.estimates = Estimates()
        self.records: dict[str, RequestRecord] = {}
        self.by_slot: dict[int, RequestRecord] = {}
        usable = self.pool.usable
        self.caps = Caps(
            min(limits.adapter_pages, usable) if limits.adapter_pages is not None else usable,
            limits.max_adapter_slots - 1,
        )
        self.adapters: dict[str, AdapterEntry] = {}
        self.sharers: dict[str, list[AdapterEntry]] = {}
        self.occupied: dict[int, AdapterEntry] = {}
        self.occupied_pages = 0
        self.pinned: dict[str, AdapterEntry] = {}
        self.wants: list[Want] = []
        self.speculation = Speculation()
        self.early_abort: Offers | None = None
        if limits.early_abort_ns:
            self.early_abort = Offers(limits.early_abort_ns, clock.now_ns())
        self.traffic = Traffic()
        self.departing: list[tuple[AdapterEntry, int]] = []
        self.entry_of_slot: dict[int, AdapterEntry] = {}
        self.rank_sums = np.zeros(limits.max_adapter_slots, dtype=np.int64)
        self.rank_buckets = np.zeros(limits.max_adapter_slots, dtype=np.int32)
        self.loads: dict[tuple[int, int], LoadJob] = {}
        self.flights: deque[Flight] = deque()
        self.deltas = PendingDeltas()
        self.outbox: list[FromEngine] = []
        self.events: list[Event] = []
        self.newest_launch = 0
        self.committed_launch = 0
        self.arrivals = 0
        self.registrations = 0
        self.room_epoch = self.room_launch = 0
        self.reclaimable: tuple[int, int, int] = (-1, -1, 0)
        self.offers = self.passed_at = 0
        self.fruitless: tuple[int, int, int] | None = None
        self.transactions = 0
        self.preemptions = 0

    def next_transaction(self) -> int:
        """A fresh transaction number."""
        self.transactions += 1
        return self.transactions

    def _rank(self, tenant: str) -> int | None:
        """A tenant's place among those that wait: its completed service in quanta; None while no more of it
        may run.
        """
        if not self.service.may_run(tenant):
            return None
        return self.limits.policy.service_class(self.service.virtual_service(tenant))

    @property
    def adapter_pages(self) -> int:
        """Pages that adapters hold or have reserved: their own, and slab pages."""
        return self.occupied_pages + self.pool.slabs.pages

    @property
    def available_pages(self) -> int:
        """Pages that may be asked for without taking an adapter or a request off the device.

        Every question whether there is room comes here; `pool.free` is the ledger's figure alone.
        """
        return self.available_beside(0)

    def available_beside(self, unread: int) -> int:
        """`available_pages` once `unread` of the unreferenced cached blocks are referenced."""
        return self.pool.free + self._spare_blocks(self.prefix.unreferenced - unread)

    @property
    def spare_blocks(self) -> int:
        """Cached blocks that may be given up: unreferenced ones beyond the floor."""
        return self._spare_blocks(self.prefix.unreferenced)

    def _spare_blocks(self, unreferenced: int) -> int:
        """The floor yields to the last request that runs: it is no reason to wait for ever."""
        floor = self.limits.prefix_floor if len(self.by_slot) > 1 else 0
        return max(min(unreferenced, len(self.prefix) - floor), 0)

    def missing_pages(self, count: int) -> int:
        """Pages that somebody must give up before `count` are free."""
        return max(count - self.pool.free, 0)

    def image_bytes(self, entry: AdapterEntry) -> int:
        """Bytes of an adapter's image, on the host and on the device."""
        return entry.image_bytes(self.pool.page_bytes)

    @property
    def newest_in_flight(self) -> int:
        """Generation of the newest launched plan that is not committed, 0 when there is none."""
        return self.flights[-1].plan.generation if self.flights else 0

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do without a new message."""
        return bool(
            self.records
            or self.flights
            or self.deltas
            or self.loads
            or self.departing
            or any(not wanted.stalled(self.committed_launch) for wanted in self.wants)
            or self.host.fetching
        )

    @property
    def copying(self) -> bool:
        """Whether a backend has copies under way."""
        return any(job.started for job in self.loads.values())

    @property
    def only_fetching(self) -> bool:
        """Whether nothing can move before a fetch ends."""
        return bool(self.host.fetching) and not (self.by_slot or self.flights or self.deltas or self.loads)

    @property
    def only_pausing(self) -> bool:
        """Whether something is open and none of it is in anybody's hands: a step without effect would come to
        nothing again.
        """
        return self.busy and not (self.host.fetching or self.flights or self.deltas or self.loads)

    def emit(self, event: Event) -> None:
        """Append to the event spine; published at the end of the step."""
        self.events.append(event)

    def room_changed(self) -> None:
        """There may be room now for what found none: pages, slots, images or references were given up.

        What a launch still names counts from its commit on, so that is the last moment at which there may be
        more.
        """
        self.room_epoch += 1
        self.room_launch = self.newest_launch

    @property
    def room(self) -> tuple[int, int]:
        """What a request that found no room needs to see changed before it finds any."""
        return self.room_epoch, max(self.room_launch - self.committed_launch, 0)

    def free_pages(self, pages: I32, kind: PageState, owner: int, generation: int) -> None:
        """Give an object's pages back to the pool, scrubbed first where tests ask for it."""
        self.room_changed()
        self.pool.release(pages, kind, owner, generation, self.fence)
        if self.limits.scrub:
            self.deltas.scrub(pages)

    @property
    def fence(self) -> int:
        """Newest launch that may touch a page given up now; the next one where it will be scrubbed."""
        return self.newest_launch + 1 if self.limits.scrub else self.newest_launch
