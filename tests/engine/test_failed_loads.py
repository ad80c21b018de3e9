"""Loads and fetches that fail: tried again, rolled back, told to those who wait."""

from __future__ import annotations

from tests.engine.rig import both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core import limits
from loraplex.core.events import (
    AdapterTransition,
    LoadFailed,
    RestorationFailed,
)
from loraplex.core.messages import (
    LoadAdapter,
)
from loraplex.memory.residency import AdapterState


@both_depths
def test_a_failed_load_is_tried_again_with_the_same_place_in_the_queue(depth: int) -> None:
    """0x09L: pages return before the retry, a new transaction and generation serve it, arrival never
    moves.
    """
    rig = SlowRig(depth=depth)
    rig.register("a")
    rig.run()
    make_cold(rig, "a")
    rig.device.held = True
    rig.submit("r", prompt(5, 1), "a")
    rig.until("a", AdapterState.LOADING)
    rig.step()
    rig.step()
    record = rig.engine.state.records["r"]
    arrival, ticket = record.arrival_ns, record.ticket
    slot, generation, _ = rig.device.ended.pop()
    rig.device.extra = [[slot, generation, 0]]
    rig.until("a", AdapterState.HOST_READY)
    assert rig.free == rig.engine.state.pool.usable
    rig.device.held = False
    rig.run()
    rig.assert_answered("r")
    assert (record.arrival_ns, record.ticket, record.load_failures) == (arrival, ticket, 1)
    failed = [e for e in rig.log.events if isinstance(e, LoadFailed)]
    assert [(e.purpose, e.code, e.attempt, e.final) for e in failed] == [
        ("admission", "copy_checksum", 1, False)
    ]
    assert rig.engine.state.adapters["a"].generation > generation


@both_depths
def test_after_the_last_attempt_those_who_wait_hear_of_it_and_later_ones_are_served(depth: int) -> None:
    from loraplex.engine.deltas import digest_words
    from loraplex.sim.tokens import adapter_number

    rig = SlowRig(depth=depth)
    rig.register("bad")
    rig.register("good")
    rig.run()
    make_cold(rig, "bad", "good")
    number = adapter_number(digest_words(rig.kernel_digest("bad")))
    rig.faults.torn_copies.add(number)
    for name in ("r1", "r2", "r3"):
        rig.submit(name, prompt(5, 1), "bad")
    rig.submit("s", prompt(5, 2), "good")
    rig.run()
    assert {rig.mailbox.ended[f"r{i}"][0].code for i in (1, 2, 3)} == {"adapter_load_failed"}
    rig.assert_answered("s")
    attempts = [e for e in rig.log.events if isinstance(e, LoadFailed)]
    assert [e.attempt for e in attempts] == list(range(1, limits.MAX_LOAD_ATTEMPTS + 1))
    rig.faults.torn_copies.clear()
    rig.submit("again", prompt(5, 1), "bad")
    rig.run()
    rig.assert_answered("again")


@both_depths
def test_victims_come_back_under_a_fresh_generation_when_the_load_fails(depth: int) -> None:
    """0x05F through the engine: the copy that evicted them failed."""
    rig = SlowRig(depth=depth, pages=9, growth_horizon=0)
    rig.register("b", pages=4)
    rig.register("c", pages=6)
    rig.run()
    if rig.state_of("b") is AdapterState.HOST_READY:
        rig.call(LoadAdapter, "b")
        rig.run()
    old = rig.engine.state.adapters["b"].generation
    rig.device.held = True
    rig.submit("r", prompt(4, 1), "c", max_tokens=1)
    rig.until("c", AdapterState.LOADING)
    rig.step()
    rig.step()
    assert rig.state_of("b") is AdapterState.RETIRING
    rig.submit("late", prompt(4, 2), "b", max_tokens=1)  # waits: its pages may be overwritten
    rig.step()
    slot, generation, _ = rig.device.ended.pop()
    rig.device.extra = [[slot, generation, 0]]
    rig.device.held = False
    rig.run()
    rig.assert_answered("r", "late")
    assert rig.engine.state.traffic.restorations == 1
    moves = [e for e in rig.log.events if isinstance(e, AdapterTransition) and e.adapter == "b"]
    published = [e.generation for e in moves if e.after == "published"]
    assert published[0] == old
    assert len(set(published)) == len(published) >= 2


@both_depths
def test_a_failed_restoration_leaves_the_victim_absent_and_pages_conserved(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=9, growth_horizon=0)
    rig.register("b", pages=4)
    rig.run()
    rig.register("c", pages=6)
    rig.run()
    rig.device.held = True
    rig.submit("r", prompt(4, 1), "c", max_tokens=1)
    rig.until("c", AdapterState.LOADING)
    for _ in range(2):  # the copy of c, then the restoration of b
        while not rig.device.ended:
            rig.step()
        slot, generation, _ = rig.device.ended.pop()
        rig.device.extra = [[slot, generation, 0]]
        rig.step()
        rig.step()
    rig.device.held = False
    rig.run()
    rig.assert_answered("r")
    failed = [e for e in rig.log.events if isinstance(e, RestorationFailed)]
    page_bytes = rig.limits.kv.page_bytes
    assert [(e.adapter, e.pages, e.nbytes) for e in failed] == [("b", 4, 4 * page_bytes)]
    assert rig.state_of("b") is AdapterState.HOST_READY
    assert rig.free == rig.engine.state.pool.usable - 6


@both_depths
def test_an_absent_adapter_is_fetched_and_a_fetch_that_fails_is_tried_again(depth: int) -> None:
    rig = SlowRig(depth=depth)
    digest = rig.kernel_digest("a")
    rig.loader.fail[digest] = "adapter_load_failed"
    call = rig.register("a")
    for _ in range(3):
        rig.step()
    rig.loader.fail.clear()
    rig.run()
    assert rig.body(call)["state"] == "published"
    assert rig.loader.asked == [digest, digest]
    rig.loader.fail[rig.kernel_digest("b")] = "adapter_load_failed"
    refused = rig.register("b")
    rig.run()
    assert rig.code(refused) == "adapter_load_failed"
    assert "b" not in rig.engine.state.adapters
    assert rig.loader.asked.count(rig.kernel_digest("b")) == limits.MAX_LOAD_ATTEMPTS
