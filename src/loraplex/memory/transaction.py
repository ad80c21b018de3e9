"""Joint reservation of adapter pages and KV pages: all of them or none, committed or rolled back once.

Owns the admission inequality and the bookkeeping of one transaction; never copies bytes and never ranks requests.
Victims are chosen by the three separate steps of `residency` (eligibility, ranking, reuse) and retired by the caller
before their pages count as free.

Specification: 0x04E, 0x05C, 0x05D, 0x05F.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32, empty
from loraplex.memory.pages import PagePool, PageState


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


def admissible(demand: Demand, free: int, reclaimable: int) -> bool:
    """The joint admission inequality of 0x05C: necessary, not sufficient."""
    return free + reclaimable >= demand.required


class TransactionState(StrEnum):
    """Life of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


@dataclass(slots=True)
class Transaction:
    """Reserved pages of one admission. Adapter and KV parts commit together or separately, each once."""

    txn: int
    pool: PagePool
    adapter_pages: I32 = field(default_factory=empty)
    kv_pages: I32 = field(default_factory=empty)
    state: TransactionState = TransactionState.OPEN

    @staticmethod
    def reserve(txn: int, pool: PagePool, demand: Demand, completed_launch: int) -> Transaction | None:
        """Reserve all pages of `demand`, or None with nothing changed when they are not free.

        completed_launch: newest launch that has completed; adapter pages are taken only among pages that no later
        launch may name, because a copy may run beside the compute stream.
        """
        if pool.free < demand.required:
            return None
        adapter_pages = empty()
        if demand.adapter:
            taken = pool.reserve_for_copy(demand.adapter, txn, completed_launch)
            if taken is None:
                return None
            adapter_pages = taken
        kv_pages = pool.reserve(demand.kv_initial + demand.kv_growth, txn)
        return Transaction(txn, pool, adapter_pages, kv_pages)

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

    def close(self) -> None:
        """End a transaction whose parts are all handed over."""
        self._expect_open()
        if self.adapter_pages.size or self.kv_pages.size:
            raise InternalFault(ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} still holds pages")
        self.state = TransactionState.COMMITTED

    def release_kv(self, last_launch: int) -> None:
        """Give the KV part back and go on with the adapter part (its request went away)."""
        self._expect_open()
        pages, self.kv_pages = self.kv_pages, empty()
        self.pool.cancel(pages, self.txn, last_launch)

    def rollback(self, last_launch: int) -> None:
        """Give every page back. last_launch: newest launch that may have named them (a failed copy did)."""
        self._expect_open()
        self.pool.cancel(self.adapter_pages, self.txn, last_launch)
        self.pool.cancel(self.kv_pages, self.txn, last_launch)
        self.adapter_pages, self.kv_pages = empty(), empty()
        self.state = TransactionState.ROLLED_BACK

    def _expect_open(self) -> None:
        if self.state is not TransactionState.OPEN:
            raise InternalFault(
                ErrorCode.TRANSACTION_STATE, f"transaction {self.txn} is {self.state}, not open"
            )
