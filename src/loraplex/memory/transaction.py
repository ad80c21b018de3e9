"""Joint reservation of adapter pages and KV pages: all of them or none, committed or rolled back once.

Owns the admission inequality and the bookkeeping of one transaction; never copies bytes and never ranks
requests. Victims are chosen by the three separate steps of `eviction` and retired by the caller first; their
pages go from the victim to the transaction without ever being free, so that nobody else can take them and a
rollback can give each victim its own pages back.

A small adapter takes a block of a slab page; only where none is free does it take a page, and cuts it. Blocks
and slab pages that victims gave up stay with the transaction to its end, so that each victim finds a place
again after a rollback, though not the same one: a block is as good as another, and its neighbours are
nobody's business.

Rollback is compensating work (0x05F): a victim whose pages were overwritten comes back from its host image,
under a fresh generation. Where free pages allow it the copy goes into them, and no victim is overwritten.

Specification: 0x04E, 0x05B, 0x05C, 0x05D, 0x05F, 0x09J.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32, empty
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.slabs import Block


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that one admission needs (0x05C). adapter: 0 when the exact generation is resident.

    size_class: above 0 for an adapter that takes a block; adapter is 1 where a page must be cut for it, 0
    where a free block, or a victim's, will do.
    """

    adapter: int
    kv_initial: int
    kv_growth: int
    guard: int
    size_class: int = 0

    @property
    def owned(self) -> int:
        """Pages that the transaction takes; the guard is only required to remain."""
        return self.adapter + self.kv_initial + self.kv_growth

    @property
    def required(self) -> int:
        """Pages that must be free or reclaimable."""
        return self.owned + self.guard


def admissible(demand: Demand, free: int, reclaimable: int) -> bool:
    """The joint admission inequality of 0x05C: necessary, not sufficient."""
    return free + reclaimable >= demand.required


def block_pages(pool: PagePool, size_class: int) -> int:
    """Pages that a block costs now: none where a slab has a free one."""
    return 0 if pool.slabs.has_free(size_class) else 1


def dissolving(pool: PagePool, victims: Sequence[AdapterEntry], donor: Block | None = None) -> list[int]:
    """Slab pages that are nobody's once these victims are gone, in their order. donor: a block that stays in
    use.
    """
    used = Counter(victim.block.page for victim in victims if victim.block is not None)
    kept = donor.page if donor is not None else 0
    return [page for page, blocks in used.items() if page != kept and pool.slabs.dissolvable(page, blocks)]


def prefetch_safe(pages: int, free: int, committed_growth: int, safety: int) -> bool:
    """0x09J: a speculative load takes only free pages that no admitted request's growth will want."""
    return pages <= free - committed_growth - safety


