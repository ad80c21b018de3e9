"""The prefix index against a dumb model: chains, readers, what is given up first, what is dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.memory.prefix import CachedBlock, PrefixIndex, Receipt

X, Y = b"x" * 32, b"y" * 32


def chain(index: PrefixIndex, names: str, launch: int = 1, execution: bytes = X) -> list[CachedBlock]:
    """Blocks with one-letter keys, each naming its whole path, published in order and held."""
    held: list[CachedBlock] = []
    parent = None
    for end in range(1, len(names) + 1):
        key = names[:end].encode()
        parent = index.publish(parent, key, 1000 + len(index), execution, launch)
        assert parent is not None
        held.append(parent)
    return held


def keys(names: str) -> list[bytes]:
    return [names[:end].encode() for end in range(1, len(names) + 1)]


def test_the_longest_cached_run_matches() -> None:
    index = PrefixIndex(4)
    chain(index, "abc")
    assert [index.matched(keys(names)) for names in ("abc", "abcd", "abx", "b", "")] == [3, 3, 2, 0, 0]
    receipt = index.acquire(keys("ab"), launch=2)
    assert (receipt.covered, len(receipt.pages)) == (8, 2)


def test_what_is_read_stays_and_leaves_go_first_longest_unused_first() -> None:
    index = PrefixIndex(4)
    old, new = chain(index, "abc", 1), chain(index, "xyz", 5)
    index.release(old, 2)
    index.release(new, 6)
    reader = index.acquire(keys("a"), 7)
    assert index.unreferenced == 5
    assert [block.key for block in index.give_up(4)] == [b"abc", b"ab", b"xyz", b"xy"]
    assert index.matched(keys("abc")) == 1
    assert [block.key for block in index.give_up(1)] == [b"x"]
    with pytest.raises(InternalFault):
        index.give_up(1)
    index.release(reader.blocks, 8)
    assert [block.key for block in index.give_up(1)] == [b"a"]
    assert len(index) == 0


def test_a_block_that_two_requests_computed_is_cached_once() -> None:
    index = PrefixIndex(4)
    first = chain(index, "ab", 1)
    assert index.publish(None, b"a", 77, X, 2) is first[0]
    assert first[0].readers == 2
    assert len(index) == 2


def test_a_dropped_execution_is_not_found_and_goes_with_its_readers() -> None:
    index = PrefixIndex(4)
    base = chain(index, "ab", 1, X)
    tail = index.publish(base[-1], b"abc", 5, Y, 1)
    other = index.publish(base[-1], b"abz", 6, Y, 1)
    assert tail is not None
    assert other is not None
    index.release([other], 2)
    assert [block.key for block in index.drop(Y)] == [b"abz"]
    assert index.matched(keys("abc")) == 2
    assert index.publish(tail, b"abcd", 9, Y, 3) is None
    assert len(index) == 3
    assert [block.key for block in index.release([*base, tail], 4)] == [b"abc"]
    assert index.unreferenced == 2
    index.check()


def broken_receipts() -> dict[str, Callable[[PrefixIndex, list[CachedBlock]], object]]:
    return {
        "a key that is not cached": lambda index, held: index.acquire(keys("abx"), 2),
        "a chain without its beginning": lambda index, held: index.acquire([b"b"], 2),
        "a block after another parent": lambda index, held: index.acquire([b"a", b"x"], 2),
        "a block twice": lambda index, held: index.acquire([b"a", b"a"], 2),
        "a second release": lambda index, held: (index.release(held, 2), index.release(held, 2)),
        "one block twice": lambda index, held: index.release([held[0], held[0]], 2),
        "a child of nobody's block": lambda index, held: (
            index.release(held, 2),
            index.publish(held[-1], b"abc", 9, X, 3),
        ),
        "a key after another parent": lambda index, held: index.publish(held[0], b"x", 9, X, 3),
        "more than is unreferenced": lambda index, held: index.give_up(1),
        "a block that is read": lambda index, held: (index.release(held[1:], 2), index.give_up(2)),
    }


@pytest.mark.parametrize("name", broken_receipts())
def test_a_reference_that_does_not_hold_is_refused(name: str) -> None:
    index = PrefixIndex(4)
    held = chain(index, "ab")
    chain(index, "x")
    with pytest.raises(InternalFault) as caught:
        broken_receipts()[name](index, held)
    assert caught.value.code is ErrorCode.PREFIX_RECEIPT


@pytest.mark.parametrize("field", ["readers", "children", "page", "parent", "unreferenced"])
def test_books_that_disagree_are_found(field: str) -> None:
    index = PrefixIndex(4)
    first, second = chain(index, "ab")
    index.check()
    match field:
        case "readers":
            second.readers = 2
        case "children":
            first.children = 0
        case "page":
            second.page = first.page
        case "parent":
            second.parent = None
        case _:
            index.unreferenced = 1
    with pytest.raises(InternalFault) as caught:
        index.check()
    assert caught.value.code is ErrorCode.PREFIX_RECEIPT


def test_a_receipt_never_changes() -> None:
    index = PrefixIndex(4)
    chain(index, "ab")
    receipt = index.acquire(keys("ab"), 2)
    with pytest.raises(AttributeError):
        receipt.covered = 0  # type: ignore[misc]


class Reader(RuleBasedStateMachine):
    """Requests over short chains; the model is a set of paths and a list of held ones."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(2)
        self.held: list[tuple[str, Receipt | list[CachedBlock]]] = []
        self.cached: set[str] = set()
        self.pages = 0
        self.launch = 0

    @rule(names=st.text("ab", min_size=1, max_size=4))
    def run(self, names: str) -> None:
        """A request hits what is there and publishes the rest."""
        self.launch += 1
        path = [names[:end] for end in range(1, len(names) + 1)]
        hit = 0
        while hit < len(path) and path[hit] in self.cached:
            hit += 1
        wanted = [name.encode() for name in path]
        assert self.index.matched(wanted) == hit
        read = {name[:end] for name, _ in self.held for end in range(1, len(name) + 1)}
        assert self.index.unread(wanted[:hit]) == len(set(path[:hit]) - read)
        blocks = list(self.index.acquire(wanted[:hit], self.launch).blocks)
        for key in wanted[hit:]:
            self.pages += 1
            block = self.index.publish(blocks[-1] if blocks else None, key, self.pages, X, self.launch)
            assert block is not None
            blocks.append(block)
        self.cached |= set(path)
        self.held.append((names, blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.launch += 1
        at = data.draw(st.integers(0, len(self.held) - 1))
        _, blocks = self.held.pop(at)
        assert isinstance(blocks, list)
        assert self.index.release(blocks, self.launch) == []

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.index.unreferenced))
        read = {name[:end] for name, _ in self.held for end in range(1, len(name) + 1)}
        announced = self.index.next_to_go(count)
        given = self.index.give_up(count)
        assert given == announced
        for block in given:
            name = block.key.decode()
            assert name not in read
            assert not any(other != name and other.startswith(name) for other in self.cached)
            self.cached.discard(name)

    @invariant()
    def books_agree(self) -> None:
        self.index.check()
        read = {name[:end] for name, _ in self.held for end in range(1, len(name) + 1)}
        assert len(self.index) == len(self.cached)
        assert self.index.unreferenced == len(self.cached - read)


Reader.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReader = Reader.TestCase
