"""Pages, blocks, slots, leases and transactions against a model that knows nothing but a list of owners."""

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
from loraplex.memory.slabs import Block
from loraplex.memory.transaction import Demand, Restoration, Transaction, admissible, block_pages

PAGES, SLOTS = 12, 9
NAMES = ("a", "b", "c", "d", "e", "f")
SMALL = {"p": 1, "q": 1, "r": 1, "s": 2, "t": 2, "u": 2, "v": 2, "w": 2}
"""Adapters that take a block, with its size class."""


@dataclass
class Model:
    """Who has how many pages, and who has which block. That is all."""

    adapters: dict[str, int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)

    blocks: dict[Block, str] = field(default_factory=dict)

    @property
    def slabs(self) -> set[int]:
        return {block.page for block in self.blocks}

    @property
    def free(self) -> int:
        owned = (self.adapters, self.requests, self.reserved)
        return PAGES - sum(sum(pages.values()) for pages in owned) - len(self.slabs)


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
        for name, size_class in SMALL.items():
            self.entries[name] = AdapterEntry(
                name, name * 64, 1, 8, ((4, 2),), (0,), 64, host_source_verified=True, size_class=size_class
            )
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

    def offers(self, entry: AdapterEntry, spared: int = 0) -> dict[str, list[AdapterEntry]]:
        """What could give pages, by name: adapters with pages, and slabs whose every adapter may go."""

        def may_go(one: AdapterEntry) -> bool:
            return one is not entry and eviction.evictable(one, self.launch)

        out = {e.key: [e] for e in self.entries.values() if not e.size_class and may_go(e)}
        for page in sorted(self.model.slabs - {spared}):
            inside = [owner for block, owner in self.model.blocks.items() if block.page == page]
            entries = [self.entries[owner] for owner in inside if owner in self.entries]
            if len(entries) == len(inside) and all(may_go(e) for e in entries):
                out[f"slab {page}"] = entries
        return out

    @precondition(lambda self: self.cold() and self.directory.free)
    @rule(pick=st.integers(0, 13), kv=st.integers(0, 3), guard=st.integers(0, 2), overwrite=st.booleans())
    def begin_load(self, pick: int, kv: int, guard: int, overwrite: bool) -> None:
        cold = self.cold()
        entry = cold[pick % len(cold)]
        size_class = entry.size_class
        pages = block_pages(self.pool, size_class) if size_class else entry.page_count
        demand = Demand(pages, kv, 0, guard, size_class)
        spared = self.pool.slabs.next_page(size_class) if size_class else 0
        donors = [
            e
            for e in self.entries.values()
            if size_class and not spared and e.size_class == size_class and eviction.evictable(e, self.launch)
        ]
        first: list[AdapterEntry] = []
        if overwrite and donors:
            assert donors[0].block is not None
            demand, spared, first = Demand(0, kv, 0, guard, size_class), donors[0].block.page, donors[:1]
        sources = self.offers(entry, spared)
        offered = [
            Candidate(
                PageClass.ADAPTER,
                name,
                sum(e.page_count for e in es if not e.size_class) or 1,
                1,
                es[0].last_use,
            )
            for name, es in sources.items()
        ]
        reclaimable = sum(candidate.pages for candidate in offered)
        chosen = eviction.cover(
            eviction.ranked(offered, eviction.by_last_use, self.launch),
            max(demand.required - self.pool.free, 0),
            held={PageClass.ADAPTER: sum(self.model.adapters.values()) + len(self.model.slabs)},
            floors={},
        )
        assert chosen.enough == admissible(demand, self.model.free, reclaimable)
        if not chosen.enough:
            assert first or Transaction.reserve(999, self.pool, demand) is None
            return
        victims = first + [e for candidate in chosen.taken for e in sources[candidate.key]]
        gone = {block for block, owner in self.model.blocks.items() if owner in [v.key for v in victims]}
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
        # The copy takes free pages first, or the victims' where it is told to overwrite; KV takes free ones
        # first.
        free = self.model.free
        taken = {victim.key: self.model.adapters.pop(victim.key, 0) for victim in victims}
        reclaimed = sum(candidate.pages for candidate in chosen.taken)
        copied = max(demand.adapter - reclaimed, 0) if overwrite else min(demand.adapter, free)
        drawn = copied + min(kv, free - copied)
        for block in gone:
            del self.model.blocks[block]
        self.claim(transaction)
        self.model.reserved[self.txn] = reclaimed + drawn - (demand.adapter if size_class else 0)
        assert all(block in gone for block in transaction.spare_blocks)
        self.loads.append(Load(entry, transaction, kv, taken))

    def claim(self, transaction: Transaction) -> None:
        """Note a transaction's blocks; each was nobody's."""
        for block in (transaction.block, *transaction.spare_blocks):
            if block is not None:
                assert block not in self.model.blocks
                assert block.size_class == next(
                    (b.size_class for b in self.model.blocks if b.page == block.page), block.size_class
                )
                self.model.blocks[block] = f"txn {transaction.txn}"

    def disclaim(self, transaction: Transaction) -> None:
        """Forget a transaction's blocks."""
        owner = f"txn {transaction.txn}"
        self.model.blocks = {block: who for block, who in self.model.blocks.items() if who != owner}

    @precondition(lambda self: self.loads)
    @rule(pick=st.integers(0, 9))
    def publish(self, pick: int) -> None:
        load = self.loads.pop(pick % len(self.loads))
        entry, transaction = load.entry, load.transaction
        entry.move(AdapterState.VALIDATED)
        self.disclaim(transaction)
        if entry.size_class:
            entry.block = transaction.commit_block(entry.slot, entry.generation)
            self.model.blocks[entry.block] = entry.key
        else:
            entry.pages = transaction.commit_adapter(entry.slot, entry.generation)
            self.model.adapters[entry.key] = entry.page_count
        entry.move(AdapterState.PUBLISHED)
        self.request += 1
        del self.model.reserved[transaction.txn]
        if load.kv:
            self.kv[self.request] = (transaction.commit_kv(self.request, 1), load.kv)
            self.model.requests[self.request] = load.kv
        for victim in transaction.finalize(self.launch):
            victim.move(AdapterState.HOST_READY)
            victim.slot = victim.generation = 0
        transaction.close()

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
        self.disclaim(transaction)
        del self.model.reserved[transaction.txn]
        kept = sum(load.taken.values())
        if kept:
            self.model.reserved[transaction.txn] = kept
        for place in owed:
            if place.entry.size_class:  # at once, as its place is free now
                self.settle(transaction, place, restore=bool(self.directory.free))
            else:
                self.owed.append((transaction, place))

    @precondition(lambda self: self.owed)
    @rule(pick=st.integers(0, 9), restore=st.booleans())
    def settle_a_victim(self, pick: int, restore: bool) -> None:
        transaction, place = self.owed.pop(pick % len(self.owed))
        size = int(place.pages.size)
        self.model.reserved[transaction.txn] -= size
        if not self.model.reserved[transaction.txn]:
            del self.model.reserved[transaction.txn]
        self.settle(transaction, place, restore and bool(self.directory.free))

    def settle(self, transaction: Transaction, place: Restoration, restore: bool) -> None:
        victim = place.entry
        if not restore:
            transaction.give_up(place, self.launch)
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
        self.model.reserved[self.txn] = int(place.pages.size)
        self.claim(again)
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

    @precondition(lambda self: self.kv)
    @rule(pick=st.integers(0, 9))
    def end_request(self, pick: int) -> None:
        request = list(self.kv)[pick % len(self.kv)]
        pages, count = self.kv.pop(request)
        with pytest.raises(LoraplexError):
            self.pool.release(pages, PageState.KV, request + 1, 1, self.launch)
        self.pool.release(pages, PageState.KV, request, 1, self.launch)
        assert self.model.requests.pop(request) == count

    @rule(pick=st.integers(0, 13), pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        list(self.entries.values())[pick].pin_count = int(pinned)

    @precondition(lambda self: any(owner in self.entries for owner in self.model.blocks.values()))
    @rule(pick=st.integers(0, 9))
    def evict_a_small_one(self, pick: int) -> None:
        idle = [
            e for e in self.entries.values() if e.block is not None and eviction.evictable(e, self.launch)
        ]
        if not idle:
            return
        entry = idle[pick % len(idle)]
        assert entry.block is not None
        with pytest.raises(LoraplexError):
            self.pool.slabs.release(entry.block, entry.slot, entry.generation + 1, self.launch)
        emptied = self.pool.slabs.release(entry.block, entry.slot, entry.generation, self.launch)
        del self.model.blocks[entry.block]
        assert emptied == (entry.block.page not in self.model.slabs)
        with pytest.raises(LoraplexError):
            self.pool.slabs.release(entry.block, entry.slot, entry.generation, self.launch)
        self.directory.give_back(entry.slot, entry.generation)
        entry.block, entry.slot, entry.generation = None, 0, 0
        if entry.state is not AdapterState.RETIRING:
            entry.move(AdapterState.RETIRING)
        entry.move(AdapterState.HOST_READY)

    @rule()
    def next_launch(self) -> None:
        self.launch += 1

    # ------------------------------------------------------------ what always holds

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.conserved
        assert counts.total == PAGES
        assert counts.slab == self.pool.slabs.pages == len(self.model.slabs)
        assert set(self.pool.slabs.slab_pages()) == self.model.slabs
        assert counts.free == self.pool.free == self.model.free
        assert counts.reserved == sum(self.model.reserved.values())
        assert counts.adapter == sum(self.model.adapters.values()) + len(self.model.slabs)
        assert counts.kv == sum(self.model.requests.values())

    @invariant()
    def every_page_has_one_owner(self) -> None:
        parts = [e.pages for e in self.entries.values()] + [pages for pages, _ in self.kv.values()]
        pages = np.concatenate([*parts, np.fromiter(self.pool.free_pages(), dtype=np.int32)])
        assert np.unique(pages).size == pages.size
        assert self.model.slabs.isdisjoint(pages.tolist())

    @invariant()
    def every_block_has_one_owner_that_knows_of_it(self) -> None:
        for block, owner in self.model.blocks.items():
            if owner in self.entries:
                entry = self.entries[owner]
                assert entry.block == block
                assert self.pool.slabs.owned_by(block, entry.slot, entry.generation)
        held = [(block.page, block.size_class, block.index) for block in self.model.blocks]
        everywhere = held + self.pool.slabs.free_blocks()
        assert len(set(everywhere)) == len(everywhere)
        assert len(everywhere) == sum(1 << size for _, size in {(page, size) for page, size, _ in held})

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
