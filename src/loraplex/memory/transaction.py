"""Joint reservation of adapter pages and KV pages: all of them or none, committed or rolled back once.

Owns the admission inequality and the bookkeeping of one transaction; never copies bytes and never ranks requests.
Victims are chosen by the three separate steps of `eviction` and retired by the caller first; their pages go from the
victim to the transaction without ever being free, so that nobody else can take them and a rollback can give each
victim its own pages back.

Rollback is compensating work (0x05F): a victim whose pages were overwritten comes back from its host image, under a
fresh generation. Where free pages allow it the copy goes into them, and no victim is overwritten.

Specification: 0x04E, 0x05B, 0x05C, 0x05D, 0x05F, 0x09J.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32, empty
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.residency import AdapterEntry, AdapterState


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that one admission needs (0x05C). adapter: 0 when the exact generation is resident."""

    adapter: int
    kv_initial: int
    kv_growth: int
    guard: int

    @property
    def owned(self) -> int:
        """Pages that the transaction takes; the guard is only required to remain."""
        return self.adapter + self.kv_initial + self.kv_growth

    @property
    def required(self) -> int:
        """Pages that must be free or reclaimable."""
        return self.owned + self.guard

    def required_bytes(self, page_bytes: int) -> int:
        """The same in bytes."""
        return self.required * page_bytes


def admissible(demand: Demand, free: int, reclaimable: int) -> bool:
    """The joint admission inequality of 0x05C: necessary, not sufficient."""
    return free + reclaimable >= demand.required


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
    """A victim that a rollback owes its place: its pages, still reserved by the transaction that took them."""

    entry: AdapterEntry
    pages: I32


@dataclass(slots=True)
class Transaction:
    """Reserved pages of one admission. Adapter and KV parts commit together or separately, each once.

    victims: adapters whose pages it took, with those pages. spare: pages of victims that neither part needs now.
    """

    txn: int
    pool: PagePool
    adapter_pages: I32 = field(default_factory=empty)
    kv_pages: I32 = field(default_factory=empty)
    spare: I32 = field(default_factory=empty)
    victims: list[Restoration] = field(default_factory=list)
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
        """Reserve all pages of `demand`, or None with nothing changed when free and victims' pages do not cover it.

        victims: adapters that are retiring. last_launch: newest launch that may name their pages. overwrite: put the
        copy into victims' pages even where free ones would do.
        """
        for victim in victims:
            if victim.state is not AdapterState.RETIRING or victim.evicting:
                raise InternalFault(
                    ErrorCode.EVICTION_INELIGIBLE,
                    f"adapter {victim.key[:12]} is {victim.state}; only a retiring one gives its pages up",
                )
        reclaimed = sum(int(victim.pages.size) for victim in victims)
        if not admissible(demand, pool.free, reclaimed):
            return None
        owed = []
        for victim in victims:
            pool.take_over(victim.pages, PageState.ADAPTER, victim.slot, victim.generation, txn, last_launch)
            victim.evicting = txn
            owed.append(Restoration(victim, victim.pages))
            victim.pages = empty()
        taken = np.concatenate([r.pages for r in owed]) if owed else empty()
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
        return Transaction(txn, pool, adapter, kv, taken[kv_count - free_kv :], owed)

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
        return Transaction(txn, source.pool, adapter_pages=owed.pages)

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
        pages, self.spare = self.spare, empty()
        self.pool.cancel(pages, self.txn, last_launch)
        gone = [owed.entry for owed in self.victims]
        for entry in gone:
            entry.evicting = 0
        self.victims = []
        return gone

    def close(self) -> None:
        """End a transaction whose parts are all handed over."""
        self._expect_open()
        if self.adapter_pages.size or self.kv_pages.size or self.spare.size or self.victims:
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
        held = np.concatenate([self.adapter_pages, self.kv_pages, self.spare])
        self.pool.cancel(held[~np.isin(held, self._owed_pages())], self.txn, last_launch)
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
        return np.concatenate([owed.pages for owed in self.victims]) if self.victims else empty()

    def _expect_open(self) -> None:
        if self.state is not TransactionState.OPEN:
            raise InternalFault(
                ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} is {self.state}, not open"
            )
