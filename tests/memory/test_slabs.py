"""Blocks of slab pages: one owner each, handles that die with their slab, fences, pages that go back,
rollbacks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.layout import MAX_SIZE_CLASS, block_bytes, size_class_for
from loraplex.core.plan import BlockColumns
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.slabs import Block
from loraplex.memory.transaction import Demand, Transaction, block_pages

PAGE = 256


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def small(key: str, size_class: int = 2) -> AdapterEntry:
    entry = AdapterEntry(
        key, key * 64, 1, 1, ((1, 1),), (0,), 9, host_source_verified=True, size_class=size_class
    )
    entry.move(AdapterState.HOST_READY)
    return entry


class Slots:
    """A pool and adapters in it, slot numbers by hand."""

    def __init__(self, pages: int = 4) -> None:
        self.pool = PagePool(pages + 1, PAGE)
        self.slot = self.txn = 0

    def reserve(
        self, entry: AdapterEntry, victims: list[AdapterEntry] | None = None, **more: int
    ) -> Transaction:
        self.txn += 1
        demand = Demand(block_pages(self.pool, entry.size_class), 0, 0, 0, entry.size_class)
        made = Transaction.reserve(
            self.txn, self.pool, replace(demand, **more), victims=victims or [], last_launch=7
        )
        assert made is not None
        return made

    def publish(self, entry: AdapterEntry, transaction: Transaction) -> None:
        self.slot += 1
        entry.slot, entry.generation = self.slot, 3
        entry.state = AdapterState.IDLE
        if entry.size_class:
            entry.block = transaction.commit_block(entry.slot, 3)
        else:
            entry.pages = transaction.commit_adapter(entry.slot, 3)
        transaction.finalize(7)
        transaction.close()
        self.pool.check()

    def load(self, key: str, size_class: int = 2) -> AdapterEntry:
        entry = small(key, size_class)
        self.publish(entry, self.reserve(entry))
        return entry

    def whole(self, key: str, pages: int) -> AdapterEntry:
        entry = AdapterEntry(key, key * 64, pages, 1, ((1, 1),), (0,), 9, host_source_verified=True)
        self.txn += 1
        made = Transaction.reserve(self.txn, self.pool, Demand(pages, 0, 0, 0))
        assert made is not None
        self.publish(entry, made)
        return entry


def block(entry: AdapterEntry) -> Block:
    assert entry.block is not None
    return entry.block


def test_a_block_is_the_smallest_that_holds_the_image() -> None:
    for page_bytes in (64, 256, 368_640, 2 << 20, 1_000_003 * 4):
        for k in range(1, MAX_SIZE_CLASS + 1):
            width = block_bytes(page_bytes, k)
            assert width % 16 == 0
            assert (width << k) <= page_bytes < (width + 16) << k
        for nbytes in {
            1,
            15,
            16,
            page_bytes // 2 // 16 * 16,
            page_bytes // 2 + 16,
            page_bytes // 3,
            page_bytes,
        }:
            k = size_class_for(page_bytes, nbytes)
            assert block_bytes(page_bytes, k) >= nbytes
            assert k == MAX_SIZE_CLASS or block_bytes(page_bytes, k + 1) < nbytes
    assert size_class_for(256, 128) == 1
    assert size_class_for(256, 129) == 0
    assert size_class_for(16, 1) == 0  # no block of that page would have a byte


def test_small_adapters_share_a_page_and_the_last_one_gives_it_back() -> None:
    at = Slots(pages=2)
    entries = [at.load(key) for key in "abcd"]
    assert {block(e).page for e in entries} == {block(entries[0]).page}
    assert sorted(block(e).index for e in entries) == [0, 1, 2, 3]
    assert (at.pool.free, at.pool.slabs.pages, at.pool.counts().adapter) == (1, 1, 1)
    fifth = at.load("e")
    assert block(fifth).page != block(entries[0]).page
    for entry in entries:
        assert not at.pool.free
        at.pool.slabs.release(block(entry), entry.slot, entry.generation, 5)
        at.pool.check()
    assert at.pool.free == 1
    assert at.pool.fence_of(i32(block(entries[0]).page)) >= 5


def test_classes_do_not_mix_in_a_page() -> None:
    at = Slots(pages=3)
    one, other = at.load("a", 1), at.load("b", 3)
    assert block(one).page != block(other).page
    again = at.load("c", 3)
    assert block(again).page == block(other).page
    assert at.pool.slabs.counts().free_bytes == PAGE // 2 + 6 * (PAGE // 8)


def test_the_fullest_slab_is_filled_first_so_that_emptier_ones_can_go() -> None:
    at = Slots(pages=3)
    entries = [at.load(key) for key in "abcdef"]
    at.pool.slabs.release(block(entries[0]), entries[0].slot, 3, 0)
    assert at.pool.slabs.next_page(2) == block(entries[1]).page
    assert block(at.load("g")).page == block(entries[1]).page


def test_a_block_has_one_owner_and_a_stale_handle_opens_nothing() -> None:
    at = Slots()
    a, b = at.load("a"), at.load("b")
    slabs = at.pool.slabs
    refused = {
        "another slot's": (lambda: slabs.release(block(a), b.slot, 3, 0), ErrorCode.PAGE_OWNER),
        "another generation": (lambda: slabs.release(block(a), a.slot, 2, 0), ErrorCode.PAGE_OWNER),
        "a free block": (
            lambda: slabs.release(replace(block(a), index=3), a.slot, 3, 0),
            ErrorCode.PAGE_STATE,
        ),
        "not reserved": (lambda: slabs.cancel(block(a), 1, 0), ErrorCode.PAGE_STATE),
        "owned twice": (lambda: slabs.own(block(a), 1, 9, 1), ErrorCode.PAGE_STATE),
        "another slab": (
            lambda: slabs.release(replace(block(a), slab=9), a.slot, 3, 0),
            ErrorCode.PAGE_OWNER,
        ),
        "beyond the page": (
            lambda: slabs.release(replace(block(a), index=4), a.slot, 3, 0),
            ErrorCode.PAGE_OWNER,
        ),
        "no such class": (lambda: slabs.open(at.pool.reserve(1, 99), 99, 7), ErrorCode.PAGE_STATE),
    }
    for name, (use, code) in refused.items():
        with pytest.raises(LoraplexError) as caught:
            use()
        assert caught.value.code is code, name
    stale = block(a)
    for entry in (a, b):
        slabs.release(block(entry), entry.slot, 3, 0)
    again = at.load("c")
    reopened = replace(stale, page=block(again).page)
    with pytest.raises(InternalFault) as caught:  # the same page, a slab again: another serial number
        slabs.release(reopened, again.slot, 3, 0)
    assert caught.value.code is ErrorCode.PAGE_OWNER
    assert slabs.owned_by(block(again), again.slot, 3)
    assert not slabs.owned_by(reopened, again.slot, 3)


def test_a_copy_waits_for_the_launches_that_name_its_block_and_for_no_neighbours() -> None:
    at = Slots()
    a, b = at.load("a"), at.load("b")
    at.pool.slabs.release(block(b), b.slot, 3, 40)
    at.pool.slabs.name(BlockColumns.filled(1, page=block(a).page, size_class=2, block=1), 41)
    fresh = at.reserve(small("c"))
    assert fresh.adapter_fence == 0  # a block that nobody had, of the three free ones
    taken = [fresh] + [at.reserve(small(key)) for key in "de"]
    assert [t.adapter_fence for t in taken] == [0, 0, 41]
    taken[1].require_fence(0)
    with pytest.raises(InternalFault) as caught:
        taken[2].require_fence(40)
    assert caught.value.code is ErrorCode.PAGE_FENCE


def test_a_page_brings_its_fence_into_its_blocks_and_takes_theirs_out() -> None:
    at = Slots(pages=1)
    pages = at.pool.reserve(1, 90)
    at.pool.own(pages, 90, PageState.KV, 1, 1)
    at.pool.release(pages, PageState.KV, 1, 1, 12)
    a, b = at.load("a"), at.load("b")
    assert at.pool.slabs.fence_of(block(a)) == at.pool.slabs.fence_of(block(b)) == 12
    at.pool.name(pages, 13)  # a scrub of the page, put off by a plan that failed
    assert at.pool.slabs.fence_of(block(b)) == 13
    at.pool.slabs.release(block(a), a.slot, 3, 30)
    at.pool.slabs.release(block(b), b.slot, 3, 20)
    assert at.pool.fence_of(pages) == 30
    at.pool.slabs.name(
        BlockColumns.filled(1, page=pages[0], size_class=2, block=1), 31
    )  # a scrub of a block whose slab is gone
    assert at.pool.fence_of(pages) == 31


def retire(*entries: AdapterEntry) -> list[AdapterEntry]:
    for entry in entries:
        entry.move(AdapterState.RETIRING)
    return list(entries)


def test_a_failed_load_into_a_victims_block_leaves_the_neighbours_alone() -> None:
    at = Slots(pages=1)
    a, b, c, d = (at.load(key) for key in "abcd")
    keep = [block(e) for e in (b, c, d)]
    newcomer = small("e")
    load = at.reserve(newcomer, retire(a), adapter=0)
    assert (load.block, a.block) == (Block(keep[0].page, 2, 0, keep[0].slab), None)
    assert load.adapter_fence == 7
    (owed,) = load.rollback(7)
    at.pool.check()
    assert [block(e) for e in (b, c, d)] == keep
    assert all(at.pool.slabs.owned_by(block(e), e.slot, 3) for e in (b, c, d))
    again = Transaction.restoring(88, load, owed)
    assert (owed.entry, a.evicting) == (a, 0)
    a.move(AdapterState.HOST_READY)
    at.publish(a, again)
    assert block(a) == replace(keep[0], index=0)


def test_a_load_of_pages_takes_a_whole_slab_and_a_rollback_finds_each_victim_a_block() -> None:
    at = Slots(pages=2)
    a, b = at.load("a"), at.load("b")
    at.whole("w", 1)
    at.txn += 1
    load = Transaction.reserve(at.txn, at.pool, Demand(1, 0, 0, 0), victims=retire(a, b), last_launch=7)
    assert load is not None
    assert (load.adapter_pages.tolist(), at.pool.slabs.pages) == ([load.owed_slabs[0]], 0)
    assert at.pool.fence_of(load.adapter_pages) == 7
    owed = load.rollback(7)
    assert [place.entry for place in owed] == [a, b]
    assert at.pool.free == 1
    for number, place in enumerate(owed):
        again = Transaction.restoring(90 + number, load, place)
        place.entry.move(AdapterState.HOST_READY)
        at.publish(place.entry, again)
    assert block(a).page == block(b).page
    assert at.pool.counts().conserved


def test_kv_that_a_load_gives_back_does_not_give_a_victims_slab_away() -> None:
    at = Slots(pages=2)
    a = at.load("a")
    at.txn += 1
    load = Transaction.reserve(at.txn, at.pool, Demand(1, 1, 0, 0), victims=retire(a), last_launch=7)
    assert load is not None
    load.release_kv(7)
    assert at.pool.free == 0  # the page that was a's slab stays with the transaction
    (owed,) = load.rollback(7)
    assert at.pool.free == 2
    assert Transaction.restoring(90, load, owed).block is not None


def test_a_slab_cut_from_a_victims_page_is_shared_only_when_the_victim_is_gone() -> None:
    at = Slots(pages=1)
    big = at.whole("w", 1)
    page = big.pages.copy()
    load = at.reserve(small("a"), retire(big))
    assert not at.pool.slabs.has_free(2)
    assert at.pool.slabs.owners(int(page[0])) is None
    (owed,) = load.rollback(7)
    at.pool.check()
    assert owed.pages.tolist() == page.tolist()
    big.move(AdapterState.HOST_READY)
    at.publish(big, Transaction.restoring(70, load, owed))
    assert at.pool.owners(big.pages, PageState.ADAPTER, big.slot, 3)
    entry = small("b")
    at.publish(entry, at.reserve(entry, retire(big)))
    assert at.pool.slabs.has_free(2)
    assert block(at.load("c")).page == page[0]


def test_a_slab_cut_from_a_free_page_is_shared_at_once() -> None:
    at = Slots(pages=1)
    first, second = at.reserve(small("a")), at.reserve(small("b"))
    assert first.block is not None
    assert second.block is not None
    assert first.block.page == second.block.page
    assert first.rollback(3) == []
    assert at.pool.free == 0
    at.publish(small("b"), second)


def test_without_room_nothing_changes() -> None:
    at = Slots(pages=2)
    a = at.load("a")
    at.whole("w", 1)
    before = (at.pool.counts(), at.pool.slabs.counts(), block(a))
    for demand in (
        Demand(0, 1, 0, 0, 2),
        Demand(0, 0, 0, 0, 3),
        Demand(1, 0, 0, 0, 3),
        Demand(0, 0, 0, 1, 2),
    ):
        assert Transaction.reserve(50, at.pool, demand) is None
        assert (at.pool.counts(), at.pool.slabs.counts(), block(a)) == before
    at.pool.check()


def test_a_ledger_that_does_not_add_up_is_seen() -> None:
    def broken(change: str) -> None:
        at = Slots()
        a, b = at.load("a"), at.load("b")
        slab = at.pool.slabs._slabs[block(a).page]
        match change:
            case "emptied":
                slab.state[:] = 0
            case "forgotten":
                del at.pool.slabs._slabs[block(b).page]
            case "unlisted":
                at.pool.slabs._roomy[2].clear()
            case "another's":
                slab.serial += 1
        at.pool.check()

    for change in ("emptied", "forgotten", "unlisted", "another's"):
        with pytest.raises(InternalFault) as caught:
            broken(change)
        assert caught.value.code is ErrorCode.PAGE_CONSERVATION, change
