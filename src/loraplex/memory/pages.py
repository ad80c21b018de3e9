"""The page pool's ledger: which page is free, reserved or owned, by whom, and which launch may still name it.

Owns page states and the conservation law; never decides who gets pages and never touches their bytes. Every
page is in exactly one state; free + reserved + adapter + KV + prefix = all pages but the null page, in pages
and in bytes. A freed page carries the number of the last launch that may name it: work ordered on the compute
stream may reuse it at once, a copy on any other stream only after that launch has completed. Small adapters
share slab pages: such a page is owned by its slab, and who has which block of it is in `slabs`.

Specification: 0x05A (one pool, two ownership rules), 0x04F (fences); rulings "One page pool".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.memory.slabs import Slabs
from loraplex.memory.states import Ints, PageCounts, PageState

__all__ = ["PageCounts", "PagePool", "PageState"]


class PagePool:
    """State, owner, owner generation and fence of each page. Pages are numbered from 1; 0 is the
    null page.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        """num_pages: pages of the device buffer, the null page included; at least 2."""
        if num_pages < 2 or page_bytes < 1:
            raise InternalFault(
                ErrorCode.PAGE_STATE, f"a pool of {num_pages} pages of {page_bytes} bytes is empty"
            )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._state = np.zeros(num_pages, dtype=np.int8)
        self._state[0] = PageState.NULL
        self._owner = np.full(num_pages, -1, dtype=np.int64)
        self._generation = np.zeros(num_pages, dtype=np.int64)
        self._fence = np.zeros(num_pages, dtype=np.int64)
        self._free: deque[int] = deque(range(1, num_pages))
        self.slabs = Slabs(self)

    @property
    def free(self) -> int:
        """Free pages."""
        return len(self._free)

    def free_pages(self) -> Iterator[int]:
        """The free pages, longest free first."""
        return iter(self._free)

    @property
    def usable(self) -> int:
        """All pages but the null page."""
        return self.num_pages - 1

    def counts(self) -> PageCounts:
        """The conservation ledger, counted from the page states."""
        by_state = np.bincount(self._state, minlength=len(PageState))
        return PageCounts(
            total=self.usable,
            free=int(by_state[PageState.FREE]),
            reserved=int(by_state[PageState.RESERVED]),
            adapter=int(by_state[PageState.ADAPTER] + by_state[PageState.SLAB]),
            kv=int(by_state[PageState.KV]),
            page_bytes=self.page_bytes,
            slab=int(by_state[PageState.SLAB]),
            prefix=int(by_state[PageState.PREFIX]),
        )

    def reserve(self, count: int, txn: int) -> I32:
        """Take `count` free pages for transaction `txn`, most recently freed first (for the compute
        stream).
        """
        if not 0 <= count <= len(self._free):
            raise InternalFault(ErrorCode.PAGE_STATE, f"{count} pages asked of {len(self._free)} free ones")
        return self._take([self._free.pop() for _ in range(count)], txn)

    def reserve_for_copy(self, count: int, txn: int) -> I32:
        """Take `count` free pages for transaction `txn`, longest free first: their fence passes soonest."""
        if not 0 <= count <= len(self._free):
            raise InternalFault(ErrorCode.PAGE_STATE, f"{count} pages asked of {len(self._free)} free ones")
        return self._take([self._free.popleft() for _ in range(count)], txn)

    def take_over(
        self, pages: I32, kind: PageState, owner: int, generation: int, txn: int, last_launch: int
    ) -> None:
        """Turn pages of a retired `owner`@`generation` into pages reserved by `txn`, never free in between.

        last_launch: the newest launch that may name them.
        """
        self._expect(pages, kind, owner, generation)
        self._state[pages] = PageState.RESERVED
        self._owner[pages] = txn
        self._fence[pages] = np.maximum(self._fence[pages], last_launch)

    def hand_over(self, pages: I32, txn: int, to_txn: int) -> None:
        """Pass reserved pages from one transaction to another."""
        self._expect(pages, PageState.RESERVED, txn, None)
        self._owner[pages] = to_txn

    def cache(self, pages: I32, slots: Ints, generations: Ints, blocks: Ints) -> None:
        """Turn KV pages of requests into pages of cached blocks. slots, generations, blocks: for
        each page.
        """
        self._expect(pages, PageState.KV, slots, generations)
        self._state[pages] = PageState.PREFIX
        self._owner[pages] = blocks
        self._generation[pages] = 0

    def fence_of(self, pages: I32) -> int:
        """Newest launch that may still name any of `pages`; 0 when there is none."""
        return int(self._fence[pages].max()) if pages.size else 0

    def name(self, pages: I32, launch: int) -> None:
        """A launch that writes to `pages` beside their owner's rows, as scrubs do: no copy before it has
        completed.
        """
        self._fence[pages] = np.maximum(self._fence[pages], launch)
        self.slabs.name_pages(pages, launch)

    def require_fence(self, pages: I32, committed_launch: int) -> None:
        """Raise `page_fence` unless every launch that may name `pages` has completed: before a copy beside
        compute.
        """
        fence = self.fence_of(pages)
        if fence > committed_launch:
            raise InternalFault(
                ErrorCode.PAGE_FENCE,
                f"launch {fence} may still use a page that would be overwritten; {committed_launch} has "
                "completed",
            )

    def _take(self, pages: list[int], txn: int) -> I32:
        out = np.array(pages, dtype=np.int32)
        if (self._state[out] != PageState.FREE).any():
            raise InternalFault(ErrorCode.PAGE_STATE, "the free list names a page that is not free")
        self._state[out] = PageState.RESERVED
        self._owner[out] = txn
        return out

    def own(self, pages: I32, txn: int, kind: PageState, owner: int | Ints, generation: int | Ints) -> None:
        """Turn pages reserved by `txn` into pages of object `owner` at `generation`. kind: KV, ADAPTER or
        SLAB.

        owner, generation: of all pages, or one for each.
        """
        self._expect(pages, PageState.RESERVED, txn, None)
        self._state[pages] = kind
        self._owner[pages] = owner
        self._generation[pages] = generation

    def cancel(self, pages: I32, txn: int, last_launch: int) -> None:
        """Give reserved pages back. last_launch: the newest launch that may have named them."""
        self._expect(pages, PageState.RESERVED, txn, None)
        self._to_free(pages, last_launch)

    def release(
        self,
        pages: I32,
        kind: PageState,
        owner: int | Ints,
        generation: int | Ints,
        last_launch: int | Ints,
    ) -> None:
        """Free pages of `owner`@`generation`, of all of them or one for each. last_launch: the newest launch
        that may name them, or each.
        """
        self._expect(pages, kind, owner, generation)
        self._to_free(pages, last_launch)

    def _to_free(self, pages: I32, last_launch: int | Ints) -> None:
        self._state[pages] = PageState.FREE
        self._owner[pages] = -1
        self._fence[pages] = np.maximum(self._fence[pages], last_launch)
        self._free.extend(pages.tolist())

    def _expect(self, pages: I32, state: PageState, owner: int | Ints, generation: int | Ints | None) -> None:
        if pages.size == 0:
            return
        if pages.size == 1:  # a decode step's growth: one page for each of many requests
            distinct = 1 <= int(pages[0]) < self.num_pages
        else:
            distinct = np.unique(pages).size == pages.size
            distinct = distinct and int(pages.min()) >= 1 and int(pages.max()) < self.num_pages
        if not distinct:
            raise InternalFault(
                ErrorCode.PAGE_STATE, f"pages {pages.tolist()} are not distinct pages of the pool"
            )
        if (self._state[pages] != state).any():
            raise InternalFault(ErrorCode.PAGE_STATE, f"a page of {pages.tolist()} is not {state.name}")
        if (self._owner[pages] != owner).any():
            raise InternalFault(ErrorCode.PAGE_OWNER, f"a page of {pages.tolist()} is not owned by {owner}")
        if generation is not None and (self._generation[pages] != generation).any():
            raise InternalFault(
                ErrorCode.PAGE_OWNER, f"a page of {pages.tolist()} is not of generation {generation}"
            )

    def owners(self, pages: I32, kind: PageState, owner: int | Ints, generation: int | Ints) -> bool:
        """Whether all `pages` belong to `owner`@`generation`, given for all of them or for each."""
        return bool(
            (self._state[pages] == kind).all()
            and (self._owner[pages] == owner).all()
            and (self._generation[pages] == generation).all()
        )

    def check(self) -> None:
        """Raise `page_conservation` unless states, free list and counts agree."""
        counts = self.counts()
        listed = np.fromiter(self._free, dtype=np.int64, count=len(self._free))
        if not counts.conserved or counts.free != listed.size or np.unique(listed).size != listed.size:
            raise InternalFault(ErrorCode.PAGE_CONSERVATION, f"page ledger does not add up: {counts}")
        if listed.size and (self._state[listed] != PageState.FREE).any():
            raise InternalFault(ErrorCode.PAGE_CONSERVATION, "the free list names a page in use")
        if self._state[0] != PageState.NULL:
            raise InternalFault(ErrorCode.PAGE_CONSERVATION, "the null page is in use")
        self.slabs.check()
