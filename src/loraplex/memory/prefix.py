"""The prefix index: which full blocks of KV rows are cached, under which key, in which page, and who reads
them.

A block is found by its key alone, and its key says everything that its rows depend on (`identity.cache`):
namespace, cache ABI, every token and every execution up to its end. So the index compares no tokens and knows
no tenant; whoever has no key of a namespace finds nothing of it. A block is cached only below its cached
parent, and a reader references a whole chain from its beginning. So a parent is referenced wherever a child
is, and every unreferenced block can be given up, leaves first.

Owns keys, references and the order in which blocks go. Never owns a page's state, never moves a byte, and
never decides how many pages the cache may have: the pool and the engine do.

Specification: 0x08H, 0x08I (look-up, receipt, publication); rulings "KV compatibility".
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loraplex.core.errors import ErrorCode, InternalFault

_STALE_FACTOR = 4
"""The heap is rebuilt when it holds this many times more entries than there are blocks."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One cached block. number: names it for ever; the page's owner. depth: blocks before it in its chain.

    readers: requests that reference it. children: cached blocks right after it. dropped: no longer found; it
    goes with its last reader.
    """

    number: int
    key: bytes
    parent: CachedBlock | None
    page: int
    execution: bytes
    depth: int
    last_launch: int
    readers: int = 1
    children: int = 0
    dropped: bool = False


_Leaf = tuple[int, int, int, CachedBlock]


def _leaf(block: CachedBlock) -> _Leaf:
    """Its place in the order in which blocks go: longest unused first, of those the deepest."""
    return block.last_launch, -block.depth, block.number, block


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof of a hit: the blocks that a request acquired, in order, and the pages that hold them. It never
    changes.

    covered: positions [0, covered) whose KV rows the blocks hold.
    """

    blocks: tuple[CachedBlock, ...]
    pages: tuple[int, ...]
    keys: tuple[bytes, ...]
    covered: int


EMPTY_RECEIPT = Receipt((), (), (), 0)


