"""Cached prefixes in a running engine: hits, publication, waiting, giving up, tenants, activation (0x08E,
0x08I, 0x08J).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.engine.rig import BASE, CACHED, Rig, both_depths, sampling
from tests.prompts import prompt

from loraplex.core.events import (
    IterationCompleted,
    PrefixGivenUp,
    PrefixMatched,
    PrefixPublished,
    RequestPreempted,
)
from loraplex.core.messages import RemoveAdapter, RevokeAdapter, Submit
from loraplex.identity.execution import base_execution
from loraplex.memory.prefix import CachedBlock


def rig_of(depth: int, **changes: Any) -> Rig:
    return Rig(depth=depth, **{**CACHED, **changes})


def matches(rig: Rig) -> dict[str, tuple[int, int]]:
    """(matched, reused) of each request's first admission."""
    return {e.request_id: (e.matched, e.reused) for e in of(rig, PrefixMatched) if not e.again}


def of(rig: Rig, kind: type) -> list[Any]:
    return [event for event in rig.log.events if type(event) is kind]


def prefilled(rig: Rig) -> int:
    return sum(event.prefill_rows for event in of(rig, IterationCompleted))


def blocks(rig: Rig) -> list[CachedBlock]:
    return list(rig.engine.state.prefix)


def named(*, head: bool, count: int = 1) -> list[str]:
    """Names of adapters that change the output head alone, or more."""
    rig = rig_of(0)
    names = [f"adapter {index}" for index in range(64)]
    chosen = [name for name in names if (rig.execution(name) == base_execution(BASE)) is head]
    return chosen[:count]


@both_depths
def test_a_second_request_computes_only_what_is_not_cached(depth: int) -> None:
    rig = rig_of(depth)
    shared = prompt(17, 1)
    rig.submit("one", shared, max_tokens=4)
    rig.run()
    before = prefilled(rig)
    rig.submit("two", [*shared, *prompt(3, 2)], max_tokens=4)
    rig.run()
    assert matches(rig) == {"one": (0, 0), "two": (16, 16)}
    assert prefilled(rig) - before == 4
    rig.assert_answered("one", "two")


@both_depths
def test_the_block_with_the_last_token_is_computed_whatever_is_cached(depth: int) -> None:
    rig = rig_of(depth)
    for name in ("one", "two"):
        rig.submit(name, prompt(16, 1), max_tokens=4)
        rig.run()
    assert matches(rig)["two"] == (16, 12)
    rig.assert_answered("one", "two")
    assert len(blocks(rig)) == 4


@both_depths
def test_a_conversation_hits_its_own_answer(depth: int) -> None:
    rig = rig_of(depth)
    rig.submit("one", prompt(10, 1), max_tokens=8)
    rig.run()
    turn = [*prompt(10, 1), *rig.mailbox.tokens["one"], *prompt(5, 2)]
    rig.submit("two", turn, max_tokens=4)
    rig.run()
    assert matches(rig)["two"] == (16, 16)
    rig.assert_answered("one", "two")


@both_depths
def test_nothing_beyond_a_stop_is_cached(depth: int) -> None:
    """At depth 1 a plan with the stop's own row, and a token after it, is in flight when the stop is
    found.
    """
    rig = rig_of(depth, page_tokens=1)
    rig.submit("alone", prompt(5, 1), max_tokens=6)
    rig.run()
    tokens = rig.mailbox.tokens["alone"]
    rig = rig_of(depth, page_tokens=1)
    rig.submit("one", prompt(5, 1), max_tokens=6, stop_token_ids=(tokens[2],))
    rig.run()
    stop = tokens.index(tokens[2])
    assert len(blocks(rig)) == 5 + stop
    rig.submit("two", [*prompt(5, 1), *tokens[: stop + 1], 7, 8], max_tokens=2)
    rig.run()
    assert matches(rig)["two"] == (5 + stop, 5 + stop)


@both_depths
def test_requests_that_arrive_together_compute_a_shared_prompt_once(depth: int) -> None:
    rig = rig_of(depth, pages=129)
    shared = prompt(40, 1)
    for index in range(8):
        rig.submit(f"r{index}", [*shared, *prompt(3, 100 + index)], max_tokens=4)
    rig.run()
    assert prefilled(rig) == 43 + 7 * 3
    assert list(matches(rig).values()) == [(0, 0), *[(40, 40)] * 7]
    rig.assert_answered(*(f"r{index}" for index in range(8)))


