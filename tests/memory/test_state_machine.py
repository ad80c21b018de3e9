"""Pages, slots, leases and transactions against a model that knows nothing but a list of owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.errors import LoraplexError
from loraplex.memory import eviction
from loraplex.memory.eviction import Candidate, PageClass
from loraplex.memory.leases import RevisionLease, SlotLease
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.residency import AdapterEntry, AdapterState, SlotDirectory
from loraplex.memory.transaction import Demand, Restoration, Transaction, admissible

PAGES, SLOTS = 12, 5
NAMES = ("a", "b", "c", "d", "e", "f")


@dataclass
class Model:
    """Who has how many pages. That is all."""

    free: int = PAGES
    adapters: dict[str, int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return (
            self.free
            + sum(self.adapters.values())
            + sum(self.requests.values())
            + sum(self.reserved.values())
        )


@dataclass
class Load:
    """A load under way. taken: pages of the model's victims that it holds, by name."""

    entry: AdapterEntry
    transaction: Transaction
    kv: int
    taken: dict[str, int]


class Memory(RuleBasedStateMachine):
    """Loads with victims, commits, rollbacks, restorations, requests and leases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.directory = PagePool(PAGES + 1, 64), SlotDirectory(SLOTS + 1)
        self.model = Model()
        self.entries = {
            name: AdapterEntry(name, name * 64, 1 + i % 4, 8, ((4, 2),), (0,), 64, host_source_verified=True)
            for i, name in enumerate(NAMES)
        }
        for entry in self.entries.values():
            entry.move(AdapterState.HOST_READY)
        self.loads: list[Load] = []
        self.owed: list[tuple[Transaction, Restoration]] = []
        self.leases: list[tuple[RevisionLease, SlotLease, int, int]] = []
        self.kv: dict[int, tuple[np.ndarray, int]] = {}
        self.txn = self.launch = self.request = 0

    def cold(self) -> list[AdapterEntry]:
        return [e for e in self.entries.values() if e.state is AdapterState.HOST_READY]

    def resident(self) -> list[AdapterEntry]:
        return [e for e in self.entries.values() if e.resident]

    # ------------------------------------------------------------ loads

    @precondition(lambda self: self.cold() and self.directory.free)
    @rule(pick=st.integers(0, 5), kv=st.integers(0, 3), guard=st.integers(0, 2), overwrite=st.booleans())
    def begin_load(self, pick: int, kv: int, guard: int, overwrite: bool) -> None:
        cold = self.cold()
        entry = cold[pick % len(cold)]
        demand = Demand(entry.page_count, kv, 0, guard)
        offered = [
            Candidate(PageClass.ADAPTER, e.key, e.page_count, 1, e.last_touch)
            for e in self.entries.values()
            if e is not entry and eviction.eligible(e, self.launch)
        ]
        reclaimable = sum(candidate.pages for candidate in offered)
        chosen = eviction.choose(
            offered, max(demand.required - self.pool.free, 0), now=self.launch, ranking=eviction.rank_lru,
            held={PageClass.ADAPTER: sum(self.model.adapters.values())}, floors={},
        )  # fmt: skip
        assert (chosen is not None) == admissible(demand, self.model.free, reclaimable)
        if chosen is None:
            assert Transaction.reserve(999, self.pool, demand) is None
            return
        victims = [self.entries[candidate.key] for candidate in chosen]
        for victim in victims:
            assert not victim.refcount
            assert not victim.pin_count
            if victim.state is not AdapterState.RETIRING:
                victim.move(AdapterState.RETIRING)
        self.txn += 1
        transaction = Transaction.reserve(
            self.txn, self.pool, demand, victims=victims, last_launch=self.launch, overwrite=overwrite
        )
        assert transaction is not None
        for victim in victims:
            self.directory.give_back(victim.slot, victim.generation)
        entry.slot, entry.generation = self.directory.take()
        entry.move(AdapterState.RESERVED)
        entry.move(AdapterState.LOADING)
        taken = {victim.key: self.model.adapters.pop(victim.key) for victim in victims}
        # The copy takes free pages first, or the victims' where it is told to overwrite; KV takes free ones first.
        reclaimed = sum(taken.values())
        copied = max(demand.adapter - reclaimed, 0) if overwrite else min(demand.adapter, self.model.free)
        drawn = copied + min(kv, self.model.free - copied)
        self.model.reserved[self.txn] = reclaimed + drawn
        self.model.free -= drawn
        self.loads.append(Load(entry, transaction, kv, taken))

    @precondition(lambda self: self.loads)
    @rule(pick=st.integers(0, 9))
    def publish(self, pick: int) -> None:
        load = self.loads.pop(pick % len(self.loads))
        entry, transaction = load.entry, load.transaction
        entry.move(AdapterState.VALIDATED)
        entry.pages = transaction.commit_adapter(entry.slot, entry.generation)
        entry.move(AdapterState.PUBLISHED)
        self.request += 1
        held = self.model.reserved.pop(transaction.txn)
        if load.kv:
            self.kv[self.request] = (transaction.commit_kv(self.request, 1), load.kv)
            self.model.requests[self.request] = load.kv
        for victim in transaction.finalize(self.launch):
            victim.move(AdapterState.HOST_READY)
            victim.slot = victim.generation = 0
        transaction.close()
        self.model.adapters[entry.key] = entry.page_count
        self.model.free += held - entry.page_count - load.kv

    @precondition(lambda self: self.loads)
    @rule(pick=st.integers(0, 9))
    def fail(self, pick: int) -> None:
        load = self.loads.pop(pick % len(self.loads))
        entry, transaction = load.entry, load.transaction
        owed = transaction.rollback(self.launch)
        self.directory.give_back(entry.slot, entry.generation)
        entry.slot = entry.generation = 0
        entry.move(AdapterState.HOST_READY)
        assert {place.entry.key: place.pages.size for place in owed} == load.taken
        held = self.model.reserved.pop(transaction.txn)
        kept = sum(load.taken.values())
        self.model.free += held - kept
        if kept:
            self.model.reserved[transaction.txn] = kept
        self.owed += [(transaction, place) for place in owed]

    @precondition(lambda self: self.owed)
    @rule(pick=st.integers(0, 9), restore=st.booleans())
    def settle_a_victim(self, pick: int, restore: bool) -> None:
        transaction, place = self.owed.pop(pick % len(self.owed))
        size = int(place.pages.size)
        self.model.reserved[transaction.txn] -= size
        if not self.model.reserved[transaction.txn]:
            del self.model.reserved[transaction.txn]
        victim = place.entry
        if not restore or not self.directory.free:
            transaction.give_up(place, self.launch)
            self.model.free += size
            victim.move(AdapterState.HOST_READY)
            victim.slot = victim.generation = 0
            return
        self.txn += 1
        again = Transaction.restoring(self.txn, transaction, place)
        victim.move(AdapterState.HOST_READY)
        before = (victim.slot, victim.generation)
        victim.slot, victim.generation = self.directory.take()
        assert (victim.slot, victim.generation) != before
        victim.move(AdapterState.RESERVED)
        victim.move(AdapterState.LOADING)
        self.model.reserved[self.txn] = size
        self.loads.append(Load(victim, again, 0, {}))

    # ------------------------------------------------------------ requests

    @precondition(lambda self: self.resident() and len(self.leases) < 6)
    @rule(pick=st.integers(0, 9))
    def lease(self, pick: int) -> None:
        entries = [e for e in self.resident() if not e.removing]
        if not entries:
            return
        entry = entries[pick % len(entries)]
        revision = RevisionLease.take(entry)
        slot = SlotLease.take(revision, self.launch)
        self.leases.append((revision, slot, entry.slot, entry.generation))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 9))
    def end_lease(self, pick: int) -> None:
        revision, slot, *_ = self.leases.pop(pick % len(self.leases))
        slot.release(self.launch)
        revision.release()
        for again in (lambda: slot.release(self.launch), revision.release):
            with pytest.raises(LoraplexError):
                again()

    @rule(count=st.integers(1, 4))
    def grow(self, count: int) -> None:
        if count > self.model.free:
            with pytest.raises(LoraplexError):
                self.pool.reserve(count, 998)
            return
        self.request += 1
        self.txn += 1
        pages = self.pool.reserve(count, self.txn)
        self.pool.own(pages, self.txn, PageState.KV, self.request, 1)
        self.kv[self.request] = (pages, count)
        self.model.requests[self.request] = count
        self.model.free -= count

    @precondition(lambda self: self.kv)
    @rule(pick=st.integers(0, 9))
    def end_request(self, pick: int) -> None:
        request = list(self.kv)[pick % len(self.kv)]
        pages, count = self.kv.pop(request)
        with pytest.raises(LoraplexError):
            self.pool.release(pages, PageState.KV, request + 1, 1, self.launch)
        self.pool.release(pages, PageState.KV, request, 1, self.launch)
        self.model.free += self.model.requests.pop(request)
        assert count

    @rule(pick=st.integers(0, 5), pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        self.entries[NAMES[pick]].pin_count = int(pinned)

    @rule()
    def next_launch(self) -> None:
        self.launch += 1

    # ------------------------------------------------------------ what always holds

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert self.model.total == counts.total == PAGES
        assert counts.free == self.pool.free == self.model.free
        assert counts.reserved == sum(self.model.reserved.values())
        assert counts.adapter == sum(self.model.adapters.values())
        assert counts.kv == sum(self.model.requests.values())

    @invariant()
    def every_page_has_one_owner(self) -> None:
        parts = [e.pages for e in self.entries.values()] + [pages for pages, _ in self.kv.values()]
        pages = np.concatenate([*parts, np.fromiter(self.pool.free_pages(), dtype=np.int32)])
        assert np.unique(pages).size == pages.size

    @invariant()
    def leases_stay_valid(self) -> None:
        for _, lease, slot, generation in self.leases:
            assert lease.valid
            assert (lease.slot, lease.generation) == (slot, generation)
            assert lease.entry.state in (AdapterState.ACTIVE, AdapterState.RETIRING)
            assert not lease.entry.evicting


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.long
class TestMemoryLong(Memory.TestCase):
    """The same, for longer."""

    settings = settings(max_examples=400, stateful_step_count=60, deadline=None, derandomize=True)