class PrefixIndex:
    """Cached blocks by key. page_tokens: positions of a block."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.unreferenced = 0
        self._blocks: dict[bytes, CachedBlock] = {}
        self._dropped: dict[int, CachedBlock] = {}
        self._by_execution: dict[bytes, dict[int, CachedBlock]] = {}
        self._leaves: list[_Leaf] = []
        self._numbers = 0

    def __len__(self) -> int:
        """Pages that the cache holds, dropped blocks that are still read included."""
        return len(self._blocks) + len(self._dropped)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of a request's block keys are cached, from the first on without a gap. O(log keys).

        A block is cached only below its cached parent, so the cached ones of a chain are its beginning.
        Whether the keys are a chain, `acquire` finds out.
        """
        return bisect_left(keys, True, key=lambda key: key not in self._blocks)

    def unread(self, keys: Sequence[bytes]) -> int:
        """How many of these cached blocks of one chain nobody references: what acquiring them takes from what
        can be given up.

        A parent is referenced wherever a child is, so the unreferenced ones are the chain's end.
        """
        blocks = self._blocks
        return len(keys) - bisect_left(keys, True, key=lambda key: key in blocks and not blocks[key].readers)

    def acquire(self, keys: Sequence[bytes], launch: int) -> Receipt:
        """Reference the cached blocks of `keys`, a chain from its first block on; the next step cannot evict
        them.
        """
        blocks: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.parent is not parent:
                raise InternalFault(
                    ErrorCode.PREFIX_RECEIPT,
                    f"block {len(blocks)} of {len(keys)} is not cached after its parent",
                )
            blocks.append(block)
            parent = block
        for block in blocks:
            self._reference(block, launch)
        pages = tuple(block.page for block in blocks)
        return Receipt(tuple(blocks), pages, tuple(keys), len(blocks) * self.page_tokens)

    def publish(
        self, parent: CachedBlock | None, key: bytes, page: int, execution: bytes, launch: int
    ) -> CachedBlock | None:
        """Cache a block whose rows a commit completed; the request that computed it references what is
        cached.

        parent: the cached block before it, referenced by the same request; None for the first of a chain.
        launch: the plan that completed it. The answer is the cached block: a new one in `page`, or the one
        that another request cached before, in a page of its own. None, with nothing changed, where the parent
        was dropped.
        """
        if parent is not None and parent.dropped:
            return None
        if parent is not None and parent.readers == 0:
            raise InternalFault(
                ErrorCode.PREFIX_RECEIPT, "a block was published after a parent that nobody holds"
            )
        known = self._blocks.get(key)
        if known is not None:
            if known.parent is not parent:
                raise InternalFault(
                    ErrorCode.PREFIX_RECEIPT, f"block {known.number} is cached after another parent"
                )
            self._reference(known, launch)
            return known
        self._numbers += 1
        depth = parent.depth + 1 if parent is not None else 0
        block = CachedBlock(self._numbers, key, parent, page, execution, depth, launch)
        if parent is not None:
            parent.children += 1
        self._blocks[key] = block
        self._by_execution.setdefault(execution, {})[block.number] = block
        return block

    def _reference(self, block: CachedBlock, launch: int) -> None:
        self.unreferenced -= block.readers == 0
        block.readers += 1
        block.last_launch = max(block.last_launch, launch)

    def release(self, blocks: Iterable[CachedBlock], launch: int) -> list[CachedBlock]:
        """Give references back, each once. Returns dropped blocks that nobody reads any more: their pages go
        now.
        """
        gone = []
        for block in sorted(blocks, key=lambda block: -block.depth):
            if block.readers < 1:
                raise InternalFault(
                    ErrorCode.PREFIX_RECEIPT, f"block {block.number} was released more often than acquired"
                )
            block.readers -= 1
            block.last_launch = max(block.last_launch, launch)
            if block.readers:
                continue
            if block.dropped:
                self._forget(block)
                gone.append(block)
            else:
                self.unreferenced += 1
                if not block.children:
                    self._offer(block)
        return gone

    def oldest(self) -> CachedBlock | None:
        """The unreferenced leaf that goes next: longest unused, of those the deepest; None where all are
        read.
        """
        while self._leaves:
            last_launch, _, number, block = self._leaves[0]
            if block.number == number and self._is_leaf(block) and block.last_launch == last_launch:
                return block
            heapq.heappop(self._leaves)
        return None

    def next_to_go(self, count: int) -> list[CachedBlock]:
        """The `count` blocks that `give_up` would forget, in their order; nothing changes. O(count log
        blocks).
        """
        out: list[CachedBlock] = []
        left: dict[int, int] = {}
        taken: dict[int, _Leaf] = {}
        opened: list[_Leaf] = []
        while len(out) < min(count, self.unreferenced):
            if self.oldest() is not None and (not opened or self._leaves[0] < opened[0]):
                leaf = heapq.heappop(self._leaves)
                if leaf[2] in taken:
                    continue  # offered twice
                taken[leaf[2]] = leaf
            else:
                leaf = heapq.heappop(opened)
            block = leaf[3]
            out.append(block)
            parent = block.parent
            if parent is not None and not parent.readers:
                left[parent.number] = left.get(parent.number, parent.children) - 1
                if not left[parent.number]:
                    heapq.heappush(opened, _leaf(parent))
        for leaf in taken.values():
            heapq.heappush(self._leaves, leaf)
        return out

    def give_up(self, count: int) -> list[CachedBlock]:
        """Forget `count` unreferenced blocks, leaves first and longest unused first; their pages go now."""
        if count > self.unreferenced:
            raise InternalFault(
                ErrorCode.PREFIX_RECEIPT,
                f"{count} blocks were to be given up, {self.unreferenced} are unreferenced",
            )
        gone = []
        for _ in range(count):
            block = self.oldest()
            if block is None:
                raise InternalFault(
                    ErrorCode.PREFIX_RECEIPT, "an unreferenced block is not offered by any leaf"
                )
            self._remove(block)
            gone.append(block)
        return gone

    def drop(self, execution: bytes) -> list[CachedBlock]:
        """Nothing made under `execution` is found again (revoked, or its last revision left).

        Returns the blocks that nobody reads: their pages go now; those that are read go with their last
        reader.
        """
        held = sorted(self._by_execution.get(execution, {}).values(), key=lambda block: -block.depth)
        gone = []
        for block in held:
            if block.dropped:
                continue
            if block.readers == 0:
                self._remove(block)
                gone.append(block)
            else:
                del self._blocks[block.key]
                block.dropped = True
                self._dropped[block.number] = block
        return gone

    def __iter__(self) -> Iterator[CachedBlock]:
        """All blocks, dropped ones that are still read included."""
        yield from self._blocks.values()
        yield from self._dropped.values()

    def _is_leaf(self, block: CachedBlock) -> bool:
        return self._blocks.get(block.key) is block and block.readers == 0 and block.children == 0

    def _offer(self, block: CachedBlock) -> None:
        """An unreferenced block without children may go; later ones of a chain before earlier ones."""
        heapq.heappush(self._leaves, _leaf(block))
        if len(self._leaves) > _STALE_FACTOR * len(self._blocks) + 64:
            self._leaves = [_leaf(b) for b in self._blocks.values() if self._is_leaf(b)]
            heapq.heapify(self._leaves)

    def _remove(self, block: CachedBlock) -> None:
        """Take an unreferenced block out; its parent may become a leaf."""
        self.unreferenced -= 1
        del self._blocks[block.key]
        self._leave_parent(block)
        self._leave_execution(block)

    def _forget(self, block: CachedBlock) -> None:
        """A dropped block's last reader is gone."""
        del self._dropped[block.number]
        self._leave_parent(block)
        self._leave_execution(block)

    def _leave_parent(self, block: CachedBlock) -> None:
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            if self._is_leaf(parent):
                self._offer(parent)

    def _leave_execution(self, block: CachedBlock) -> None:
        held = self._by_execution[block.execution]
        del held[block.number]
        if not held:
            del self._by_execution[block.execution]

    def check(self) -> None:
        """Raise `prefix_receipt` unless references, children and the count of unreferenced blocks agree."""
        children: dict[int, int] = {}
        for block in self:
            if block.parent is not None:
                children[block.parent.number] = children.get(block.parent.number, 0) + 1
                if block.readers > block.parent.readers:
                    raise InternalFault(
                        ErrorCode.PREFIX_RECEIPT, f"block {block.number} is read without its parent"
                    )
        for block in self:
            if block.children != children.get(block.number, 0) or block.readers < 0:
                raise InternalFault(
                    ErrorCode.PREFIX_RECEIPT, f"the references of block {block.number} do not add up"
                )
        unread = sum(block.readers == 0 for block in self._blocks.values())
        if unread != self.unreferenced or len({block.page for block in self}) != len(self):
            raise InternalFault(
                ErrorCode.PREFIX_RECEIPT, f"{self.unreferenced} blocks count as unreferenced, {unread} are"
            )
