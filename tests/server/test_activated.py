"""Activated adapters over HTTP: where they are invoked, who answers without, what a conversation
ends with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.rig import BASE, BASE_ABI, CACHE_ABI, Front, error_of, run

from loraplex.core.messages import RegisterAdapter, Submit
from loraplex.identity.cache import KEY_BYTES, KeyChain, cache_root
from loraplex.identity.digests import invocation_policy
from loraplex.identity.execution import Interval, adapter_execution, base_execution

MISSING = (400, "invocation_missing")


async def judge(front: Front, suffix: str | None = None) -> dict[str, Any]:
    answer = await front.http.put(
        "/v1/adapters/judge", json={"source": front.activated("judge", "[judge]", suffix)}
    )
    assert answer.status_code == 201, answer.text
    adapter: dict[str, Any] = answer.json()
    return adapter


def submitted(front: Front) -> Submit:
    last: Submit = front.engine.of(Submit)[-1]
    return last


def text_of(front: Front, submit: Submit) -> str:
    assert front.codec is not None
    return front.codec.decode(np.frombuffer(submit.prompt, "<i4").tolist(), skip_special=False)


def test_what_is_registered_and_shown(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        adapter = await judge(front, "[judge]")
        tokens = front.ids("[judge]")
        assert (adapter["invocation_tokens"], adapter["chat_suffix"]) == (tokens, "[judge]")
        assert adapter["shares"] == {
            "kv": "before_invocation",
            "hidden": "before_invocation",
            "logits": "before_invocation",
            "sampling": "never",
        }
        (register,) = front.engine.of(RegisterAdapter)
        assert register.invocation == tuple(tokens)
        plain = await front.http.put("/v1/adapters/plain", json={"source": front.source("plain")})
        assert (plain.json()["invocation_tokens"], plain.json()["shares"]["kv"]) == ([], "never")
        stored = front.adapters.catalog.current(front.adapters.target("judge", "default")).artifact
        assert stored.activation == invocation_policy(tokens)

    run(tmp_path, test)


def test_the_last_invocation_counts(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await judge(front)
        for prompt in ("hello[judge]", "[judge]hello[judge] hello", "[judge]"):
            answer = await front.complete(model="judge", prompt=prompt)
            assert answer.status_code == 200, answer.text
            assert answer.json()["system_fingerprint"].startswith("judge@1:")
            sent, before = submitted(front), prompt[: prompt.rindex("[judge]")]
            assert sent.invoked_at == 1 + len(front.ids(before))  # behind the BOS
            assert sent.adapter is not None
        await front.complete(prompt="hello[judge]")
        assert (submitted(front).invoked_at, submitted(front).adapter) == (-1, None)

    run(tmp_path, test)


def test_without_an_invocation_it_is_refused(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await judge(front, "[judge]")
        tokens = front.ids("[judge]")
        for prompt in (
            "hello",
            "[Judge]",
            "[judge",
            [5, 6],
            tokens[1:],
            [*tokens[:2], 9, *tokens[2:]],
            [tokens[:-1]],
        ):
            answer = await front.complete(model="judge", prompt=prompt)
            assert error_of(answer) == (*MISSING, "prompt")
            assert "'[judge]'" in answer.json()["error"]["message"]
        mixed = await front.complete(model="judge", prompt=["hello", "hello[judge]"])
        assert error_of(mixed) == (*MISSING, "prompt")
        assert front.engine.of(Submit) == []

    run(tmp_path, test)


def test_embeddings_as_a_prompt_are_refused(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await judge(front, "[judge]")
        for given in ({"prompt_embeds": "AAAA"}, {"prompt": [[0.5, 0.25]]}, {"inputs_embeds": [[0.5]]}):
            answer = await front.complete(**{"model": "judge", "prompt": "hello[judge]", **given})
            assert answer.status_code == 400
            assert error_of(answer)[2] == next(iter(given))
        assert front.engine.of(Submit) == []

    run(tmp_path, test)


def test_the_base_answers_only_where_it_is_asked_for_by_name(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        adapter = await judge(front)
        answer = await front.complete(model="judge", alora_fallback="base")
        assert answer.json()["system_fingerprint"] == f"base:{BASE_ABI[:16]}"
        assert answer.headers["x-loraplex-model"] == BASE
        assert answer.headers["x-loraplex-semantic-digest"] == BASE_ABI
        assert (submitted(front).adapter, submitted(front).invoked_at) == (None, -1)
        streamed = await front.events("/v1/completions", model="judge", prompt="hi", alora_fallback="base")
        assert {event["system_fingerprint"] for event in streamed} == {f"base:{BASE_ABI[:16]}"}
        invoked = await front.complete(model="judge", prompt="hello[judge]", alora_fallback="base")
        assert invoked.json()["system_fingerprint"] == f"judge@1:{adapter['semantic_digest'][:16]}"
        before = len(front.engine.of(Submit))
        mixed = await front.complete(model="judge", prompt=["hello", "hello[judge]"], alora_fallback="base")
        assert error_of(mixed) == (*MISSING, "prompt")
        assert len(front.engine.of(Submit)) == before
        await front.http.put("/v1/adapters/plain", json={"source": front.source("plain")})
        plain = await front.complete(model="plain", alora_fallback="base")
        assert plain.json()["system_fingerprint"].startswith("plain@1:")

    run(tmp_path, test)


@pytest.mark.parametrize("suffix", [None, "[judge]"])
def test_a_conversation_ends_with_the_suffix_of_the_card(tmp_path: Path, suffix: str | None) -> None:
    async def test(front: Front) -> None:
        await judge(front, suffix)
        answer = await front.chat(model="judge")
        if suffix is None:
            assert error_of(answer) == (*MISSING, "messages")
        else:
            assert answer.status_code == 200, answer.text
            assert text_of(front, submitted(front)) == "<|start|>[user]hello<|end|>[judge]"
            assert submitted(front).invoked_at == len(front.ids("<|start|>[user]hello<|end|>"))
        said = [{"role": "user", "content": "hello[judge]"}]
        body = {"model": "judge", "messages": said}
        answer = await front.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        await front.chat()
        assert text_of(front, submitted(front)) == "<|start|>[user]hello<|end|>[assistant]"

    run(tmp_path, test)


def test_keys_follow_history_and_namespace(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        adapter = await judge(front)
        for model, prompt in (("judge", "hello hello[judge]"), (BASE, "hello hello[judge]")):
            answer = await front.complete(model=model, prompt=prompt, n=2)
            first, second = front.engine.of(Submit)[-2:]
            assert first.block_keys == second.block_keys
            assert first.namespace == "default"
            tokens = np.frombuffer(first.prompt, "<i4")
            found = (await front.http.get(f"/v1/requests/{answer.headers['x-request-id']}/provenance")).json()
            assert (found["cache_abi"], found["graph_revision"]) == (CACHE_ABI, 1)
            assert found["cache_namespace"] == "default"
            starts = [(0, base_execution(BASE_ABI))]
            if model == "judge":
                starts.append((first.invoked_at, adapter_execution(adapter["semantic_digest"])))
            for choice in found["choices"]:
                assert [tuple(interval) for interval in choice["history"]] == starts
            chain = KeyChain(cache_root(CACHE_ABI, 1, "default"), tuple(Interval(*s) for s in starts), 4)
            assert first.block_keys == b"".join(chain.extend(tokens.tobytes()))
            assert len(first.block_keys) == KEY_BYTES * (len(tokens) // 4)

    run(tmp_path, test)


def test_an_engine_without_a_cache_is_sent_no_keys(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.supervisor.info["prefix_cache"] = False
        await judge(front)
        await front.complete(model="judge", prompt="hello hello[judge]")
        assert submitted(front).block_keys == b""
        assert submitted(front).invoked_at > 0

    run(tmp_path, test)