@both_depths
def test_who_waits_for_a_block_holds_back_nobody(depth: int) -> None:
    rig = rig_of(depth, token_budget=8)
    rig.submit("first", [*prompt(40, 1), 1], max_tokens=2)
    rig.submit("waits", [*prompt(40, 1), 2], max_tokens=2)
    rig.submit("other", prompt(5, 9), max_tokens=2)
    for _ in range(3):
        rig.step()
    running = {record.request_id for record in rig.engine.state.by_slot.values()}
    assert "waits" not in running
    assert {"first", "other"} <= running | rig.mailbox.ended.keys()
    rig.run()
    rig.assert_answered("first", "waits", "other")
    assert matches(rig)["waits"] == (40, 40)


@both_depths
def test_a_waiter_computes_what_its_forerunner_leaves(depth: int) -> None:
    from loraplex.core.messages import Abort

    rig = rig_of(depth, token_budget=8)
    rig.submit("first", [*prompt(40, 1), 1], max_tokens=2)
    rig.submit("waits", [*prompt(40, 1), 2], max_tokens=2)
    for _ in range(2):
        rig.step()
    rig.mailbox.inbox.append(Abort("first"))
    rig.run()
    assert matches(rig)["waits"] == (0, 0)
    rig.assert_answered("waits")


@both_depths
def test_preempted_requests_hit_their_own_blocks(depth: int) -> None:
    rig = rig_of(depth, pages=24, max_model_len=64, growth_horizon=0)
    for index in range(4):
        rig.submit(f"r{index}", prompt(12, index), max_tokens=24)
    rig.run()
    assert of(rig, RequestPreempted)
    again = [event for event in of(rig, PrefixMatched) if event.again]
    assert any(event.reused for event in again)
    rig.assert_answered(*(f"r{index}" for index in range(4)))


SWITCHES: dict[str, tuple[Any, Any, int]] = {
    "adapter to adapter": (("lora a", -1), ("lora b", -1), 0),
    "base to activated": ((None, -1), ("alora a", 2), 2),
    "activated to base": (("alora a", 2), (None, -1), 2),
    "activated to another": (("alora a", 2), ("alora b", 2), 2),
    "another boundary": (("alora a", 2), ("alora c", 1), 1),
    "output head": ((None, -1), ("head", -1), 4),
    "another slot": (("lora a", -1), ("lora a", -1), 4),
}


@both_depths
@pytest.mark.parametrize(("first", "second", "matched"), SWITCHES.values(), ids=SWITCHES)
def test_what_a_switch_reuses_of_four_tokens(depth: int, first: Any, second: Any, matched: int) -> None:
    """0x08J with one token a block, through the running engine; `reused` leaves the last token out."""
    tokens = [11, 12, 99, 100]
    heads, others = named(head=True), named(head=False, count=5)
    names = {
        "head": heads[0],
        "lora a": others[0],
        "lora b": others[1],
        "alora a": others[2],
        "alora b": others[3],
        "alora c": others[2],
        None: None,
    }
    rig = rig_of(depth, page_tokens=1)
    for name in (others[0], others[1], heads[0]):
        rig.register(name)
    if second[0] != "alora c":
        rig.register(others[2], invocation=(99, 100))
    rig.register(others[3], invocation=(99, 100))
    if second[0] == "alora c":  # one artifact, whose invocation stands at two places
        tokens = [11, 99, 99, 100]
        rig.register(others[2], invocation=(99,))
    rig.run()
    rig.submit("one", tokens, names[first[0]], invoked_at=first[1], max_tokens=1)
    rig.run()
    if (
        matched == 4 and first == second
    ):  # off the device and on again: in another slot, or at another generation
        state = rig.engine.state
        from loraplex.engine.residency import transitions

        transitions.evict(state, state.adapters[names[first[0]]])
    rig.submit("two", tokens, names[second[0]], invoked_at=second[1], max_tokens=1)
    rig.run()
    assert matches(rig)["two"] == (matched, min(matched, 3))
    rig.assert_answered("one", "two")


