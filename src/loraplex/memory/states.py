"""Physical states of a page, and what the pool and its slabs need of each other: neither module imports the
other for it.

Specification: 0x05A.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loraplex.core.packed import I32

Ints = npt.NDArray[np.integer]


class PageState(IntEnum):
    """Physical state of a page. SLAB: cut into blocks that small adapters own. PREFIX: a cached block of KV
    rows.
    """

    FREE = 0
    RESERVED = 1
    KV = 2
    ADAPTER = 3
    NULL = 4
    SLAB = 5
    PREFIX = 6


@dataclass(frozen=True, slots=True)
class PageCounts:
    """The pool's conservation ledger, in pages; `total` leaves the null page out. slab: those of `adapter`
    that are slabs. kv: rows of one running request; prefix: cached blocks, read or not.
    """

    total: int
    free: int
    reserved: int
    adapter: int
    kv: int
    page_bytes: int
    slab: int = 0
    prefix: int = 0

    @property
    def conserved(self) -> bool:
        """Whether the states add up to the pool (0x05A)."""
        return self.free + self.reserved + self.adapter + self.kv + self.prefix == self.total


class WholePages(Protocol):
    """What slabs ask of the pool that their pages are from; `pages.PagePool` says what each call does."""

    page_bytes: int

    def counts(self) -> PageCounts:
        """The conservation ledger."""
        ...

    def fence_of(self, pages: I32) -> int:
        """Newest launch that may still name any of `pages`."""
        ...

    def own(self, pages: I32, txn: int, kind: PageState, owner: int | Ints, generation: int | Ints) -> None:
        """Turn reserved pages into owned ones."""
        ...

    def owners(self, pages: I32, kind: PageState, owner: int | Ints, generation: int | Ints) -> bool:
        """Whether all `pages` are so owned."""
        ...

    def take_over(
        self, pages: I32, kind: PageState, owner: int, generation: int, txn: int, last_launch: int
    ) -> None:
        """Turn owned pages into reserved ones."""
        ...

    def name(self, pages: I32, launch: int) -> None:
        """Note a launch that writes to `pages`."""
        ...

    def release(self, pages: I32, kind: PageState, owner: int, generation: int, last_launch: int) -> None:
        """Free owned pages."""
        ...
