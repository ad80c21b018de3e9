"""Histories, closure and block keys: what may share KV rows, and what never may (0x08A to 0x08J)."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.identity.cache import KeyChain, block_key, cache_root
from loraplex.identity.canonical import digest
from loraplex.identity.closure import (
    DIRECT,
    Node,
    Part,
    Reach,
    changes_hidden,
    changes_kv,
    changes_logits,
    first_reach,
    nodes_of,
    reach,
)
from loraplex.identity.compatibility import (
    Function,
    Shared,
    Shares,
    adapter_function,
    base_function,
    hidden_compatible,
    kv_compatible,
    logits_compatible,
    sampling_compatible,
    shares_with_base,
)
from loraplex.identity.digests import FACTOR_AXES, ModuleSpec, TensorRecord
from loraplex.identity.execution import (
    History,
    Interval,
    adapter_execution,
    base_execution,
    check_history,
    history_of,
)
from loraplex.memory.prefix import PrefixIndex

BASE = digest("base")
A, B = digest("adapter a"), digest("adapter b")
ROOT = cache_root(digest("cache"), 1, "tenant")
TOKENS = (11, 12, 99, 100)
LAYERS = 4


def bits(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()


def keys(
    history: History, tokens: tuple[int, ...] = TOKENS, page_tokens: int = 1, root: bytes = ROOT
) -> list[bytes]:
    return KeyChain(root, history, page_tokens).extend(bits(tokens))


def always(semantic: str) -> History:
    return history_of(BASE, adapter_execution(semantic))


def invoked(semantic: str, at: int) -> History:
    return history_of(BASE, adapter_execution(semantic), at)


PLAIN = history_of(BASE, None)

SWITCHES = {
    "ordinary adapter to another": (always(A), always(B), 0),
    "base to an activated adapter": (PLAIN, invoked(A, 2), 2),
    "activated adapter to the base": (invoked(A, 2), PLAIN, 2),
    "one activated adapter to another": (invoked(A, 2), invoked(B, 2), 2),
    "one activated adapter, another boundary": (invoked(A, 2), invoked(A, 1), 1),
    "adapter of the output head": (PLAIN, history_of(BASE, base_execution(BASE)), 4),
    "one adapter in another slot": (always(A), always(A), 4),
}


@pytest.mark.parametrize(("before", "after", "matched"), SWITCHES.values(), ids=SWITCHES)
def test_what_a_switch_reuses_of_four_tokens(before: History, after: History, matched: int) -> None:
    """0x08J with one token a block: the index matches exactly the positions that the histories share."""
    index = PrefixIndex(page_tokens=1)
    parent = None
    for page, key in enumerate(keys(before), 1):
        parent = index.publish(parent, key, page, bytes.fromhex(BASE), launch=1)
    assert index.matched(keys(after)) == matched


def test_equal_suffixes_after_different_contexts_never_share() -> None:
    assert keys(PLAIN, (1, 2, 3, 4), 2)[1] != keys(PLAIN, (9, 2, 3, 4), 2)[1]
    assert keys(always(A), (1, 2, 3, 4), 2)[1] != keys(always(B), (1, 2, 3, 4), 2)[1]


@pytest.mark.parametrize("page_tokens", [1, 2, 3, 4])
def test_equal_suffixes_after_different_activation_starts_never_share(page_tokens: int) -> None:
    tokens = tuple(range(24))
    chains = [keys(invoked(A, at), tokens, page_tokens) for at in range(24)]
    for one, first in enumerate(chains):
        for other, second in enumerate(chains[:one]):
            full = min(one, other) // page_tokens
            assert [a == b for a, b in zip(first, second, strict=True)] == [
                i < full for i in range(len(first))
            ]


def test_a_boundary_inside_a_block_ends_sharing_at_the_block_before() -> None:
    base, adapted = keys(PLAIN, tuple(range(8)), 4), keys(invoked(A, 6), tuple(range(8)), 4)
    assert base[0] == adapted[0]
    assert base[1] != adapted[1]


def test_a_chain_goes_on_where_another_process_left_it() -> None:
    history, tokens = invoked(A, 5), tuple(range(12))
    whole = keys(history, tokens, 4)
    head = KeyChain(ROOT, history, 4)
    head.extend(bits(tokens[:8]))
    tail = KeyChain(head.parent, history, 4, position=8)
    assert tail.extend(bits(tokens[8:])) == whole[2:]
    assert tail.position == 12


def test_namespace_graph_and_cache_abi_are_in_every_key() -> None:
    roots = [
        cache_root(digest("cache"), 1, "tenant"),
        cache_root(digest("cache"), 1, "other"),
        cache_root(digest("cache"), 2, "tenant"),
        cache_root(digest("other"), 1, "tenant"),
    ]
    assert len({keys(PLAIN, root=root)[-1] for root in roots}) == 4


def test_a_rest_that_fills_no_block_has_no_key() -> None:
    assert len(keys(PLAIN, tuple(range(11)), 4)) == 2
    assert keys(PLAIN, (1, 2, 3), 4) == []


CLOSURE = {
    (0, Module.K): Reach.EVERYTHING,
    (3, Module.V): Reach.EVERYTHING,
    (0, Module.Q): Reach.LATER_LAYERS,
    (2, Module.DOWN): Reach.LATER_LAYERS,
    (3, Module.Q): Reach.HIDDEN,
    (3, Module.O): Reach.HIDDEN,
    (3, Module.GATE): Reach.HIDDEN,
    (0, Module.EMBED): Reach.EVERYTHING,
    (0, Module.LM_HEAD): Reach.LOGITS,
    (4, Module.Q): Reach.EVERYTHING,
    (-1, Module.Q): Reach.EVERYTHING,
}


@pytest.mark.parametrize("part", list(Part))
@pytest.mark.parametrize(("where", "expected"), CLOSURE.items(), ids=str)
def test_what_a_change_reaches_first(where: tuple[int, Module], expected: Reach, part: Part) -> None:
    layer, module = where
    assert reach(Node(layer, module, part), LAYERS) is expected


def test_every_target_that_can_be_adapted_has_a_node() -> None:
    assert set(DIRECT) == set(Module)
    assert {m for m in Module if DIRECT[m] is Reach.LATER_LAYERS} == set(LAYER_MODULES) - {Module.K, Module.V}


def test_what_the_graph_does_not_know_is_an_ancestor_of_everything() -> None:
    strange = Node(0, "self_attn.rotary", Part.FACTORS)
    assert reach(strange, LAYERS) is Reach.EVERYTHING
    head = Node(0, Module.LM_HEAD, Part.FACTORS)
    assert not changes_kv([head], LAYERS)
    assert changes_kv([head, strange], LAYERS)


def test_three_depths_of_change() -> None:
    head, last_q, first_q = (
        [Node(0, Module.LM_HEAD, Part.FACTORS)],
        [Node(LAYERS - 1, Module.Q, Part.FACTORS)],
        [Node(0, Module.Q, Part.FACTORS)],
    )
    assert [changes_kv(n, LAYERS) for n in (head, last_q, first_q)] == [False, False, True]
    assert [changes_hidden(n, LAYERS) for n in (head, last_q, first_q)] == [False, True, True]
    assert [changes_logits(n, LAYERS) for n in (head, last_q, first_q, [])] == [True, True, True, False]
    reached = [first_reach(n, LAYERS) for n in (head, last_q, first_q)]
    assert reached == [Reach.LOGITS, Reach.HIDDEN, Reach.LATER_LAYERS]
    assert not changes_kv([], LAYERS)
    assert first_reach([], LAYERS) is None


def spec(name: str, target: str, role: str = "A") -> ModuleSpec:
    axes = FACTOR_AXES.get(role, ("output",))
    shape = (1,) * len(axes)
    return ModuleSpec(
        name, target, (1, 1), 1, "1", "linear", (TensorRecord(role, axes, "float32", shape, BASE),)
    )


def execution_of(base: str, semantic: str, modules: list[ModuleSpec], layers: int) -> str:
    return adapter_function(base, semantic, modules, layers).kv


def test_modules_of_an_artifact_become_nodes() -> None:
    head = spec("lm_head", "lm_head")
    assert execution_of(BASE, A, [head], LAYERS) == base_execution(BASE)
    last = spec("model.layers.3.self_attn.q_proj", "q")
    assert execution_of(BASE, A, [head, last], LAYERS) == base_execution(BASE)
    for name, target, role in (
        ("model.layers.2.self_attn.q_proj", "q", "A"),
        ("model.layers.3.self_attn.k_proj", "k", "lora_bias"),
        ("model.embed_tokens", "embed", "B"),
        ("model.q_proj", "q", "A"),
        ("model.layers.3.mlp.router", "router", "A"),
        ("lm_head", "lm_head", "something_new"),
    ):
        assert execution_of(BASE, A, [head, spec(name, target, role)], LAYERS) == adapter_execution(A)
    assert [node.part for node in nodes_of([spec("lm_head", "lm_head", "magnitude")])] == [Part.OUTPUT_SCALE]


def test_equal_kv_rows_make_neither_equal_hidden_states_nor_equal_logits() -> None:
    """0x08D: what two requests share is a question for each object; only KV rows are ever shared."""
    head, last_q = spec("lm_head", "lm_head"), spec("model.layers.3.self_attn.q_proj", "q")
    for module, reached in ((head, Reach.LOGITS), (last_q, Reach.HIDDEN)):
        assert keys(history_of(BASE, execution_of(BASE, A, [module], LAYERS))) == keys(PLAIN)
        assert first_reach(nodes_of([module]), LAYERS) is reached
        assert kv_compatible(adapter_function(BASE, A, [module], LAYERS), base_function(BASE))
        assert not logits_compatible(adapter_function(BASE, A, [module], LAYERS), base_function(BASE))
    activated = keys(invoked(A, 2))
    assert (activated[:2], activated[2] == keys(PLAIN)[2]) == (keys(PLAIN)[:2], False)


def functions() -> dict[str, Function]:
    """Of the base, and of adapters that reach logits, hidden states, and KV rows."""
    return {
        "base": base_function(BASE),
        "head": adapter_function(BASE, A, [spec("lm_head", "lm_head")], LAYERS),
        "last q": adapter_function(BASE, A, [spec("model.layers.3.self_attn.q_proj", "q")], LAYERS),
        "first q": adapter_function(BASE, A, [spec("model.layers.0.self_attn.q_proj", "q")], LAYERS),
    }


def test_four_questions_have_four_answers() -> None:
    questions = (kv_compatible, hidden_compatible, logits_compatible, sampling_compatible)
    base = functions()["base"]
    assert {name: [ask(base, one) for ask in questions] for name, one in functions().items()} == {
        "base": [True, True, True, True],
        "head": [True, True, False, False],
        "last q": [True, False, False, False],
        "first q": [False, False, False, False],
    }
    for one in functions().values():
        assert all(ask(one, one) for ask in questions)
    assert not any(ask(functions()["first q"], adapter_function(BASE, B, [], LAYERS)) for ask in questions)


def test_equal_logits_need_equal_hidden_states_and_those_equal_kv_rows() -> None:
    one = Function(*map(digest, ("kv", "hidden", "logits")))
    other = Function(digest("other kv"), one.hidden, one.logits)
    assert not hidden_compatible(one, other)
    assert not logits_compatible(one, other)
    assert not logits_compatible(one, Function(one.kv, digest("other hidden"), one.logits))
    assert not sampling_compatible(one, Function(one.kv, one.hidden, digest("other logits")))


def test_what_an_adapter_shares_with_its_base() -> None:
    always, before, never = Shared.ALWAYS, Shared.BEFORE_INVOCATION, Shared.NEVER
    made = functions()
    assert {name: shares_with_base(one, BASE, activated=False) for name, one in made.items()} == {
        "base": Shares(always, always, always, always),
        "head": Shares(always, always, never, never),
        "last q": Shares(always, never, never, never),
        "first q": Shares(never, never, never, never),
    }
    assert shares_with_base(made["first q"], BASE, activated=True) == Shares(before, before, before, never)
    assert shares_with_base(made["head"], BASE, activated=True) == Shares(always, always, before, never)


GOOD = adapter_execution(A)
MALFORMED: dict[str, History] = {
    "nothing": (),
    "a late beginning": (Interval(1, GOOD),),
    "a negative beginning": (Interval(-1, GOOD),),
    "two beginnings": (Interval(0, GOOD), Interval(0, adapter_execution(B))),
    "backwards": (Interval(0, GOOD), Interval(-3, adapter_execution(B))),
    "no change": (Interval(0, GOOD), Interval(4, GOOD)),
    "three intervals": (Interval(0, GOOD), Interval(2, adapter_execution(B)), Interval(4, GOOD)),
    "no digest": (Interval(0, "abc"),),
    "an upper-case digest": (Interval(0, GOOD.upper()),),
    "a digest with a blank": (Interval(0, " " + GOOD[1:]),),
}


@pytest.mark.parametrize("history", MALFORMED.values(), ids=MALFORMED)
def test_a_history_that_is_none_is_refused(history: History) -> None:
    with pytest.raises(InternalFault) as caught:
        check_history(history)
    assert caught.value.code is ErrorCode.IDENTITY_INVALID
    with pytest.raises(InternalFault):
        KeyChain(ROOT, history, 4)


@pytest.mark.parametrize(("page_tokens", "position"), [(0, 0), (-1, 0), (4, -4), (4, 3), (4, 5)])
def test_a_chain_begins_between_blocks(page_tokens: int, position: int) -> None:
    with pytest.raises(InternalFault) as caught:
        KeyChain(ROOT, PLAIN, page_tokens, position)
    assert caught.value.code is ErrorCode.IDENTITY_INVALID


@pytest.mark.parametrize(("execution", "at"), [(None, 2), (adapter_execution(A), -1), ("no digest", None)])
def test_an_invocation_needs_an_adapter_and_a_position(execution: str | None, at: int | None) -> None:
    with pytest.raises(InternalFault) as caught:
        history_of(BASE, execution, at)
    assert caught.value.code is ErrorCode.IDENTITY_INVALID


def test_an_invocation_at_the_first_token_leaves_no_base_interval() -> None:
    assert invoked(A, 0) == always(A)


@pytest.mark.parametrize("at", [None, 0, 1, 5, 8, 9, 23])
def test_a_chain_makes_the_keys_that_blocks_have_singly(at: int | None) -> None:
    """Keys of many blocks at once, and in pieces, are those of `block_key`, block by block."""
    history = PLAIN if at is None else invoked(A, at)
    tokens, size = tuple(range(27)), 4
    parent, expected = ROOT, []
    for start in range(0, 24, size):
        acting = max((i for i in history if i.start < start + size), key=lambda i: i.start)
        acts_from = max(acting.start - start, 0)
        parent = block_key(
            parent, bytes.fromhex(acting.execution), acts_from, bits(tokens[start : start + size])
        )
        expected.append(parent)
    assert keys(history, tokens, size) == expected
    pieces = KeyChain(ROOT, history, size)
    assert pieces.extend(bits(tokens[:9])) + pieces.extend(bits(tokens[8:])) == expected
    assert (pieces.parent, pieces.position) == (expected[-1], 24)
