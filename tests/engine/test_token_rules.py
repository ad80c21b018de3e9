"""Tokens that a request's own parameters forbid: in any batch, at both depths, through preemption
and faults.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.chains import Chains
from tests.engine.rig import CACHED, VOCAB, Rig, both_depths
from tests.prompts import prompt

from loraplex.core.events import PlanDiscarded, RequestPreempted
from loraplex.core.plan import BatchPlan
from loraplex.sim.tokens import expected_tokens


def drawn(tokens: list[int]) -> int:
    return expected_tokens(np.array(tokens, dtype=np.int32), 0, 1, VOCAB)[0]


def ruled(given: list[int], count: int, **rules: Any) -> list[int]:
    """What the device draws alone where each token is held to the rules, told token by token."""
    out: list[int] = []
    while len(out) < count:
        first = drawn(given + out)
        tokens = ((first + step) % VOCAB for step in range(VOCAB))
        token = next(token for token in tokens if not forbidden(token, out, **rules))
        out.append(token)
        if token in rules.get("stop_token_ids", ()):
            break
    return out


def forbidden(
    token: int,
    out: list[int],
    *,
    min_tokens: int = 0,
    late_token_ids: tuple[int, ...] = (),
    allowed_token_ids: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> bool:
    if len(out) < min_tokens and token in late_token_ids:
        return True
    if allowed_token_ids and token not in allowed_token_ids:
        return True
    said = [*out, token]
    return any(said[-len(word) :] == list(word) for word in bad_words)


def cases(given: list[int]) -> list[dict[str, Any]]:
    """Rules that meet what would be drawn freely."""
    free = ruled(given, 12)
    pair = (free[1], free[2])
    return [
        {"min_tokens": 6, "late_token_ids": (free[2], free[7]), "stop_token_ids": (free[2], free[7])},
        {"min_tokens": 3, "late_token_ids": (free[0],)},
        {"allowed_token_ids": (5, 31, 32, 63, 996)},
        {"bad_words": ((free[0],), (free[4],))},
        {"bad_words": (pair, (free[5], free[6], free[7]))},
        {
            "bad_words": ((31,), (63, 5), (5, 5, 5)),
            "allowed_token_ids": (5, 31, 63, 64),
            "min_tokens": 4,
            "late_token_ids": (63,),
        },
    ]


@both_depths
def test_every_token_is_one_that_the_rules_leave(depth: int) -> None:
    rig = Rig(depth=depth, pages=65)
    wanted = {}
    for index, rules in enumerate(cases(prompt(7, 1))):
        rig.submit(f"r{index}", prompt(7, 1), max_tokens=12, **rules)
        wanted[f"r{index}"] = ruled(prompt(7, 1), 12, **rules)
    rig.submit("free", prompt(7, 1), max_tokens=12)
    rig.run()
    rig.assert_answered("free")
    assert {name: rig.mailbox.tokens[name] for name in wanted} == wanted
    assert rig.mailbox.tokens["r0"] != rig.mailbox.tokens["free"][: len(rig.mailbox.tokens["r0"])]
    assert rig.mailbox.tokens["r3"] != rig.mailbox.tokens["free"]
    assert rig.mailbox.tokens["r4"] != rig.mailbox.tokens["free"]


def test_only_a_word_of_several_tokens_waits_for_the_token_before() -> None:
    """A rule that looks back costs its own request its place in the pipeline, others keep theirs."""
    rig = Rig(depth=1, pages=65)
    rig.submit("allowed", prompt(5, 1), max_tokens=10, allowed_token_ids=(1, 2, 3))
    rig.submit("late", prompt(5, 2), max_tokens=10, min_tokens=4, late_token_ids=(7,))
    rig.submit("looks-back", prompt(5, 3), max_tokens=5, bad_words=((900, 901),))
    rig.run()
    plans = [BatchPlan.unpack(plan) for plan in rig.device.plans]
    sampled = [plan for plan in plans if len(plan.samples)]
    masked = [plan.mask_samples.size for plan in sampled]
    counts = [len(plan.samples) for plan in sampled]
    assert counts == [3, 2] * 5
    assert masked == [3, 2, 3, 2, 2, 1, 2, 1, 2, 1]


@both_depths
def test_preemption_discarded_plans_and_cached_prefixes_change_nothing(depth: int) -> None:
    rig = Rig(depth=depth, pages=17, growth_horizon=0, **CACHED)
    rig.faults.stale_plans |= {3, 7}
    rules = cases(prompt(6, 1))
    for index, rule in enumerate(rules):
        rig.submit(f"r{index}", prompt(6, 1), max_tokens=20, **rule)
    rig.run()
    assert any(isinstance(event, RequestPreempted) for event in rig.log.events)
    assert any(isinstance(event, PlanDiscarded) for event in rig.log.events)
    for index, rule in enumerate(rules):
        assert rig.mailbox.tokens[f"r{index}"] == ruled(prompt(6, 1), 20, **rule), rule


@both_depths
def test_a_grammar_and_rules_hold_together(depth: int) -> None:
    rig = Rig(depth=depth, grammars=Chains())
    rig.submit("grammar", prompt(7, 1), grammar="5", max_tokens=20)
    rig.run()
    first = rig.mailbox.tokens["grammar"][0]
    rig.submit("both", prompt(7, 1), grammar="5", max_tokens=20, bad_words=((first,),))
    rig.submit("neither", prompt(7, 1), grammar="5", max_tokens=20, allowed_token_ids=(500,))
    rig.submit("free", prompt(7, 2))
    rig.run()
    rig.assert_answered("free")
    both = rig.mailbox.tokens["both"]
    assert len(both) == 5
    assert first not in both
    assert all(
        (token - 5 * before) % VOCAB in (1, 2, 3) for before, token in zip([0, *both], both, strict=False)
    )
    assert [e.code for e in rig.mailbox.ended["neither"]] == ["invalid_sampling"]


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ({"allowed_token_ids": (VOCAB,)}, "token_out_of_range"),
        ({"bad_words": ((1, VOCAB),)}, "token_out_of_range"),
        ({"bad_words": ((),)}, "plan_malformed"),
        ({"min_tokens": 2, "late_token_ids": (-1,)}, "token_out_of_range"),
        ({"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))}, "invalid_sampling"),
        ({"allowed_token_ids": (3,), "min_tokens": 1, "late_token_ids": (3,)}, "invalid_sampling"),
    ],
)
def test_rules_that_nothing_can_follow_are_refused_before_any_work(rules: dict[str, Any], code: str) -> None:
    rig = Rig()
    rig.submit("r", prompt(7, 1), **rules)
    rig.run()
    assert [e.code for e in rig.mailbox.ended["r"]] == [code]
    assert not rig.device.plans