@both_depths
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_rows_before_the_invocation_run_under_the_base(depth: int, budget: int) -> None:
    [name] = named(head=False)
    rig = rig_of(depth, token_budget=budget)
    rig.register(name, invocation=(5, 6))
    context = [*prompt(21, 3), 5, 6, *prompt(4, 4)]
    rig.submit("base", context[:21], max_tokens=3)
    rig.submit("late", context, name, invoked_at=21, max_tokens=6)
    rig.submit("at once", [5, 6, *context[:9]], name, invoked_at=0, max_tokens=6)
    rig.run()
    rig.assert_answered("base", "late", "at once")
    assert matches(rig)["late"] == (20, 20)


def test_an_activated_adapter_works_where_nothing_is_cached() -> None:
    [name] = named(head=False)
    rig = Rig(depth=1)
    rig.register(name, invocation=(5,))
    rig.submit("one", [*prompt(21, 3), 5, 9], name, invoked_at=21, max_tokens=6)
    rig.run()
    rig.assert_answered("one")
    assert not of(rig, PrefixPublished)


def test_a_boundary_inside_a_block_shares_the_full_block_before_it() -> None:
    [name] = named(head=False)
    rig = rig_of(1)
    rig.register(name, invocation=(5, 6))
    context = [*prompt(10, 3), 5, 6, *prompt(4, 4)]
    rig.submit("base", context, max_tokens=1)
    rig.run()
    rig.submit("alora", context, name, invoked_at=10, max_tokens=1)
    rig.run()
    assert matches(rig)["alora"] == (8, 8)


def test_tenants_share_nothing_unless_the_operator_lets_them() -> None:
    for shared, expected in ((frozenset(), 0), (frozenset({"a", "b"}), 16)):
        rig = rig_of(1, shared_tenants=shared)
        for tenant in ("a", "b", "c"):
            rig.submit(tenant, [*prompt(16, 1), 3], tenant=tenant, max_tokens=1)
            rig.run()
        assert [matches(rig)[tenant][0] for tenant in ("a", "b", "c")] == [0, expected, 0]


def test_prompt_logprobs_look_nothing_up_and_are_cached() -> None:
    rig = rig_of(1)
    for name, scores in (("one", -1), ("two", 0), ("three", -1)):
        rig.submit(
            name,
            [*prompt(12, 1), *prompt(4, 50), 3][: 13 if name == "one" else 17],
            max_tokens=1,
            prompt_logprobs=-1,
        )
        if scores >= 0:
            message = rig.mailbox.inbox[-1]
            assert isinstance(message, Submit)
            rig.mailbox.inbox[-1] = msgspec.structs.replace(
                message, sampling=sampling(max_tokens=1, prompt_logprobs=0)
            )
        if scores < 0:
            rig.run()
            continue
        rig.step()
        rig.engine.state.table.prompt_logprobs[:] = -1  # the virtual device has no log probabilities
        rig.run()
    assert matches(rig) == {"one": (0, 0), "three": (16, 16)}


@both_depths
def test_revocation_and_departure_take_their_blocks(depth: int) -> None:
    first, second = named(head=False, count=2)
    rig = rig_of(depth)
    rig.register(first)
    rig.register(second)
    rig.run()
    for index, name in enumerate((first, second, None)):
        rig.submit(f"r{index}", prompt(17, 1), name, max_tokens=1)
    rig.run()
    assert len(blocks(rig)) == 12
    rig.mailbox.inbox.append(RevokeAdapter(90, first))
    rig.run()
    assert len(blocks(rig)) == 8
    rig.mailbox.inbox.append(RemoveAdapter(91, second))
    rig.run()
    assert len(blocks(rig)) == 4
    assert [event.reason for event in of(rig, PrefixGivenUp)] == ["dropped", "dropped"]
    rig.register(first)
    rig.submit("again", prompt(17, 1), first, max_tokens=1)
    rig.run()
    assert matches(rig)["again"] == (0, 0)
    rig.assert_answered("again")


@both_depths
def test_revocation_while_it_is_read_leaves_nothing_to_find(depth: int) -> None:
    [name] = named(head=False)
    rig = rig_of(depth)
    rig.register(name)
    rig.submit("one", prompt(17, 1), name, max_tokens=20)
    for _ in range(8):
        rig.step()
    assert blocks(rig)
    rig.mailbox.inbox.append(RevokeAdapter(90, name))
    rig.run()
    assert not blocks(rig)
    assert [end.code for end in rig.mailbox.ended["one"]] == ["adapter_revoked"]


