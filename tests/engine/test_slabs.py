"""Small adapters in slab pages through the whole control plane: hundreds in a few pages, and nobody's
neighbour is hurt.
"""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from tests.engine.rig import both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core.events import AdapterTransition, LoadFailed, PrefetchReleased
from loraplex.core.layout import KvShape, block_bytes
from loraplex.core.messages import Inspect, LoadAdapter, PinAdapter, RemoveAdapter, RevokeAdapter, SetLimits
from loraplex.core.packed import each
from loraplex.core.plan import BatchPlan
from loraplex.memory.residency import AdapterState
from loraplex.sim.device import CopyFate, VirtualDevice
from loraplex.telemetry.engine_metrics import EngineMetrics

TOKENS = 64
"""Positions of a page, so that it has blocks of every size class."""


class SlabRig(SlowRig):
    """Pages large enough for blocks of every class. beside: copies run beside compute, as on a stream of
    their own.
    """

    def __init__(self, *, beside: bool = False, **changes: object) -> None:
        kv = KvShape(2, 1, 1, 4, TOKENS)
        fields = {
            "pages": 7,
            "kv": kv,
            "page_tokens": TOKENS,
            "max_model_len": 64,
            "max_adapter_slots": 65,
        } | changes
        super().__init__(copies_on_compute_stream=not beside, **fields)
        if beside:
            self.device.copy_stream = True

    def small(self, key: str, size_class: int = 4) -> None:
        self.register(key, 1, size_class)

    def page_of(self, key: str) -> int:
        block = self.engine.state.adapters[key].block
        assert block is not None, key
        return block.page

    def retired(self) -> list[str]:
        moves = [event for event in self.log.events if isinstance(event, AdapterTransition)]
        return [event.adapter for event in moves if event.after is AdapterState.RETIRING]

    def figures(self) -> dict[str, dict[str, int]]:
        call = self.call(Inspect)
        self.step()
        return self.body(call)  # type: ignore[return-value]


@pytest.mark.parametrize(("depth", "beside"), [(0, False), (1, True)])
def test_hundreds_of_small_adapters_are_served_from_a_pool_of_six_pages(depth: int, beside: bool) -> None:
    """200 adapters, up to 64 of them at a time, in two slab pages beside KV: loaded, evicted, loaded
    again.
    """
    rig = SlabRig(depth=depth, beside=beside, max_requests=2, growth_horizon=0)
    rng = np.random.default_rng(7)
    for index in range(200):
        rig.small(f"a{index}", 5 + index % 2)
    most = 0
    for index, adapter in enumerate([*rng.permutation(200), *rng.permutation(200)[:60]]):
        rig.submit(f"r{index}", prompt(5, index), f"a{adapter}" if index % 5 else None, max_tokens=3)
        rig.step()
        most = max(most, len(rig.engine.state.occupied))
        assert rig.engine.state.adapter_pages == rig.engine.state.pool.slabs.pages <= 6
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert rig.figures()["loads"]["published"] > 160
    assert most > 40
    assert rig.engine.state.pool.usable == 6


@both_depths
def test_neighbours_run_while_blocks_beside_theirs_are_filled_and_freed(depth: int) -> None:
    """One adapter serves without a break; seven others come and go in the same page, swapped again
    and again.
    """
    rig = SlabRig(depth=depth, pages=4, max_adapter_slots=9, beside=True)
    rig.small("stays", 3)
    rig.submit("long", prompt(5, 1), "stays", max_tokens=50)
    rig.submit("base", prompt(5, 2), None, max_tokens=50)
    pages = set()
    for turn in range(40):
        key = f"b{turn}"
        rig.small(key, 3)
        rig.submit(f"r{turn}", prompt(5, turn), key, max_tokens=2)
        while f"r{turn}" not in rig.mailbox.ended:
            rig.step()
        if rig.engine.state.adapters[key].block is not None:
            pages.add(rig.page_of(key))
        rig.call(RemoveAdapter, key)
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert pages == {rig.page_of("stays")}
    assert rig.figures()["slabs"]["owned_blocks"] == 1


def test_plans_say_which_block_and_no_two_of_a_page_are_the_same() -> None:
    rig = SlabRig(depth=1)
    places: list[tuple[int, ...]] = []

    def watch(plan: BatchPlan, _: bytes) -> None:
        places.extend(each(plan.copy_pages, plan.copies.size_class, plan.copies.block))

    rig.device.on_plan = watch
    for index in range(16):
        rig.small(f"a{index}", 4)
        rig.submit(f"r{index}", prompt(5, index), f"a{index}", max_tokens=2)
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert sorted(places) == [(places[0][0], 4, index) for index in range(16)]


