"""Residency through the whole control plane: copies, removal, the host tier; every state cancelled in."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.rig import both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core import limits
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import (
    CopyIgnored,
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
from loraplex.core.plan import BatchPlan
from loraplex.memory.residency import AdapterState
from loraplex.memory.transaction import Demand, Transaction


@both_depths
def test_a_copy_held_open_for_a_thousand_steps_holds_nobody_up(depth: int) -> None:
    rig = SlowRig(depth=depth, pages=400, max_model_len=1200, token_budget=64)
    rig.device.held = True
    rig.register("cold")
    rig.submit("runs", prompt(5, 1), max_tokens=1000)
    rig.submit("waits", prompt(5, 2), "cold")
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
    launched = rig.engine.state.newest_launch
    rig.step()
    assert rig.engine.state.newest_launch > launched
    rig.device.held = False
    rig.run()
    assert rig.body(call)["state"] == "published"


@both_depths
def test_what_a_waiting_request_has_reserved_is_nobodys_victim(depth: int) -> None:
    """Not through admission, where the pool is too small for both, and not past it."""
    rig = SlowRig(depth=depth, pages=11, growth_horizon=0)
    rig.register("a", pages=4)
    rig.register("b", pages=6)
    rig.run()
    make_cold(rig, "a", "b")
    rig.device.held = True
    rig.submit("first", prompt(4, 1), "a", max_tokens=1)
    rig.until("a", AdapterState.LOADING)
    state = rig.engine.state
    with pytest.raises(InternalFault) as refused:
        Transaction.reserve(900, state.pool, Demand(1, 0, 0, 0), victims=[state.adapters["a"]])
    assert refused.value.code is ErrorCode.EVICTION_INELIGIBLE
    rig.submit("second", prompt(4, 2), "b", max_tokens=1)
    for _ in range(10):
        rig.step()
    assert (rig.state_of("a"), rig.state_of("b")) == (AdapterState.LOADING, AdapterState.HOST_READY)
    rig.device.held = False
    rig.run()
    rig.assert_answered("first", "second")


@both_depths
def test_a_reported_copy_that_is_not_under_way_changes_nothing(depth: int) -> None:
    rig = SlowRig(depth=depth)
    rig.register("a")
    rig.run()
    slot, generation = 1, rig.engine.state.adapters["a"].generation
    rig.device.extra = [[slot, generation, 1], [slot, generation + 5, 0], [3, 1, 1]]
    rig.submit("r", prompt(5, 1), "a")
    rig.run()
    rig.assert_answered("r")
    assert len([e for e in rig.log.events if isinstance(e, CopyIgnored)]) == 3


@both_depths
@pytest.mark.parametrize("when", ["absent", "reserved", "loading", "active"])
def test_a_request_cancelled_in_any_state_of_its_load_leaves_nothing(depth: int, when: str) -> None:
    rig = SlowRig(depth=depth, pages=65)
    others = [f"o{index}" for index in range(limits.MAX_COPIES_IN_FLIGHT if when == "reserved" else 0)]
    for key in ("a", *others):
        rig.register(key)
    rig.run()
    make_cold(rig, "a", *others)
    rig.engine.state.host.limit_bytes = 0  # the host image goes too
    rig.step()
    rig.engine.state.host.limit_bytes = 1 << 40
    assert rig.state_of("a") is AdapterState.ABSENT
    rig.loader.held = when == "absent"
    rig.device.held = when in ("reserved", "loading")
    for key in others:  # as many copies as a backend is given: the next one waits for its turn
        rig.submit(key, prompt(5, 1), key)
    rig.submit("r", prompt(5, 1), "a", max_tokens=30)
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
    rig.submit("next", prompt(5, 3), "a")
    rig.run()
    rig.assert_answered("next")


def cold_beside_a_running_one(keys: list[str], **sizes: int) -> SlowRig:
    """Adapters that are cold beside a request that decodes, on a device whose copies do not end."""
    rig = SlowRig(**sizes)
    for key in keys:
        rig.register(key)
    rig.run()
    make_cold(rig, *keys)
    rig.submit("running", prompt(5, 9), max_tokens=40)
    while not rig.mailbox.tokens.get("running"):
        rig.step()
    rig.device.held = True
    return rig


@both_depths
@pytest.mark.parametrize(("starts", "in_flight"), [(1, 4), (3, 4), (8, 2)])
def test_a_step_with_rows_starts_so_many_copies(depth: int, starts: int, in_flight: int) -> None:
    keys = [f"k{index}" for index in range(5)]
    rig = cold_beside_a_running_one(
        keys, depth=depth, pages=120, copy_starts=starts, copies_in_flight=in_flight
    )
    for index, key in enumerate(keys):
        rig.submit(f"r{index}", prompt(5, index), key)
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
def test_a_step_with_rows_starts_one_copy_that_no_request_waits_for(depth: int) -> None:
    keys = [f"k{index}" for index in range(6)]
    rig = cold_beside_a_running_one(keys, depth=depth, pages=160, copy_starts=4, copies_in_flight=8)
    for key in keys[:4]:
        rig.call(PinAdapter, key, pinned=True)
    started = []
    for _ in range(4):
        rig.step()
        started.append(sum(job.started for job in rig.engine.state.loads.values()))
    assert set(np.diff([0, *started])) <= {0, 1}
    for index, key in enumerate(keys[4:]):
        rig.submit(f"r{index}", prompt(5, index), key)
    for _ in range(8):
        rig.step()
    assert all(job.started for job in rig.engine.state.loads.values())
    rig.device.held = False
    rig.run()
    rig.assert_answered("r0")
    rig.assert_answered("r1")


@both_depths
def test_cold_requests_in_every_step_keep_no_pin_waiting(depth: int) -> None:
    keys = [f"k{index}" for index in range(6)]
    rig = cold_beside_a_running_one(keys, depth=depth, pages=160, copy_starts=4, copies_in_flight=8)
    rig.call(PinAdapter, keys[-1], pinned=True)
    for index, key in enumerate(keys[:-1]):
        rig.submit(f"r{index}", prompt(5, index), key)
        rig.step()
    started = {job.entry.key for job in rig.engine.state.loads.values() if job.started}
    assert {keys[-1], *keys[:3]} <= started
    rig.device.held = False
    rig.run()
    for index in range(len(keys) - 1):
        rig.assert_answered(f"r{index}")


@both_depths
@pytest.mark.parametrize("when", ["absent", "loading", "active"])
@pytest.mark.parametrize("how", [RemoveAdapter, RevokeAdapter])
def test_removal_and_revocation_in_any_state(depth: int, when: str, how: type[EngineCall]) -> None:
    rig = SlowRig(depth=depth)
    rig.loader.held = when == "absent"
    rig.device.held = when == "loading"
    rig.register("a")
    rig.submit("r", prompt(5, 1), "a", max_tokens=12)
    for _ in range(6):
        rig.step()
    call = rig.call(how, "a")
    rig.submit("refused", prompt(5, 2), "a")
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
def test_the_host_tier_is_bounded_and_every_request_is_served(depth: int) -> None:
    """Twelve adapters, room for five images in host memory and four on the device."""
    page_bytes = 4 * 2 * 4
    rig = SlowRig(depth=depth, pages=20, host_bytes=5 * 3 * page_bytes)
    for index in range(12):
        rig.register(f"a{index}", pages=3)
    rig.run()
    for index in range(36):
        rig.submit(f"r{index}", prompt(5, index), f"a{(index * 5) % 12}", max_tokens=4)
        rig.step()
        host = rig.engine.state.host
        host.check()
        assert host.used_bytes <= host.limit_bytes
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert rig.engine.state.host.evictions > 0


@both_depths
@pytest.mark.parametrize("seed", range(8))
def test_random_calls_copies_and_faults_end_in_balance(depth: int, seed: int) -> None:
    """Everything at once, copies and fetches late, torn and refused: each request ends once, right, and
    nothing stays.
    """
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
            f"r{index}",
            prompt(int(rng.integers(1, 16)), seed * 100 + index),
            key if rng.random() < 0.8 else None,
            max_tokens=int(rng.integers(1, 16)),
        )
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
            assert used.get(page, 0) <= rig.engine.state.committed_launch, page
        for slot in plan.requests.slot.tolist():
            for page in rig.engine.state.table.own_pages(slot).tolist():
                used[page] = plan.generation

    rig.device.on_plan = watch
    for index in range(24):
        rig.submit(f"r{index}", prompt(5, index), f"a{index % 6}", max_tokens=6)
        rig.step()
    rig.run()
    rig.assert_answered(*rig.prompts)
