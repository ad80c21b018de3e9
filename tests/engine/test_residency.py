"""Residency through the whole control plane: loads, failures, pins, prefetch, swaps, limits; every state cancelled in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.engine.rig import VOCAB, Rig

from loraplex.core import limits
from loraplex.core.events import (
    AdapterTransition,
    CopyIgnored,
    LoadFailed,
    PrefetchReleased,
    RestorationFailed,
)
from loraplex.core.messages import (
    Abort,
    EngineCall,
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    RemoveAdapter,
    RevokeAdapter,
    SetLimits,
)
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.core.ports import Fetched
from loraplex.engine.step import Engine
from loraplex.memory.residency import AdapterState
from loraplex.sim.device import VirtualDevice

both_depths = pytest.mark.parametrize("depth", [0, 1])


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


class SlowDevice(VirtualDevice):
    """Copies end when told to, in the result of a later plan. held: while true, none ends. torn: slots that fail."""

    held = False
    torn: frozenset[int] = frozenset()

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.ended: list[list[int]] = []
        self.extra: list[list[int]] = []

    def collect(self) -> bytes:
        result = StepResult.unpack(super().collect())
        self.ended += result.copied.tolist()
        if result.error.size:
            return result.pack()
        out = self.extra + ([] if self.held else self.ended)
        self.extra = []
        if not self.held:
            self.ended = []
        fields = {name: getattr(result, name) for name in result.__slots__}
        rows = np.array(out, dtype=np.int32).reshape(-1, 3)
        return StepResult(**{**fields, "copied": rows}).pack()


class SlowLoader:
    """Fetches end when told to. fail: digests whose fetch fails. asked, dropped: everything that the engine did."""

    def __init__(self) -> None:
        self.held = False
        self.fail: dict[str, str] = {}
        self.asked: list[str] = []
        self.dropped: list[str] = []
        self.open: list[str] = []

    def fetch(self, kernel_digest: str) -> None:
        self.asked.append(kernel_digest)
        self.open.append(kernel_digest)

    def drop(self, kernel_digest: str) -> None:
        self.dropped.append(kernel_digest)

    def poll(self, wait: bool) -> Sequence[Fetched]:
        if self.held:
            return []
        ended, self.open = self.open, []
        return [Fetched(d, self.fail.get(d), "injected" if d in self.fail else "") for d in ended]


class SlowRig(Rig):
    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)  # type: ignore[arg-type]
        self.device = SlowDevice(self.limits.bounds, self.limits.kv.page_tokens, self.faults)
        self.loader = SlowLoader()
        self.engine = Engine(self.limits, self.device, self.mailbox, self.clock, self.log, loader=self.loader)

    def call(self, message: type[EngineCall], *args: object, **more: object) -> int:
        self.calls += 1
        self.mailbox.inbox.append(message(self.calls, *args, **more))  # type: ignore[arg-type, call-arg]
        return self.calls

    def state_of(self, key: str) -> AdapterState:
        return self.engine.state.adapters[key].state

    def until(self, key: str, state: AdapterState) -> None:
        for _ in range(200):
            if key in self.engine.state.adapters and self.state_of(key) is state:
                return
            self.step()
        raise AssertionError(f"{key} never was {state}")

    def body(self, call: int) -> dict[str, object]:
        reply = self.mailbox.replies[call]
        assert reply.code is None, reply
        return reply.body

    def code(self, call: int) -> str | None:
        return self.mailbox.replies[call].code

    @property
    def free(self) -> int:
        return self.engine.state.pool.counts().free


@both_depths
def test_a_copy_held_open_for_a_thousand_steps_holds_nobody_up(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=400, max_model_len=1200, token_budget=64)
    rig.device.held = True
    rig.register("cold")
    rig.submit("runs", prompt(1, 5), max_tokens=1000)
    rig.submit("waits", prompt(2, 5), "cold")
    for _ in range(4):
        rig.step()
    before = len(rig.mailbox.tokens["runs"])
    for step in range(1, 901):
        rig.step()
        assert len(rig.mailbox.tokens["runs"]) == before + step
    assert "waits" not in rig.mailbox.tokens
    rig.device.held = False
    rig.run()
    rig.assert_answered("runs", "waits")


@both_depths
def test_rowless_plans_ask_for_copies_when_nothing_runs(depth: int) -> None:
    rig = SlowRig(depth=depth)
    rig.device.held = True
    call = rig.register("a")
    for _ in range(20):
        rig.step()
    assert call not in rig.mailbox.replies
    launched = rig.engine.state.launched
    rig.step()
    assert rig.engine.state.launched > launched
    rig.device.held = False
    rig.run()
    assert rig.body(call)["state"] == "published"


@both_depths
def test_a_reported_copy_that_is_not_under_way_changes_nothing(depth: int) -> None:
    rig = SlowRig(depth=depth)
    rig.register("a")
    rig.run()
    slot, generation = 1, rig.engine.state.adapters["a"].generation
    rig.device.extra = [[slot, generation, 1], [slot, generation + 5, 0], [3, 1, 1]]
    rig.submit("r", prompt(1, 5), "a")
    rig.run()
    rig.assert_answered("r")
    assert len([e for e in rig.log.events if isinstance(e, CopyIgnored)]) == 3


@both_depths
def test_a_failed_load_is_tried_again_with_the_same_place_in_the_queue(depth: int) -> None:
    """0x09L: pages return before the retry, a new transaction and generation serve it, arrival never moves."""
    rig = SlowRig(depth=depth)
    rig.register("a")
    rig.run()
    _make_cold(rig, "a")
    rig.device.held = True
    rig.submit("r", prompt(1, 5), "a")
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
    assert (record.arrival_ns, record.ticket, record.load_attempts) == (arrival, ticket, 1)
    failed = [e for e in rig.log.events if isinstance(e, LoadFailed)]
    assert [(e.purpose, e.code, e.attempt, e.final) for e in failed] == [
        ("admission", "copy_checksum", 1, False)
    ]
    assert rig.engine.state.adapters["a"].generation > generation


def _make_cold(rig: SlowRig, *keys: str) -> None:
    """Push adapters off the device by a lowered limit, which is raised again."""
    pages = rig.engine.state.caps.adapter_pages
    rig.call(SetLimits, adapter_pages=0)
    rig.run()
    rig.call(SetLimits, adapter_pages=pages)
    rig.run()
    for key in keys:
        assert rig.state_of(key) is AdapterState.HOST_READY


@both_depths
def test_after_the_last_attempt_those_who_wait_hear_of_it_and_later_ones_are_served(depth: int) -> None:
    from loraplex.engine.deltas import digest_words
    from loraplex.sim.tokens import adapter_number

    rig = SlowRig(depth=depth)
    rig.register("bad")
    rig.register("good")
    rig.run()
    _make_cold(rig, "bad", "good")
    number = adapter_number(digest_words(rig.kernel_digest("bad")))
    rig.faults.torn_copies.add(number)
    for name in ("r1", "r2", "r3"):
        rig.submit(name, prompt(1, 5), "bad")
    rig.submit("s", prompt(2, 5), "good")
    rig.run()
    assert {rig.mailbox.ended[f"r{i}"][0].code for i in (1, 2, 3)} == {"adapter_load_failed"}
    rig.assert_answered("s")
    attempts = [e for e in rig.log.events if isinstance(e, LoadFailed)]
    assert [e.attempt for e in attempts] == list(range(1, limits.MAX_LOAD_ATTEMPTS + 1))
    rig.faults.torn_copies.clear()
    rig.submit("again", prompt(1, 5), "bad")
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
    rig.submit("r", prompt(1, 4), "c", max_tokens=1)
    rig.until("c", AdapterState.LOADING)
    rig.step()
    rig.step()
    assert rig.state_of("b") is AdapterState.RETIRING
    rig.submit("late", prompt(2, 4), "b", max_tokens=1)  # waits: its pages may be overwritten
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
    rig.submit("r", prompt(1, 4), "c", max_tokens=1)
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
    assert [(e.adapter, e.pages) for e in failed] == [("b", 4)]
    assert rig.state_of("b") is AdapterState.HOST_READY
    assert rig.free == rig.engine.state.pool.usable - 6


@both_depths
@pytest.mark.parametrize("when", ["absent", "reserved", "loading", "active"])
def test_a_request_cancelled_in_any_state_of_its_load_leaves_nothing(depth: int, when: str) -> None:
    rig = SlowRig(depth=depth, pages=65)
    others = [f"o{index}" for index in range(limits.MAX_COPIES_IN_FLIGHT if when == "reserved" else 0)]
    for key in ("a", *others):
        rig.register(key)
    rig.run()
    _make_cold(rig, "a", *others)
    rig.engine.state.host.limit_bytes = 0  # the host image goes too
    rig.step()
    rig.engine.state.host.limit_bytes = 1 << 40
    assert rig.state_of("a") is AdapterState.ABSENT
    rig.loader.held = when == "absent"
    rig.device.held = when in ("reserved", "loading")
    for key in others:  # as many copies as a backend is given: the next one waits for its turn
        rig.submit(key, prompt(1, 5), key)
    rig.submit("r", prompt(1, 5), "a", max_tokens=30)
    if when == "absent":
        for _ in range(5):
            rig.step()
    else:
        rig.until("a", AdapterState(when))
    rig.mailbox.inbox.append(Abort("r"))
    rig.step()
    assert rig.mailbox.ended["r"][0].code == "aborted"
    rig.loader.held = rig.device.held = False
    rig.run()
    resident = sum(int(entry.pages.size) for entry in rig.engine.state.adapters.values())
    assert rig.free + resident == rig.engine.state.pool.usable
    rig.submit("next", prompt(3, 5), "a")
    rig.run()
    rig.assert_answered("next")


@both_depths
@pytest.mark.parametrize(("starts", "in_flight"), [(1, 4), (3, 4), (8, 2)])
def test_a_step_with_rows_starts_so_many_copies(depth: int, starts: int, in_flight: int) -> None:
    keys = [f"k{index}" for index in range(5)]
    rig = SlowRig(depth=depth, pages=120, copy_starts=starts, copies_in_flight=in_flight)
    for key in keys:
        rig.register(key)
    rig.run()
    _make_cold(rig, *keys)
    rig.submit("running", prompt(9, 5), max_tokens=40)
    while not rig.mailbox.tokens.get("running"):
        rig.step()
    rig.device.held = True
    for index, key in enumerate(keys):
        rig.submit(f"r{index}", prompt(index, 5), key)
    started = []
    for _ in range(6):
        rig.step()
        started.append(sum(job.started for job in rig.engine.state.loads.values()))
    assert started[-1] == in_flight
    assert max(np.diff([0, *started])) == min(starts, in_flight)
    rig.device.held = False
    rig.run()
    for index in range(len(keys)):
        rig.assert_answered(f"r{index}")


@both_depths
@pytest.mark.parametrize("when", ["absent", "loading", "active"])
@pytest.mark.parametrize("how", [RemoveAdapter, RevokeAdapter])
def test_removal_and_revocation_in_any_state(depth: int, when: str, how: type[EngineCall]) -> None:
    rig = SlowRig(depth=depth)
    rig.loader.held = when == "absent"
    rig.device.held = when == "loading"
    rig.register("a")
    rig.submit("r", prompt(1, 5), "a", max_tokens=12)
    for _ in range(6):
        rig.step()
    call = rig.call(how, "a")
    rig.submit("refused", prompt(2, 5), "a")
    rig.step()
    assert rig.mailbox.ended["refused"][0].code == "adapter_not_found"
    rig.loader.held = rig.device.held = False
    rig.run()
    if how is RevokeAdapter:
        assert rig.mailbox.ended["r"][0].code == "adapter_revoked"
    elif when == "active":
        rig.assert_answered("r")
    assert rig.body(call)["state"] == "absent"
    assert rig.free == rig.engine.state.pool.usable
    assert not len(rig.engine.state.host)


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


@both_depths
def test_the_host_tier_is_bounded_and_every_request_is_served(depth: int) -> None:
    """Twelve adapters, room for five images in host memory and four on the device."""
    page_bytes = 4 * 2 * 4
    rig = SlowRig(depth=depth, pages=20, host_bytes=5 * 3 * page_bytes)
    for index in range(12):
        rig.register(f"a{index}", pages=3)
    rig.run()
    for index in range(36):
        rig.submit(f"r{index}", prompt(index, 5), f"a{(index * 5) % 12}", max_tokens=4)
        rig.step()
        host = rig.engine.state.host
        host.check()
        assert host.used_bytes <= host.limit_bytes
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert rig.engine.state.host.evictions > 0


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
    rig.submit("cannot", prompt(1, 4), "c")
    rig.submit("can", prompt(1, 4), "a", max_tokens=4)
    rig.submit("never", prompt(1, 60), "c", max_tokens=4)
    rig.run()
    assert rig.mailbox.ended["cannot"][0].code == "pool_exhausted"  # 429: unpinning helps
    assert rig.mailbox.ended["never"][0].code == "request_exceeds_pool"  # 400: nothing helps
    rig.assert_answered("can")
    rig.call(PinAdapter, "a", False)
    rig.submit("now", prompt(1, 4), "c", max_tokens=4)
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
    rig.submit("long", prompt(1, 8), max_tokens=30)
    for _ in range(5):
        rig.step()
    rig.submit("waits", prompt(2, 20), "b", max_tokens=4)
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
    rig.submit("r", prompt(1, 4), "old", max_tokens=12)
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
    _make_cold(rig, "a", "b")
    rig.submit("grows", prompt(1, 4), max_tokens=32)
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
    rig.submit("r", prompt(2, 4), "a", max_tokens=2)
    rig.run()
    released = [e for e in rig.log.events if isinstance(e, PrefetchReleased) and e.used]
    assert [e.adapter for e in released][-1] == "a"


@both_depths
def test_adapters_of_waiting_requests_are_loaded_ahead(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=65, max_requests=1)
    for key in "abc":
        rig.register(key)
    rig.run()
    _make_cold(rig, "a", "b", "c")
    for index, key in enumerate("abc"):
        rig.submit(key, prompt(index, 5), key, max_tokens=20)
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
    rig.submit("r", prompt(1, 5), "a", max_tokens=20)
    rig.until("a", AdapterState.ACTIVE)
    lowered = rig.call(SetLimits, adapter_pages=0, resident_adapters=0, host_bytes=0)
    rig.step()
    body = rig.body(lowered)
    assert (body["adapter_pages_over"], body["resident_adapters_over"]) == (4, 1)
    assert rig.state_of("b") is AdapterState.ABSENT
    rig.submit("refused", prompt(1, 5), "b")
    rig.run()
    rig.assert_answered("r")
    assert rig.mailbox.ended["refused"][0].code == "pool_exhausted"
    rig.step()
    assert rig.free == rig.engine.state.pool.usable
    assert rig.engine.state.host.used_bytes == 0
    rig.call(SetLimits, adapter_pages=8, resident_adapters=2, host_bytes=1 << 30)
    for key in "abcd":
        rig.submit(key, prompt(3, 5), key)
    rig.run()
    rig.assert_answered(*"abcd")
    assert len(rig.engine.state.occupied) <= 2
    wrong = [
        rig.call(SetLimits, **{name: -1}) for name in ("adapter_pages", "resident_adapters", "host_bytes")
    ]
    wrong.append(rig.call(SetLimits, adapter_pages=10**6))
    rig.run()
    assert {rig.code(call) for call in wrong} == {"config_invalid"}


@both_depths
@pytest.mark.parametrize("seed", range(8))
def test_random_calls_copies_and_faults_end_in_balance(depth: int, seed: int) -> None:
    """Everything at once, copies and fetches late, torn and refused: each request ends once, right, and nothing stays."""
    rng = np.random.default_rng(seed)
    page_bytes = 4 * 2 * 4
    rig = SlowRig(depth=depth, pages=26, host_bytes=int(rng.integers(9, 40)) * page_bytes)
    keys = [f"a{i}" for i in range(8)]
    for key in keys:
        rig.register(key, pages=int(rng.integers(1, 6)))
    allowed = {
        "aborted",
        "adapter_load_failed",
        "pool_exhausted",
        "adapter_not_found",
        "host_memory_exhausted",
    }
    pinned: list[str] = []
    for index in range(80):
        key = keys[int(rng.zipf(1.4)) % len(keys)]
        rig.submit(
            f"r{index}", prompt(seed * 100 + index, int(rng.integers(1, 16))), key if rng.random() < 0.8 else None,
            max_tokens=int(rng.integers(1, 16)),
        )  # fmt: skip
        match int(rng.integers(0, 9)):
            case 0:
                rig.device.held = not rig.device.held
            case 1:
                rig.loader.held = not rig.loader.held
            case 2 if rig.device.ended:
                slot, generation, _ = rig.device.ended.pop(0)
                rig.device.extra.append([slot, generation, 0])
            case 3:
                rig.mailbox.inbox.append(Abort(f"r{int(rng.integers(0, index + 1))}"))
            case 4 if len(pinned) < 2:
                pinned.append(key)
                rig.call(PinAdapter, key, True)
            case 5 if pinned:
                rig.call(PinAdapter, pinned.pop(), False)
            case 6:
                rig.call(PrefetchAdapter if rng.random() < 0.5 else LoadAdapter, key)
            case 7:
                rig.loader.fail = (
                    {rig.kernel_digest(key): "adapter_load_failed"} if rng.random() < 0.5 else {}
                )
            case 8:
                rig.call(SetLimits, adapter_pages=int(rng.integers(10, 26)))
        for _ in range(int(rng.integers(0, 5))):
            rig.step()
    rig.device.held = rig.loader.held = False
    rig.loader.fail = {}
    rig.run()
    for name in rig.prompts:
        (ended,) = rig.mailbox.ended[name]
        if ended.code is None:
            rig.assert_answered(name)
        else:
            assert ended.code in allowed, ended
    for key in list(rig.engine.state.adapters):
        rig.call(RemoveAdapter, key)
    rig.run()
    assert rig.free == rig.engine.state.pool.usable
    assert not len(rig.engine.state.host)


def test_plans_carry_copies_only_past_their_fence() -> None:
    """No launch that is not committed names a page that a copy overwrites (0x04F for both classes)."""
    rig = SlowRig(depth=1, pages=13)
    for index in range(6):
        rig.register(f"a{index}", pages=4)
    used: dict[int, int] = {}

    def watch(plan: BatchPlan, _: bytes) -> None:
        for page in plan.copy_pages.tolist():
            assert used.get(page, 0) <= rig.engine.state.committed, page
        for slot in plan.requests[:, 0].tolist():
            for page in rig.engine.state.table.owned_pages(slot).tolist():
                used[page] = plan.generation

    rig.device.on_plan = watch
    for index in range(24):
        rig.submit(f"r{index}", prompt(index, 5), f"a{index % 6}", max_tokens=6)
        rig.step()
    rig.run()
    rig.assert_answered(*rig.prompts)