@both_depths
def test_rows_that_are_not_finite_are_never_cached(depth: int) -> None:
    rig = rig_of(depth)
    rig.faults.nan_plans.add(1)
    rig.submit("one", prompt(15, 1), max_tokens=4)
    rig.run()
    assert [end.code for end in rig.mailbox.ended["one"]] == ["numeric_fault"]
    assert not blocks(rig)


@both_depths
def test_plans_that_fail_or_are_stale_publish_nothing(depth: int) -> None:
    rig = rig_of(depth)
    rig.faults.fail_plans.add(1)
    rig.submit("one", prompt(15, 1), max_tokens=4)
    rig.run()
    assert not blocks(rig)
    rig.faults.stale_plans.add(rig.engine.state.newest_launch + 1)
    rig.submit("two", prompt(15, 1), max_tokens=4)
    rig.run()
    rig.assert_answered("two")
    assert matches(rig)["two"] == (0, 0)


def filled(depth: int, *, pages: int = 65, **changes: Any) -> Rig:
    """A pool that the cache has filled."""
    rig = rig_of(depth, pages=pages, **changes)
    for index in range(40):
        rig.submit(f"fill{index}", prompt(21, 200 + index), max_tokens=2)
        rig.run()
    assert rig.engine.state.pool.free < 8
    return rig


@both_depths
def test_a_full_pool_admits_loads_and_grows_as_an_empty_one(depth: int) -> None:
    [name] = named(head=False)

    def serve(rig: Rig) -> list[int]:
        start = rig.engine.state.newest_launch
        rig.register(name, pages=6)
        for index in range(6):
            rig.submit(f"r{index}", prompt(20, index), name if index % 2 else None, max_tokens=20)
        rig.run()
        rig.assert_answered(*(f"r{index}" for index in range(6)))
        return [rig.engine.state.newest_launch - start, rig.engine.state.preemptions]

    assert serve(filled(depth, scrub=False)) == serve(rig_of(depth, pages=65, scrub=False))


@both_depths
def test_a_floor_is_kept_while_several_run_and_yields_to_the_last(depth: int) -> None:
    rig = filled(depth, prefix_floor=40)
    state = rig.engine.state
    rig.submit("large", prompt(40, 1), max_tokens=20)
    rig.submit("larger", prompt(40, 2), max_tokens=20)
    while not rig.engine.idle or rig.mailbox.inbox:
        rig.step()
        if len(state.by_slot) > 1:
            assert len(state.prefix) >= 40
    rig.assert_answered("large", "larger")
    rig = filled(depth, pages=33, prefix_floor=32)
    rig.submit("whole", prompt(44, 1), max_tokens=20)
    rig.submit("second", prompt(44, 2), max_tokens=20)
    rig.run()
    rig.assert_answered("whole", "second")


@both_depths
def test_one_currency_decides_between_an_idle_adapter_and_a_cached_block(depth: int) -> None:
    [name] = named(head=False)
    for rate, stays in ((1, True), (10**9, False)):
        rig = rig_of(depth, pages=33, prefill_tokens_per_s=rate, copy_bytes_per_s=64)
        rig.register(name, pages=16)
        rig.submit("one", prompt(9, 1), max_tokens=1)
        rig.submit("uses", prompt(9, 2), name, max_tokens=1)
        rig.run()
        for index in range(8):  # of one age by now
            rig.submit(f"passes {index}", prompt(3, 9), max_tokens=8)
            rig.run()
        assert rig.engine.state.adapters[name].resident
        rig.submit("wants", prompt(52, 3), max_tokens=4)
        rig.run()
        rig.assert_answered("one", "uses", "wants")
        blocks_left = rig.engine.state.prefix.matched([rig.keys(np.array(prompt(9, 1)), None)[:32]])
        assert blocks_left == int(stays), rate


