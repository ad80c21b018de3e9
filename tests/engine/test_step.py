"""The engine over a device whose tokens prove which history and adapter each row ran with."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.rig import VOCAB, Rig, both_depths
from tests.prompts import prompt

from loraplex.core.events import (
    AdapterTransition,
    IterationCompleted,
    PlanDiscarded,
    RequestPreempted,
    StepFailed,
)
from loraplex.core.messages import Abort, Finish, RemoveAdapter
from loraplex.schedule.select import MixedBound


@both_depths
def test_one_request_alone(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit("r", prompt(5, 1))
    rig.run()
    rig.assert_answered("r")


@both_depths
def test_mixed_adapters_and_chunked_prefill(depth: int) -> None:
    rig = Rig(depth=depth, pages=65, token_budget=5)
    for key in "abc":
        rig.register(key)
    for index in range(8):
        rig.submit(f"r{index}", prompt(3 + 4 * index, index), "abc"[index % 3] if index % 4 else None)
    rig.run()
    rig.assert_answered(*rig.prompts)


@both_depths
def test_prefill_beside_decode_is_bounded_and_alone_is_not(depth: int) -> None:
    rig = Rig(depth=depth, token_budget=16, mixed=MixedBound(2, 1))
    rig.submit("first", prompt(12, 0), max_tokens=20)
    for _ in range(4):
        rig.step()
    rig.submit("second", prompt(12, 1))
    rig.run()
    rig.assert_answered("first", "second")
    done = [e for e in rig.log.events if isinstance(e, IterationCompleted)]
    assert max(e.prefill_rows for e in done if not e.decode_rows) == 12
    assert [e.prefill_rows for e in done if e.decode_rows and e.prefill_rows] == [3, 3, 3, 3]


@both_depths
def test_preemption_loses_nothing(depth: int) -> None:
    rig = Rig(depth=depth, pages=17, growth_horizon=0)
    for index in range(6):
        rig.submit(f"r{index}", prompt(6, index), max_tokens=20)
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert any(isinstance(event, RequestPreempted) for event in rig.log.events)


@both_depths
def test_more_adapters_than_the_pool_holds(depth: int) -> None:
    rig = Rig(depth=depth, pages=21)
    for index in range(12):
        rig.register(f"a{index}", pages=3)
    rig.run()
    for index in range(24):
        rig.submit(f"r{index}", prompt(5, index), f"a{index % 12}")
    rig.run()
    rig.assert_answered(*rig.prompts)
    moves = [e for e in rig.log.events if isinstance(e, AdapterTransition) and e.before == "retiring"]
    assert moves, "nothing was evicted"


@both_depths
def test_abort_and_finish_free_everything(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.register("a")
    rig.submit("gone", prompt(6, 1), "a", max_tokens=30)
    rig.submit("stopped", prompt(6, 2), "a", max_tokens=30)
    rig.submit("stays", prompt(6, 3), "a")
    for _ in range(6):
        rig.step()
    rig.mailbox.inbox += [Abort("gone"), Finish("stopped", 2)]
    rig.run()
    rig.assert_answered("stays")
    assert [e.code for e in rig.mailbox.ended["gone"]] == ["aborted"]
    assert [e.finish_reason for e in rig.mailbox.ended["stopped"]] == ["stop"]


@both_depths
def test_stop_token_ends_late_at_depth_one_without_extra_output(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit("r", prompt(5, 4), max_tokens=20)
    full = rig.expected("r")
    stop = full[7]
    rig.prompts.clear()
    rig.mailbox.inbox.clear()
    rig.submit("s", prompt(5, 4), max_tokens=20, stop_token_ids=(stop,))
    rig.run()
    assert rig.mailbox.tokens["s"] == full[: full.index(stop) + 1]
    assert rig.mailbox.ended["s"][0].stop_token == stop


@both_depths
def test_failed_step_ends_its_requests_and_no_others(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit("victim", prompt(5, 1), max_tokens=20)
    rig.step()
    rig.step()
    rig.faults.fail_plans.add(rig.engine.state.newest_launch + 1)
    rig.step()
    rig.submit("later", prompt(5, 2))
    rig.run()
    assert [e.code for e in rig.mailbox.ended["victim"]] == ["backend_failed"]
    rig.assert_answered("later")
    assert any(isinstance(event, StepFailed) for event in rig.log.events)


@both_depths
def test_stale_plan_is_rebuilt_with_equal_output(depth: int) -> None:
    rig = Rig(depth=depth, pages=65)
    rig.register("a")
    rig.submit("r", prompt(9, 1), "a", max_tokens=20)
    rig.submit("s", prompt(9, 2), max_tokens=20)
    rig.faults.stale_plans.update({1, 3, 4, 9, 14})
    rig.run()
    rig.assert_answered("r", "s")
    assert any(isinstance(event, PlanDiscarded) for event in rig.log.events)


@both_depths
def test_torn_copy_never_serves(depth: int) -> None:
    from loraplex.engine.deltas import digest_words
    from loraplex.sim.tokens import adapter_number

    rig = Rig(depth=depth)
    number = adapter_number(digest_words(rig.kernel_digest("bad")))
    rig.faults.torn_copies.add(number)
    call = rig.register("bad")
    rig.register("good")
    rig.run()
    assert rig.mailbox.replies[call].code == "adapter_load_failed"
    rig.submit("r", prompt(5, 1), "bad")
    rig.submit("s", prompt(5, 2), "good")
    rig.run()
    assert [e.code for e in rig.mailbox.ended["r"]] == ["adapter_not_found"]  # nothing stayed registered
    rig.assert_answered("s")
    rig.faults.torn_copies.clear()
    rig.register("bad")
    rig.submit("again", prompt(5, 1), "bad")
    rig.run()
    rig.assert_answered("again")


@both_depths
def test_removed_adapter_finishes_its_requests_then_leaves(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.register("a")
    rig.submit("r", prompt(5, 1), "a", max_tokens=20)
    for _ in range(4):
        rig.step()
    rig.mailbox.inbox.append(RemoveAdapter(99, "a"))
    rig.submit("refused", prompt(5, 2), "a")
    rig.step()
    assert 99 not in rig.mailbox.replies
    rig.run()
    rig.assert_answered("r")
    assert rig.mailbox.ended["refused"][0].code == "adapter_not_found"
    assert rig.mailbox.replies[99].body["state"] == "absent"
    assert rig.engine.state.pool.counts().free == rig.engine.state.pool.usable


@both_depths
def test_nan_ends_one_request_only(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit("first", prompt(5, 1), max_tokens=12)
    rig.submit("second", prompt(5, 2), max_tokens=12)
    rig.faults.nan_plans.add(4)
    rig.run()
    codes = {name: rig.mailbox.ended[name][0].code for name in ("first", "second")}
    assert sorted(codes.values(), key=str) == [None, "numeric_fault"]


@both_depths
def test_refusals_are_typed_and_lose_nothing(depth: int) -> None:
    rig = Rig(depth=depth, pages=9)
    rig.submit("empty", [])
    rig.submit("range", [VOCAB])
    rig.submit("long", prompt(60, 1), max_tokens=8)
    rig.submit("pool", prompt(30, 1), max_tokens=8)
    rig.submit("unknown", prompt(4, 1), "nobody")
    rig.submit("twice", prompt(4, 1))
    rig.submit("twice", prompt(4, 1))
    rig.run()
    codes = {name: [e.code for e in ended] for name, ended in rig.mailbox.ended.items()}
    assert codes == {
        "empty": ["empty_prompt"],
        "range": ["token_out_of_range"],
        "long": ["context_length_exceeded"],
        "pool": ["request_exceeds_pool"],
        "unknown": ["adapter_not_found"],
        "twice": ["duplicate_request", None],
    }


@both_depths
@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_under_faults(depth: int, seed: int) -> None:
    """Adapters over-commit the pool, requests come, go and are preempted, plans go stale: answers
    stay exact.
    """
    rng = np.random.default_rng(seed)
    rig = Rig(
        depth=depth, pages=24, token_budget=int(rng.integers(1, 12)), growth_horizon=int(rng.integers(0, 9))
    )
    keys = [f"a{i}" for i in range(9)]
    for key in keys:
        rig.register(key, pages=int(rng.integers(1, 6)))
    aborted: set[str] = set()
    for index in range(60):
        adapter = None if rng.random() < 0.3 else keys[int(rng.zipf(1.5)) % len(keys)]
        rig.submit(
            f"r{index}",
            prompt(int(rng.integers(1, 20)), seed * 100 + index),
            adapter,
            max_tokens=int(rng.integers(1, 24)),
        )
        if rng.random() < 0.2:
            rig.faults.stale_plans.add(rig.engine.state.newest_launch + int(rng.integers(1, 5)))
        if rng.random() < 0.15:
            name = f"r{int(rng.integers(0, index + 1))}"
            rig.mailbox.inbox.append(Abort(name))
            aborted.add(name)
        for _ in range(int(rng.integers(0, 6))):
            rig.step()
    rig.run()
    for name in rig.prompts:
        ended = rig.mailbox.ended[name]
        assert len(ended) == 1, name
        if ended[0].code == "aborted":
            assert name in aborted
            tokens = rig.mailbox.tokens.get(name, [])
            assert tokens == rig.expected(name)[: len(tokens)]
        else:
            rig.assert_answered(name)
