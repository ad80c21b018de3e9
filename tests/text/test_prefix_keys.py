"""What a client says of a prompt's KV rows: where an adapter is invoked, under which history, with which
keys.
"""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.core.messages import RegisterAdapter
from loraplex.identity.cache import KEY_BYTES, KeyChain, cache_root
from loraplex.identity.canonical import digest
from loraplex.identity.execution import Interval, adapter_execution, base_execution
from loraplex.text.prefix_keys import (
    NOT_INVOKED,
    Acting,
    CacheTerms,
    PromptKeys,
    invocation_at,
    invocation_missing,
    prompt_keys,
)

BASE, CACHE = digest("base"), digest("cache")
INFO = {"base_abi": BASE, "cache_abi": CACHE, "graph_revision": 1, "page_tokens": 2, "prefix_cache": True}
TERMS = CacheTerms.of(INFO)
OFF = CacheTerms.of({**INFO, "prefix_cache": False})
PROMPT = [11, 12, 13, 14, 99, 100, 15]
INVOCATION = (99, 100)


def acting(name: str, invocation: tuple[int, ...] = ()) -> Acting:
    return Acting(adapter_execution(digest(name)), invocation)


def keys(
    who: Acting | None, tokens: list[int] = PROMPT, namespace: str = "t", terms: CacheTerms = TERMS
) -> PromptKeys:
    at = NOT_INVOKED if who is None else invocation_at(tokens, who)
    assert at is not None
    return prompt_keys(tokens, who, at, terms, namespace)


def blocks(made: PromptKeys) -> list[bytes]:
    return [made.block_keys[at : at + KEY_BYTES] for at in range(0, len(made.block_keys), KEY_BYTES)]


def test_keys_are_the_chain_of_the_full_blocks() -> None:
    made = keys(None)
    chain = KeyChain(cache_root(CACHE, 1, "t"), made.history, 2)
    assert blocks(made) == chain.extend(np.array(PROMPT, "<i4").tobytes())
    assert len(blocks(made)) == len(PROMPT) // 2
    assert made.history == (Interval(0, base_execution(BASE)),)


def test_activated_adapters_share_the_base_up_to_their_invocation() -> None:
    base, one, two = keys(None), keys(acting("a", INVOCATION)), keys(acting("b", INVOCATION))
    assert one.invoked_at == two.invoked_at == 4
    assert blocks(base)[:2] == blocks(one)[:2] == blocks(two)[:2]
    assert len({blocks(base)[2], blocks(one)[2], blocks(two)[2]}) == 3
    assert [interval.start for interval in one.history] == [0, 4]


def test_an_adapter_that_is_always_on_shares_nothing_with_the_base() -> None:
    assert not set(blocks(keys(acting("a")))) & set(blocks(keys(None)))


def test_one_that_changes_no_row_shares_everything() -> None:
    assert blocks(keys(Acting(base_execution(BASE), ()))) == blocks(keys(None))


def test_namespaces_share_nothing() -> None:
    assert not set(blocks(keys(None, namespace="t"))) & set(blocks(keys(None, namespace="u")))


def test_without_a_cache_there_are_no_keys_and_the_history_stays() -> None:
    who = acting("a", INVOCATION)
    assert keys(who, terms=OFF).block_keys == b""
    assert keys(who, terms=OFF).history == keys(who).history


def test_a_prompt_below_one_block_has_no_keys() -> None:
    assert keys(None, [11]).block_keys == b""


def test_what_a_registration_says_acts() -> None:
    key = digest("semantic")
    plain = RegisterAdapter(0, key, key, 1, (), (), 1)
    assert Acting.of(plain) == Acting(adapter_execution(key), ())
    told = RegisterAdapter(0, key, key, 1, (), (), 1, execution=base_execution(BASE), invocation=(5,))
    assert Acting.of(told) == Acting(base_execution(BASE), (5,))


@pytest.mark.parametrize("tokens", [[], [99], [100, 99], [99, 1, 100]])
def test_a_prompt_without_the_invocation_has_no_position(tokens: list[int]) -> None:
    assert invocation_at(tokens, acting("a", INVOCATION)) is None
    assert invocation_at(tokens, acting("a")) == NOT_INVOKED


def test_the_refusal_names_what_is_missing() -> None:
    error = invocation_missing("judge@2", range(20), "<|judge|>", "messages")
    assert error.param == "messages"
    for part in ("judge@2", "'<|judge|>'", "[0, 1, 2, 3, 4, 5, 6, 7, ...]", '"base"'):
        assert part in error.message
