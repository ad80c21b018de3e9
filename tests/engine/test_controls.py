"""What operators ask of residency while requests run: pins, shadow loads, prefetch, limits."""

from __future__ import annotations

from tests.engine.rig import both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core.events import (
    PrefetchReleased,
)
from loraplex.core.messages import (
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    SetLimits,
)
from loraplex.memory.residency import AdapterState


@both_depths
def test_pins_hold_and_what_they_make_impossible_is_refused(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=17)
    for key, pages in (("a", 6), ("b", 6), ("c", 6)):
        rig.register(key, pages)
    rig.run()
    first = rig.call(PinAdapter, "a", True)
    second = rig.call(PinAdapter, "b", True)
    third = rig.call(PinAdapter, "c", True)
    rig.run()
    assert rig.body(first)["pinned"] is True
    assert rig.body(second)["pinned"] is True
    assert rig.code(third) == "pool_exhausted"
    assert {rig.state_of("a"), rig.state_of("b")} <= {AdapterState.PUBLISHED, AdapterState.IDLE}
    rig.submit("cannot", prompt(4, 1), "c")
    rig.submit("can", prompt(4, 1), "a", max_tokens=4)
    rig.submit("never", prompt(60, 1), "c", max_tokens=4)
    rig.run()
    assert rig.mailbox.ended["cannot"][0].code == "pool_exhausted"  # 429: unpinning helps
    assert rig.mailbox.ended["never"][0].code == "request_exceeds_pool"  # 400: nothing helps
    rig.assert_answered("can")
    rig.call(PinAdapter, "a", False)
    rig.submit("now", prompt(4, 1), "c", max_tokens=4)
    rig.run()
    rig.assert_answered("now")
    assert rig.state_of("b") in (AdapterState.PUBLISHED, AdapterState.IDLE)
    surplus = rig.call(PinAdapter, "a", False)
    rig.run()
    assert rig.code(surplus) == "lease_underflow"


@both_depths
def test_a_pin_that_would_end_requests_under_way_is_refused(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=13)
    rig.register("a", 6)
    rig.register("b", 6)
    rig.run()
    rig.submit("long", prompt(8, 1), max_tokens=30)
    for _ in range(5):
        rig.step()
    rig.submit("waits", prompt(20, 2), "b", max_tokens=4)
    rig.step()
    refused = rig.call(PinAdapter, "a", True)
    rig.run()
    rig.assert_answered("long", "waits")
    assert rig.code(refused) == "pool_exhausted"


@both_depths
def test_a_shadow_load_evicts_or_is_refused_with_the_shortfall(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=13)
    rig.register("idle", 5)
    rig.register("old", 6)
    rig.register("new", 6)
    rig.run()
    rig.submit("r", prompt(4, 1), "old", max_tokens=12)
    rig.until("old", AdapterState.ACTIVE)
    call = rig.call(LoadAdapter, "new")
    for _ in range(8):
        rig.step()
    assert rig.code(call) == "pool_exhausted"
    assert "are missing" in rig.mailbox.replies[call].message
    rig.run()
    rig.assert_answered("r")
    again = rig.call(LoadAdapter, "new")
    rig.run()
    assert rig.body(again)["state"] == "published"


@both_depths
def test_a_prefetch_takes_only_what_no_admitted_request_will_want(depth: int) -> None:
    """0x09J: eight pages are free, the running request's growth is promised some of them."""
    rig = SlowRig(depth=depth, pages=14, growth_horizon=32)
    rig.register("a", 4)
    rig.register("b", 9)
    rig.run()
    make_cold(rig, "a", "b")
    rig.submit("grows", prompt(4, 1), max_tokens=32)
    for _ in range(3):
        rig.step()
    refused = rig.call(PrefetchAdapter, "b")
    fits = rig.call(PrefetchAdapter, "a")
    for _ in range(6):
        rig.step()
    assert rig.code(refused) == "pool_exhausted"
    taken = rig.engine.state.adapters["a"].state
    assert (rig.code(fits) == "pool_exhausted") == (taken is AdapterState.HOST_READY)
    rig.run()
    rig.assert_answered("grows")
    assert rig.engine.state.preemptions == 0
    used = rig.call(PrefetchAdapter, "a")
    rig.run()
    assert rig.body(used)["state"] == "published"
    rig.submit("r", prompt(4, 2), "a", max_tokens=2)
    rig.run()
    released = [e for e in rig.log.events if isinstance(e, PrefetchReleased) and e.used]
    assert [e.adapter for e in released][-1] == "a"
    assert (released[-1].pages, released[-1].nbytes) == (4, 4 * rig.limits.kv.page_bytes)


@both_depths
def test_adapters_of_waiting_requests_are_loaded_ahead(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=65, max_requests=1)
    for key in "abc":
        rig.register(key)
    rig.run()
    make_cold(rig, "a", "b", "c")
    for index, key in enumerate("abc"):
        rig.submit(key, prompt(5, index), key, max_tokens=20)
    for _ in range(12):
        rig.step()
    assert rig.state_of("a") is AdapterState.ACTIVE
    assert {rig.state_of("b"), rig.state_of("c")} == {AdapterState.PUBLISHED}
    rig.run()
    rig.assert_answered(*"abc")


@both_depths
def test_limits_change_while_requests_run(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=65)
    for key in "abcd":
        rig.register(key, 4)
    rig.run()
    rig.submit("r", prompt(5, 1), "a", max_tokens=20)
    rig.until("a", AdapterState.ACTIVE)
    lowered = rig.call(SetLimits, adapter_pages=0, resident_adapters=0, host_bytes=0)
    rig.step()
    body = rig.body(lowered)
    assert (body["adapter_pages_over"], body["resident_adapters_over"]) == (4, 1)
    assert rig.state_of("b") is AdapterState.ABSENT
    rig.submit("refused", prompt(5, 1), "b")
    rig.run()
    rig.assert_answered("r")
    assert rig.mailbox.ended["refused"][0].code == "pool_exhausted"
    rig.step()
    assert rig.free == rig.engine.state.pool.usable
    assert rig.engine.state.host.used_bytes == 0
    rig.call(SetLimits, adapter_pages=8, resident_adapters=2, host_bytes=1 << 30)
    for key in "abcd":
        rig.submit(key, prompt(5, 3), key)
    rig.run()
    rig.assert_answered(*"abcd")
    assert len(rig.engine.state.occupied) <= 2
    wrong = [
        rig.call(SetLimits, **{name: -1}) for name in ("adapter_pages", "resident_adapters", "host_bytes")
    ]
    wrong.append(rig.call(SetLimits, adapter_pages=10**6))
    rig.run()
    assert {rig.code(call) for call in wrong} == {"config_invalid"}