@both_depths
def test_a_torn_copy_into_a_victims_block_leaves_neighbours_and_restores_the_victim(depth: int) -> None:
    rig = SlabRig(depth=depth, pages=3, adapter_pages=1, growth_horizon=0)
    for key in ("a", "b", "c", "d"):
        rig.small(key, 2)
        rig.submit(f"warm {key}", prompt(5, 3), key, max_tokens=2)
    rig.run()
    before = {key: rig.engine.state.adapters[key].block for key in "bcd"}
    rig.submit("neighbour", prompt(5, 5), "b", max_tokens=30)
    rig.until("b", AdapterState.ACTIVE)
    rig.device.faults.fate = lambda _: (CopyFate.TORN, 1)
    rig.small("e", 2)
    rig.submit("newcomer", prompt(5, 6), "e", max_tokens=3)
    victims = rig.retired()
    assert victims == []
    while not any(isinstance(event, LoadFailed) for event in rig.log.events):
        rig.step()
    rig.device.faults.fate = None
    rig.run()
    rig.assert_answered("neighbour", "newcomer")
    moved = rig.retired()
    assert moved
    assert "b" not in moved
    assert rig.engine.state.adapters["b"].block == before["b"]
    assert rig.figures()["loads"]["restorations"] >= 1


@both_depths
def test_growth_takes_a_whole_slab_and_its_adapters_come_back(depth: int) -> None:
    """The base needs every page: all of a slab's adapters leave together, and are loaded again when they are
    asked for.
    """
    rig = SlabRig(depth=depth, pages=4, max_model_len=256)
    for key in ("a", "b", "c"):
        rig.small(key)
        rig.submit(f"warm {key}", prompt(5, 3), key, max_tokens=2)
    rig.run()
    assert rig.engine.state.pool.slabs.pages == 1
    rig.submit("long", prompt(60, 4), None, max_tokens=130)
    rig.run()
    assert all(rig.state_of(key) is AdapterState.HOST_READY for key in "abc")
    assert rig.engine.state.pool.slabs.pages == 0
    for key in ("a", "b", "c"):
        rig.submit(f"again {key}", prompt(5, 8), key, max_tokens=4)
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert len({rig.page_of(key) for key in "abc"}) == 1


def test_a_slab_with_a_neighbour_in_use_gives_no_page() -> None:
    rig = SlabRig(depth=0, pages=3, max_model_len=192)
    rig.small("idle")
    rig.small("pinned")
    rig.call(PinAdapter, "pinned", True)
    rig.submit("warm", prompt(5, 3), "idle", max_tokens=2)
    rig.run()
    assert rig.page_of("idle") == rig.page_of("pinned")
    rig.submit("long", prompt(60, 4), None, max_tokens=20)
    rig.run()
    (ended,) = rig.mailbox.ended["long"]
    assert ended.code == "pool_exhausted"  # two pages are needed, the pin holds one of the two that there are
    assert rig.state_of("idle") is AdapterState.IDLE
    rig.assert_answered("warm")
    rig.call(PinAdapter, "pinned", False)
    rig.submit("longer", prompt(60, 4), None, max_tokens=20)
    rig.run()
    rig.assert_answered("longer")


def test_pins_of_one_slab_cost_one_page_and_others_are_served_beside_them() -> None:
    """With one page for adapters: two pins in it, and a third adapter of their class still finds a block."""
    rig = SlabRig(depth=1, adapter_pages=1)
    for key in ("a", "b", "c", "other"):
        rig.small(key, 4 if key != "other" else 3)
    pins = [rig.call(PinAdapter, "a", True)]
    rig.until("a", AdapterState.PUBLISHED)
    rig.submit("warm", prompt(5, 1), "b", max_tokens=2)
    rig.run()
    pins.append(rig.call(PinAdapter, "b", True))
    rig.submit("beside", prompt(5, 2), "c", max_tokens=4)
    rig.submit("never", prompt(5, 3), "other", max_tokens=4)
    rig.run()
    assert [rig.code(pin) for pin in pins] == [None, None]
    rig.assert_answered("beside")
    (ended,) = rig.mailbox.ended["never"]
    assert ended.code == "pool_exhausted"  # another class needs a page of its own
    assert rig.figures()["pins"] == {"adapters": 2, "pages": 1}


def test_pins_that_are_not_loaded_yet_are_counted_as_packed() -> None:
    """After a restart every pin is asked for before one is on the device: 32 blocks of a sixteenth are two
    pages.
    """
    rig = SlabRig(depth=0, adapter_pages=2)
    keys = [f"a{index}" for index in range(33)]
    for key in keys:
        rig.small(key, 4)
    pins = [rig.call(PinAdapter, key, True) for key in keys]
    rig.submit("base", prompt(5, 1), None, max_tokens=3)
    rig.run()
    assert [rig.code(pin) for pin in pins] == [None] * 32 + ["pool_exhausted"]
    rig.assert_answered("base")
    assert rig.figures()["pins"] == {"adapters": 32, "pages": 2}
    assert all(rig.engine.state.adapters[key].block is not None for key in keys[:32])