class TransactionState(StrEnum):
    """Life of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, eq=False)
class Restoration:
    """A victim that a rollback owes its place: its pages, still reserved by the transaction that took them.

    pages: none for a victim that had a block: a block or page for it is free after the rollback.
    """

    entry: AdapterEntry
    pages: I32


@dataclass(slots=True)
class Transaction:
    """Reserved pages of one admission. Adapter and KV parts commit together or separately, each once.

    victims: adapters whose pages it took, with those pages. spare: pages of victims that neither part needs
    now. block: what a small adapter is copied into. spare_blocks: blocks of victims with neighbours that
    stay. owed_slabs: pages that victims' blocks made up.
    """

    txn: int
    pool: PagePool
    adapter_pages: I32 = field(default_factory=empty)
    kv_pages: I32 = field(default_factory=empty)
    spare: I32 = field(default_factory=empty)
    victims: list[Restoration] = field(default_factory=list)
    block: Block | None = None
    spare_blocks: list[Block] = field(default_factory=list)
    owed_slabs: I32 = field(default_factory=empty)
    state: TransactionState = TransactionState.OPEN

    @staticmethod
    def reserve(
        txn: int,
        pool: PagePool,
        demand: Demand,
        *,
        victims: Sequence[AdapterEntry] = (),
        last_launch: int = 0,
        overwrite: bool = False,
    ) -> Transaction | None:
        """Reserve all pages of `demand`, or None with nothing changed when free and victims' pages do not
        cover it.

        victims: adapters that are retiring. last_launch: newest launch that may name their pages. overwrite:
        put the copy into victims' pages even where free ones would do.
        """
        for victim in victims:
            if victim.state is not AdapterState.RETIRING or victim.evicting:
                raise InternalFault(
                    ErrorCode.EVICTION_INELIGIBLE,
                    f"adapter {victim.key[:12]} is {victim.state}; only a retiring one gives its pages up",
                )
        shared = demand.size_class > 0 and demand.adapter == 0
        block, donor = None, None
        if shared and pool.slabs.has_free(demand.size_class):
            block = pool.slabs.reserve(demand.size_class, txn)
        elif shared:
            donor = next(
                (v.block for v in victims if v.block and v.block.size_class == demand.size_class), None
            )
            if donor is None:
                return None
        whole = dissolving(pool, victims, donor)
        reclaimed = sum(int(victim.pages.size) for victim in victims) + len(whole)
        if not admissible(demand, pool.free, reclaimed):
            if block is not None:
                pool.slabs.cancel(block, txn, 0)
            return None
        owed, blocks = [], []
        for victim in victims:
            if victim.block is not None:
                pool.slabs.take_over(victim.block, victim.slot, victim.generation, txn, last_launch)
                blocks.append(victim.block)
            pool.take_over(victim.pages, PageState.ADAPTER, victim.slot, victim.generation, txn, last_launch)
            victim.evicting = txn
            owed.append(Restoration(victim, victim.pages))
            victim.pages, victim.block = empty(), None
        slabs = np.concatenate([empty(), *(pool.slabs.dissolve(page, txn) for page in whole)])
        taken = reclaimable = np.concatenate([*(r.pages for r in owed), slabs])
        if overwrite:
            adapter, taken = taken[: demand.adapter], taken[demand.adapter :]
            adapter = np.concatenate([adapter, pool.reserve_for_copy(demand.adapter - adapter.size, txn)])
        else:
            adapter = pool.reserve_for_copy(min(demand.adapter, pool.free), txn)
            missing = demand.adapter - int(adapter.size)
            adapter, taken = np.concatenate([adapter, taken[:missing]]), taken[missing:]
        kv_count = demand.kv_initial + demand.kv_growth
        free_kv = min(kv_count, pool.free)
        kv = np.concatenate([pool.reserve(free_kv, txn), taken[: kv_count - free_kv]])
        if demand.size_class and demand.adapter:
            held_back = bool(np.isin(adapter, reclaimable).any())
            block = pool.slabs.open(adapter, txn, demand.size_class, held_back=held_back)
            adapter = empty()
        spare_blocks = [b for b in blocks if b != donor and b.page not in whole]
        return Transaction(
            txn, pool, adapter, kv, taken[kv_count - free_kv :], owed, block or donor, spare_blocks, slabs
        )

    @staticmethod
    def restoring(txn: int, source: Transaction, owed: Restoration) -> Transaction:
        """A new transaction over the pages that a rolled back one owes a victim."""
        if source.state is not TransactionState.ROLLED_BACK or owed not in source.victims:
            raise InternalFault(
                ErrorCode.TRANSACTION_STATE,
                f"transaction {source.txn} is {source.state} and owes no such pages",
            )
        source.victims.remove(owed)
        source.pool.hand_over(owed.pages, source.txn, txn)
        owed.entry.evicting = 0
        if owed.entry.size_class:
            pages = block_pages(source.pool, owed.entry.size_class)
            again = Transaction.reserve(txn, source.pool, Demand(pages, 0, 0, 0, owed.entry.size_class))
            if again is None:
                raise InternalFault(
                    ErrorCode.TRANSACTION_STATE,
                    f"there is no block for {owed.entry.key[:12]}, which transaction {source.txn} took one "
                    "from",
                )
            return again
        return Transaction(txn, source.pool, adapter_pages=owed.pages)

    @property
    def adapter_fence(self) -> int:
        """Newest launch that may still name a byte that the copy will write; 0 when there is none."""
        if self.block is not None:
            return self.pool.slabs.fence_of(self.block)
        return self.pool.fence_of(self.adapter_pages)

    def require_fence(self, committed_launch: int) -> None:
        """Raise `page_fence` unless every launch that may name the adapter part has completed."""
        if self.block is not None:
            self.pool.slabs.require_fence(self.block, committed_launch)
        self.pool.require_fence(self.adapter_pages, committed_launch)

    def commit_block(self, slot: int, generation: int) -> Block:
        """Hand a small adapter's block to its published slot; from here on others may have blocks
        beside it.
        """
        self._expect_open()
        block, self.block = self.block, None
        if block is None:
            raise InternalFault(ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} has no block")
        self.pool.slabs.own(block, self.txn, slot, generation)
        self.pool.slabs.share(block)
        return block

    def commit_adapter(self, slot: int, generation: int) -> I32:
        """Hand the adapter part to its published slot."""
        self._expect_open()
        pages, self.adapter_pages = self.adapter_pages, empty()
        self.pool.own(pages, self.txn, PageState.ADAPTER, slot, generation)
        return pages

    def commit_kv(self, request_slot: int, incarnation: int) -> I32:
        """Hand the KV part to a request."""
        self._expect_open()
        pages, self.kv_pages = self.kv_pages, empty()
        self.pool.own(pages, self.txn, PageState.KV, request_slot, incarnation)
        return pages

    def finalize(self, last_launch: int) -> list[AdapterEntry]:
        """The copy is published: victims will not come back. Spare pages are freed; returns the victims."""
        self._expect_open()
        pages, self.spare, self.owed_slabs = self.spare, empty(), empty()
        self.pool.cancel(pages, self.txn, last_launch)
        self._give_blocks_back(last_launch)
        gone = [owed.entry for owed in self.victims]
        for entry in gone:
            entry.evicting = 0
        self.victims = []
        return gone

    def close(self) -> None:
        """End a transaction whose parts are all handed over."""
        self._expect_open()
        pages = self.adapter_pages.size + self.kv_pages.size + self.spare.size
        if pages or self.victims or self.block is not None or self.spare_blocks:
            raise InternalFault(ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} still holds pages")
        self.state = TransactionState.COMMITTED

    def release_kv(self, last_launch: int) -> None:
        """Give the KV part back and go on with the adapter part (its request went away).

        Pages of victims stay reserved: a rollback would need them.
        """
        self._expect_open()
        pages, self.kv_pages = self.kv_pages, empty()
        owed = np.isin(pages, self._owed_pages())
        self.spare = np.concatenate([self.spare, pages[owed]])
        self.pool.cancel(pages[~owed], self.txn, last_launch)

    def rollback(self, last_launch: int) -> list[Restoration]:
        """Give back every page that was no victim's. last_launch: newest launch that may have named them.

        Returns the victims with their own pages, still reserved: each is restored, or its pages are given up.
        """
        self._expect_open()
        held = [self.adapter_pages, self.kv_pages, self.spare]
        if self.block is not None and self.pool.slabs.held_back(self.block):
            held.append(self.pool.slabs.dissolve(self.block.page, self.txn))
        elif self.block is not None:
            self.pool.slabs.cancel(self.block, self.txn, last_launch)
        pages, self.block, self.owed_slabs = np.concatenate(held), None, empty()
        self.pool.cancel(pages[~np.isin(pages, self._owed_pages())], self.txn, last_launch)
        self._give_blocks_back(last_launch)
        self.adapter_pages, self.kv_pages, self.spare = empty(), empty(), empty()
        self.state = TransactionState.ROLLED_BACK
        return list(self.victims)

    def give_up(self, owed: Restoration, last_launch: int) -> None:
        """After a rollback: free a victim's pages, because it will not be restored."""
        if self.state is not TransactionState.ROLLED_BACK or owed not in self.victims:
            raise InternalFault(
                ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} is {self.state} and owes no such pages"
            )
        self.victims.remove(owed)
        owed.entry.evicting = 0
        self.pool.cancel(owed.pages, self.txn, last_launch)

    def _owed_pages(self) -> I32:
        return np.concatenate([*(owed.pages for owed in self.victims), self.owed_slabs])

    def _give_blocks_back(self, last_launch: int) -> None:
        for block in self.spare_blocks:
            self.pool.slabs.cancel(block, self.txn, last_launch)
        self.spare_blocks = []

    def _expect_open(self) -> None:
        if self.state is not TransactionState.OPEN:
            raise InternalFault(
                ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} is {self.state}, not open"
            )
