"""Slab pages: pages cut into equal blocks, so that small adapters share them.

Owns the state of each block, with its owner, the owner's generation and the last launch that may name it; the
page as a whole is the slab's, owned in the pool under a serial number that is never used twice, so that a
handle to a block of a slab that is gone can never become valid again (ABA). A page becomes a slab when a
block is needed and none is free, and goes back to the pool when its last block is free. Never decides who
gets a block and never touches its bytes.

A block is free, reserved by a transaction, or owned by (adapter slot, generation): the pool's rule, one level
down. All blocks of a slab have one size class. A slab in a page that a rollback may owe to somebody is *held
back*: nobody else gets a block of it before the transaction has ended.

Specification: 0x05A (one owner for each byte), 0x04F (fences); architecture "The page pool".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import MAX_SIZE_CLASS, block_bytes
from loraplex.core.packed import I32, each
from loraplex.core.plan import BlockColumns
from loraplex.memory.states import PageState, WholePages

I64 = npt.NDArray[np.int64]


class BlockState(IntEnum):
    """Physical state of a block."""

    FREE = 0
    RESERVED = 1
    OWNED = 2


@dataclass(frozen=True, slots=True)
class Block:
    """A handle to one block. slab: serial number of the slab that it was given from."""

    page: int
    size_class: int
    index: int
    slab: int


@dataclass(frozen=True, slots=True)
class SlabCounts:
    """The ledger inside slab pages. The four numbers of bytes add up to `pages` pages; tail: what no block
    covers.
    """

    pages: int
    free_blocks: int
    reserved_blocks: int
    owned_blocks: int
    free_bytes: int
    reserved_bytes: int
    owned_bytes: int
    tail_bytes: int


@dataclass(slots=True, eq=False)
class _Slab:
    page: int
    size_class: int
    serial: int
    held_back: bool
    state: npt.NDArray[np.int8] = field(init=False)
    owner: I64 = field(init=False)
    generation: I64 = field(init=False)
    fence: I64 = field(init=False)

    def __post_init__(self) -> None:
        count = 1 << self.size_class
        self.state = np.zeros(count, dtype=np.int8)
        self.owner = np.full(count, -1, dtype=np.int64)
        self.generation, self.fence = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)

    @property
    def free(self) -> int:
        return int((self.state == BlockState.FREE).sum())


class Slabs:
    """All slab pages of one pool."""

    def __init__(self, pool: WholePages) -> None:
        self._pool = pool
        self._slabs: dict[int, _Slab] = {}
        # Slabs that have a free block for anybody, by class; a dict keeps the order in which they got it.
        self._roomy: Final[tuple[dict[int, _Slab], ...]] = tuple({} for _ in range(MAX_SIZE_CLASS + 1))
        self._serial = 0

    @property
    def pages(self) -> int:
        """Pages that are slabs."""
        return len(self._slabs)

    def has_free(self, size_class: int) -> bool:
        """Whether a block of the class can be had without a page."""
        return bool(self._roomy[size_class])

    def next_page(self, size_class: int) -> int:
        """The slab page that the next `reserve` of the class takes its block from; 0 when there is none."""
        roomy = self._roomy[size_class]
        return min(roomy.values(), key=lambda slab: (slab.free, slab.page)).page if roomy else 0

    def slab_pages(self) -> Iterator[int]:
        """The pages that are slabs, oldest slab first."""
        return iter(self._slabs)

    def owners(self, page: int) -> list[tuple[int, int]] | None:
        """(adapter slot, generation) of each owned block of a slab; None where a transaction has reserved
        one.
        """
        slab = self._slabs[page]
        if (slab.state == BlockState.RESERVED).any():
            return None
        owned = np.flatnonzero(slab.state == BlockState.OWNED)
        return list(zip(slab.owner[owned].tolist(), slab.generation[owned].tolist(), strict=True))

    def free_blocks(self) -> list[tuple[int, int, int]]:
        """(page, size class, index) of every free block."""
        return [
            (slab.page, slab.size_class, index)
            for slab in self._slabs.values()
            for index in np.flatnonzero(slab.state == BlockState.FREE).tolist()
        ]

    def open(self, page: I32, txn: int, size_class: int, *, held_back: bool = False) -> Block:
        """Cut a page reserved by `txn` into blocks; its first block is reserved by `txn`. page: one page."""
        if not 1 <= size_class <= MAX_SIZE_CLASS or not block_bytes(self._pool.page_bytes, size_class):
            raise InternalFault(
                ErrorCode.PAGE_STATE,
                f"a page of {self._pool.page_bytes} bytes is not cut into blocks of size class {size_class}",
            )
        self._serial += 1
        self._pool.own(page, txn, PageState.SLAB, self._serial, self._serial)
        slab = _Slab(int(page[0]), size_class, self._serial, held_back)
        slab.fence[:] = self._pool.fence_of(page)
        self._slabs[slab.page] = slab
        return self._take(slab, 0, txn)

    def reserve(self, size_class: int, txn: int) -> Block:
        """A free block for `txn`: of the fullest slab, so that emptier ones can go; in it the one longest
        unnamed.
        """
        page = self.next_page(size_class)
        if not page:
            raise InternalFault(ErrorCode.PAGE_STATE, f"no block of size class {size_class} is free")
        slab = self._slabs[page]
        free = np.flatnonzero(slab.state == BlockState.FREE)
        return self._take(slab, int(free[np.argmin(slab.fence[free])]), txn)

    def _take(self, slab: _Slab, index: int, txn: int) -> Block:
        slab.state[index] = BlockState.RESERVED
        slab.owner[index] = txn
        self._note_room(slab)
        return Block(slab.page, slab.size_class, index, slab.serial)

    def own(self, block: Block, txn: int, owner: int, generation: int) -> None:
        """Turn a block reserved by `txn` into one of `owner`@`generation`."""
        slab = self._expect(block, BlockState.RESERVED, txn, None)
        slab.state[block.index] = BlockState.OWNED
        slab.owner[block.index], slab.generation[block.index] = owner, generation

    def take_over(self, block: Block, owner: int, generation: int, txn: int, last_launch: int) -> None:
        """Turn a block of a retired owner into one reserved by `txn`, never free in between."""
        slab = self._expect(block, BlockState.OWNED, owner, generation)
        slab.state[block.index] = BlockState.RESERVED
        slab.owner[block.index] = txn
        slab.fence[block.index] = max(int(slab.fence[block.index]), last_launch)

    def cancel(self, block: Block, txn: int, last_launch: int) -> bool:
        """Give a reserved block back; whether its page went back to the pool with it."""
        return self._to_free(self._expect(block, BlockState.RESERVED, txn, None), block, last_launch)

    def release(self, block: Block, owner: int, generation: int, last_launch: int) -> bool:
        """Free a block of `owner`@`generation`; whether its page went back to the pool with it."""
        return self._to_free(self._expect(block, BlockState.OWNED, owner, generation), block, last_launch)

    def dissolvable(self, page: int, blocks: int) -> bool:
        """Whether a slab has no more than `blocks` blocks in use: with those gone it is a page again."""
        slab = self._slabs[page]
        return not slab.held_back and (1 << slab.size_class) - slab.free <= blocks

    def dissolve(self, page: int, txn: int) -> I32:
        """Make a slab whose used blocks are all reserved by `txn` one page reserved by `txn`."""
        slab = self._slabs[page]
        used = slab.state != BlockState.FREE
        if (slab.state[used] != BlockState.RESERVED).any() or (slab.owner[used] != txn).any():
            raise InternalFault(ErrorCode.PAGE_OWNER, f"slab page {page} has blocks of others than {txn}")
        pages = self._forget(slab)
        self._pool.take_over(pages, PageState.SLAB, slab.serial, slab.serial, txn, int(slab.fence.max()))
        return pages

    def share(self, block: Block) -> None:
        """Let others have blocks of a slab that was held back."""
        slab = self._of(block)
        slab.held_back = False
        self._note_room(slab)

    def held_back(self, block: Block) -> bool:
        """Whether the block's slab is held back."""
        return self._of(block).held_back

    def fence_of(self, block: Block) -> int:
        """Newest launch that may still name the block; 0 when there is none."""
        return int(self._of(block).fence[block.index])

    def require_fence(self, block: Block, committed_launch: int) -> None:
        """Raise `page_fence` unless every launch that may name the block has completed."""
        fence = self.fence_of(block)
        if fence > committed_launch:
            raise InternalFault(
                ErrorCode.PAGE_FENCE,
                f"launch {fence} may still use a block that would be overwritten; {committed_launch} has "
                "completed",
            )

    def name(self, blocks: BlockColumns, launch: int) -> None:
        """A launch that writes to blocks beside their owner's rows, as scrubs do.

        A slab that is gone since, or was cut anew, is named as a whole.
        """
        for page, size_class, index in each(blocks.page, blocks.size_class, blocks.block):
            slab = self._slabs.get(page)
            if slab is not None and slab.size_class == size_class:
                slab.fence[index] = max(int(slab.fence[index]), launch)
            else:
                self._pool.name(np.array([page], dtype=np.int32), launch)

    def name_pages(self, pages: I32, launch: int) -> None:
        """A launch that writes to whole pages, some of which may have become slabs since they were freed."""
        for page in pages.tolist():
            if page in self._slabs:
                fence = self._slabs[page].fence
                np.maximum(fence, launch, out=fence)

    def owned_by(self, block: Block, owner: int, generation: int) -> bool:
        """Whether the block belongs to `owner`@`generation`."""
        slab = self._slabs.get(block.page)
        return (
            slab is not None
            and slab.serial == block.slab
            and slab.state[block.index] == BlockState.OWNED
            and (int(slab.owner[block.index]), int(slab.generation[block.index])) == (owner, generation)
        )

    def counts(self) -> SlabCounts:
        """The ledger inside slab pages, counted from the block states."""
        page_bytes = self._pool.page_bytes
        blocks, size, tail = [0, 0, 0], [0, 0, 0], 0
        for slab in self._slabs.values():
            width = block_bytes(page_bytes, slab.size_class)
            by_state = np.bincount(slab.state, minlength=3).tolist()
            for state, count in enumerate(by_state):
                blocks[state] += count
                size[state] += count * width
            tail += page_bytes - (width << slab.size_class)
        return SlabCounts(
            pages=len(self._slabs),
            free_blocks=blocks[0],
            reserved_blocks=blocks[1],
            owned_blocks=blocks[2],
            free_bytes=size[0],
            reserved_bytes=size[1],
            owned_bytes=size[2],
            tail_bytes=tail,
        )

    def check(self) -> None:
        """Raise `page_conservation` unless blocks, slabs and the pool's pages agree."""
        counts = self.counts()
        held = counts.free_bytes + counts.reserved_bytes + counts.owned_bytes + counts.tail_bytes
        if held != counts.pages * self._pool.page_bytes or self._pool.counts().slab != counts.pages:
            raise InternalFault(ErrorCode.PAGE_CONSERVATION, f"slab ledger does not add up: {counts}")
        for page, slab in self._slabs.items():
            pages = np.array([page], dtype=np.int32)
            if not self._pool.owners(pages, PageState.SLAB, slab.serial, slab.serial):
                raise InternalFault(ErrorCode.PAGE_CONSERVATION, f"page {page} is not slab {slab.serial}'s")
            if slab.free == slab.state.size:
                raise InternalFault(ErrorCode.PAGE_CONSERVATION, f"slab page {page} is empty and was kept")
            if (page in self._roomy[slab.size_class]) != (slab.free > 0 and not slab.held_back):
                raise InternalFault(
                    ErrorCode.PAGE_CONSERVATION, f"the free blocks of page {page} are listed wrong"
                )

    def _to_free(self, slab: _Slab, block: Block, last_launch: int) -> bool:
        slab.state[block.index] = BlockState.FREE
        slab.owner[block.index] = -1
        slab.fence[block.index] = max(int(slab.fence[block.index]), last_launch)
        if slab.free < slab.state.size:
            self._note_room(slab)
            return False
        self._pool.release(
            self._forget(slab), PageState.SLAB, slab.serial, slab.serial, int(slab.fence.max())
        )
        return True

    def _forget(self, slab: _Slab) -> I32:
        del self._slabs[slab.page]
        self._roomy[slab.size_class].pop(slab.page, None)
        return np.array([slab.page], dtype=np.int32)

    def _note_room(self, slab: _Slab) -> None:
        roomy = self._roomy[slab.size_class]
        if slab.held_back or not slab.free:
            roomy.pop(slab.page, None)
        else:
            roomy[slab.page] = slab

    def _of(self, block: Block) -> _Slab:
        slab = self._slabs.get(block.page)
        if slab is None or slab.serial != block.slab or not 0 <= block.index < slab.state.size:
            raise InternalFault(ErrorCode.PAGE_OWNER, f"{block} is of a slab that is gone")
        return slab

    def _expect(self, block: Block, state: BlockState, owner: int, generation: int | None) -> _Slab:
        slab = self._of(block)
        if slab.state[block.index] != state:
            raise InternalFault(ErrorCode.PAGE_STATE, f"{block} is not {state.name}")
        if slab.owner[block.index] != owner:
            raise InternalFault(ErrorCode.PAGE_OWNER, f"{block} is not owned by {owner}")
        if generation is not None and slab.generation[block.index] != generation:
            raise InternalFault(ErrorCode.PAGE_OWNER, f"{block} is not of generation {generation}")
        return slab