def test_a_full_class_gives_its_oldest_block_before_a_page_is_evicted() -> None:
    rig = SlabRig(depth=0, pages=4, adapter_pages=2)
    rig.register("whole", 1)
    for key in ("a", "b", "c"):
        rig.small(key, 1)
    for key in ("whole", "a", "b", "c"):
        rig.submit(key, prompt(5, 1), key, max_tokens=2)
        rig.run()
    rig.assert_answered("whole", "a", "b", "c")
    assert [rig.state_of(key).value for key in ("whole", "a", "b", "c")] == [
        "idle",
        "host_ready",
        "idle",
        "idle",
    ]
    assert rig.page_of("b") == rig.page_of("c")


def test_limits_and_figures_count_slab_pages_and_bytes() -> None:
    rig = SlabRig(depth=0)
    for index in range(20):
        rig.small(f"a{index}", 4)
    rig.run()
    page_bytes = rig.limits.kv.page_bytes
    figures = rig.figures()
    assert (figures["pages"]["adapter"], figures["slabs"]["pages"]) == (2, 2)
    assert sum(figures["pages"][name] for name in ("free", "reserved", "adapter", "kv")) == 6
    assert figures["slabs"]["owned_bytes"] == 20 * page_bytes // 16
    assert figures["host"]["used_bytes"] == 20 * page_bytes // 16
    (one,) = [entry for entry in figures["adapters"] if entry["key"] == "a3"]  # type: ignore[index]
    assert (one["device_bytes"], one["device_pages"], one["size_class"]) == (page_bytes // 16, 0, 4)  # type: ignore[index]
    call = rig.call(SetLimits, adapter_pages=1)
    rig.run()
    assert rig.body(call)["adapter_pages_over"] == 0
    assert rig.engine.state.adapter_pages == 1
    call = rig.call(SetLimits, resident_adapters=3)
    rig.run()
    assert rig.body(call)["resident_adapters_over"] == 0
    assert len(rig.engine.state.occupied) == 3
    call = rig.call(SetLimits, adapter_pages=0)
    rig.run()
    assert rig.engine.state.pool.free == rig.engine.state.pool.usable


def test_a_shadow_load_a_removal_and_a_revocation_of_neighbours() -> None:
    rig = SlabRig(depth=1)
    for key in ("old", "new", "bad"):
        rig.small(key)
    for key in ("old", "bad"):
        rig.submit(key, prompt(5, 1), key, max_tokens=40)
    rig.until("bad", AdapterState.ACTIVE)
    shadow = rig.call(LoadAdapter, "new", "old")
    rig.until("new", AdapterState.PUBLISHED)
    rig.call(RemoveAdapter, "old")
    rig.call(RevokeAdapter, "bad")
    rig.submit("after", prompt(5, 2), "new", max_tokens=4)
    rig.run()
    assert rig.code(shadow) is None
    rig.assert_answered("old", "after")
    assert rig.mailbox.ended["bad"][0].code == "adapter_revoked"
    assert set(rig.engine.state.adapters) == {"new"}
    assert rig.figures()["slabs"]["owned_blocks"] == 1


def test_a_plan_that_fails_gives_its_block_copies_and_scrubs_back() -> None:
    """The device fails plans that carry copies and scrubs; what they carried comes again and nothing is
    filled twice.
    """
    rig = SlabRig(depth=1, pages=4, max_adapter_slots=5)
    rig.device.faults.fail_plans = set(range(3, 60, 4))
    for index in range(24):
        rig.small(f"a{index}", 2)
        rig.submit(f"r{index}", prompt(5, index), f"a{index}", max_tokens=3)
        rig.step()
    rig.device.faults.fail_plans = set()
    rig.run()
    served = [name for name in rig.prompts if rig.mailbox.ended[name][0].code is None]
    rig.assert_answered(*served)
    assert len(served) > 10
    assert isinstance(rig.device, VirtualDevice)


def test_what_is_told_of_a_small_adapter_is_its_block_and_no_page() -> None:
    rig = SlabRig()
    rig.small("small")
    rig.register("whole", 2)
    rig.run()
    make_cold(rig, "small", "whole")
    page_bytes = rig.limits.kv.page_bytes
    block = block_bytes(page_bytes, 4)
    assert 0 < block < page_bytes
    sizes = {"small": (0, block), "whole": (2, 2 * page_bytes)}
    moved = [e for e in rig.log.events if isinstance(e, AdapterTransition)]
    assert {(e.adapter, e.pages, e.nbytes) for e in moved} == {(key, *size) for key, size in sizes.items()}
    released = [e for e in rig.log.events if isinstance(e, PrefetchReleased)]
    assert {e.adapter: (e.pages, e.nbytes) for e in released if not e.used} == sizes
    wasted = rig.figures()["prefetch"]
    assert (wasted["wasted_pages"], wasted["wasted_bytes"]) == (2, block + 2 * page_bytes)
    registry = CollectorRegistry()
    EngineMetrics(registry).observe(rig.log.events, 0)
    assert registry.get_sample_value("loraplex_prefetch_wasted_pages_total") == 2
    assert registry.get_sample_value("loraplex_prefetch_wasted_bytes_total") == block + 2 * page_bytes