MALFORMED: dict[str, dict[str, Any]] = {
    "half a key": {"block_keys": b"x" * 16},
    "a key and a byte": {"block_keys": b"x" * 33},
    "too few": {"block_keys": b"x" * 32},
    "too many": {"block_keys": b"x" * 32 * 5},
    "not of these tokens": {"block_keys": b"x" * 32 * 4},
    "an empty namespace": {"namespace": ""},
    "another tenant's namespace": {"namespace": "somebody"},
    "another tenant": {"tenant": "somebody"},
    "the shared namespace": {"namespace": ":shared"},
    "an invocation of nothing": {"invoked_at": 0},
    "an invocation before the prompt": {"invoked_at": -2},
    "an invocation behind the prompt": {"invoked_at": 99},
    "another first token": {"prompt": np.array([8, *prompt(15, 1)], dtype="<i4").tobytes()},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_submission_with_wrong_keys_is_refused(name: str) -> None:
    rig = rig_of(1)
    rig.submit("one", prompt(16, 1), max_tokens=2)
    message = rig.mailbox.inbox.pop()
    assert isinstance(message, Submit)
    rig.mailbox.inbox.append(msgspec.structs.replace(message, **MALFORMED[name]))
    rig.run()
    assert [end.code for end in rig.mailbox.ended["one"]] == ["invalid_request"]
    assert not blocks(rig)


INVOKED: dict[str, tuple[tuple[int, ...], int]] = {
    "missing": ((5, 6), -1), "before": ((5, 6), 2), "behind": ((5, 6), 4), "half": ((5, 7), 3),
    "cut": ((5, 6, 7, 8), 3),
    "far": ((5, 6), 1 << 30), "negative": ((5, 6), -5),
}  # fmt: skip


@pytest.mark.parametrize("name", INVOKED)
@pytest.mark.parametrize("cached", [False, True])
def test_an_invocation_that_the_prompt_does_not_hold_is_refused(name: str, cached: bool) -> None:
    invocation, at = INVOKED[name]
    [adapter] = named(head=False)
    rig = Rig(depth=1, **(CACHED if cached else {}))
    rig.register(adapter, invocation=invocation)
    tokens = np.array([1, 2, 3, 5, 6, 7], dtype="<i4")
    keys = rig.keys(tokens, adapter, max(at, 0)) if cached else b""
    message = Submit("one", tokens.tobytes(), sampling(max_tokens=2), adapter, block_keys=keys, invoked_at=at)
    rig.mailbox.inbox.append(message)
    rig.run()
    assert [end.code for end in rig.mailbox.ended["one"]] == ["invalid_request"]


def test_keys_where_nothing_is_cached_are_refused() -> None:
    rig = Rig(depth=1)
    rig.submit("one", prompt(16, 1), max_tokens=2)
    message = rig.mailbox.inbox.pop()
    assert isinstance(message, Submit)
    rig.mailbox.inbox.append(msgspec.structs.replace(message, block_keys=b"x" * 128))
    rig.run()
    assert [end.code for end in rig.mailbox.ended["one"]] == ["invalid_request"]


def broken_chains() -> dict[str, Any]:
    return {
        "one block twice": lambda keys: [keys[0], keys[0], *keys[2:]],
        "two blocks exchanged": lambda keys: [keys[0], keys[2], keys[1], keys[3]],
        "a strange block": lambda keys: [keys[0], b"y" * 32, *keys[2:]],
        "another's block": lambda keys: [keys[0], b"other", *keys[2:]],
    }


@pytest.mark.parametrize("name", broken_chains())
@pytest.mark.parametrize("warm", [False, True])
def test_keys_that_are_no_chain_end_their_request_and_nobody_elses(name: str, warm: bool) -> None:
    rig = rig_of(1)
    rig.submit("other", prompt(20, 7), max_tokens=1)
    rig.run()
    foreign = [block.key for block in blocks(rig)][1]
    if warm:
        rig.submit("warm", [*prompt(16, 1), 1], max_tokens=1)
        rig.run()
    rig.submit("bad", [*prompt(16, 1), 2], max_tokens=2)
    message = rig.mailbox.inbox.pop()
    assert isinstance(message, Submit)
    keys = [message.block_keys[at : at + 32] for at in range(0, 128, 32)]
    made = [foreign if key == b"other" else key for key in broken_chains()[name](keys)]
    rig.mailbox.inbox.append(msgspec.structs.replace(message, block_keys=b"".join(made)))
    rig.submit("good", prompt(20, 8), max_tokens=4)
    rig.run()
    assert [end.code for end in rig.mailbox.ended["bad"]] in (["prefix_receipt"], [None])
    rig.assert_answered("good")
    rig.submit("after", [*prompt(16, 1), 3], max_tokens=2)
    rig.run()
    rig.assert_answered("after")
