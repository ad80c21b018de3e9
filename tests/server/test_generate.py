"""Completions and chat: texts, streams, samples, stop strings, log probabilities, usage, withdrawals."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.server.rig import BASE, BASE_ABI, MAX_LEN, Front, error_of, run
from tests.waiting import LIMIT_S

from loraplex.core.errors import ErrorCode
from loraplex.core.messages import Abort, Finish, Submit
from loraplex.text.codec import SHORT_TEXT_CHARS


def test_completion_by_the_openai_client(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        answer = await front.openai.completions.create(model=BASE, prompt="hello w👩", max_tokens=20)
        assert answer.choices[0].text == "hello w👩"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        prompt = front.ids("hello w👩")
        counts = (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)
        assert counts == (len(prompt) + 1, len(prompt) + 1, 2 * len(prompt) + 2)
        assert answer.system_fingerprint == f"base:{BASE_ABI[:16]}"
        submit = front.engine.of(Submit)[0]
        assert np.frombuffer(submit.prompt, "<i4").tolist() == [0, *prompt]
        assert submit.sampling.stop_token_ids == (1, 2)
        assert submit.adapter is None

    run(tmp_path, test)


def test_stream_is_the_whole_in_pieces(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("日本語 hello 👩 STOP")
        stream = await front.openai.completions.create(
            model=BASE,
            prompt="x",
            max_tokens=99,
            stream=True,
            stop="ST",
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == "日本語 hello 👩 "
        assert "\ufffd" not in text
        assert len(chunks) > 4
        assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "stop"
        assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1].choices == []
        whole = (await front.complete(max_tokens=99, stop="ST")).json()
        assert whole["choices"][0]["text"] == text
        assert chunks[-1].usage is not None
        assert whole["usage"]["completion_tokens"] == chunks[-1].usage.completion_tokens

    run(tmp_path, test)


def test_stop_string_counts_up_to_its_match_and_finishes(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.script = lambda _: [t for c in "ok a-b-c never" for t in front.ids(c)]
        body = (await front.complete(max_tokens=50, stop=["zz", "a-b"])).json()
        assert body["choices"][0]["text"] == "ok "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 6
        assert [message.tokens for message in front.engine.of(Finish)] == [6]
        assert front.engine.of(Abort) == []

    run(tmp_path, test)


def test_prompts_in_four_forms_and_n(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        a, b = front.ids("hello"), front.ids("w")
        for prompt, texts in (
            ("hello", ["hello"]),
            (["hello", "w"], ["hello", "w"]),
            (a, ["hello"]),
            ([a, b], ["hello", "w"]),
        ):
            body = (await front.complete(prompt=prompt, n=2, seed=5, best_of=2)).json()
            assert [c["text"] for c in body["choices"]] == [t for t in texts for _ in range(2)]
            assert [c["index"] for c in body["choices"]] == list(range(2 * len(texts)))
        seeds = [m.sampling.seed for m in front.engine.of(Submit)][-4:]
        assert seeds[0] == seeds[2] == 5
        assert seeds[1] == seeds[3] != 5
        await front.complete(seed=(1 << 64) - 1)
        await front.complete(seed=-1)
        await front.complete()
        await front.complete(prompt=["hello", "hello"], n=2)
        last = [m.sampling.seed for m in front.engine.of(Submit)][-7:]
        assert last[0] == -1
        assert len(set(last)) == 7  # what has no seed of its own is drawn for each prompt and sample

    run(tmp_path, test)


def test_a_stop_string_may_spell_a_special_token(tmp_path: Path) -> None:
    """<|pad|> is special, leaves no text, and ends an answer for who asks for it; also beside text, and in
    chat.
    """

    async def test(front: Front) -> None:
        pad = 2
        front.supervisor.info["eos_token_ids"] = [1]
        front.engine.script = lambda _: [*front.ids("hello"), pad, *front.ids(" w"), pad, *front.ids("!"), 1]
        for stop, text, tokens in (
            ("<|pad|>", "hello", 2),
            (["zz", "<|pad|>"], "hello", 2),
            ("hello<|pad|>", "", 2),
            ("<|pad|> w<|", "hello", 4),
            ("<|pad|>!", "hello w", 5),
            ("pad", "hello w!", 6),
            ("o w", "hell", 3),
            ("<|start|>", "hello w!", 6),
        ):
            body = (await front.complete(max_tokens=20, stop=stop)).json()
            choice = body["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop"), stop
            assert body["usage"]["completion_tokens"] == tokens, stop
        chat = (await front.chat(max_tokens=20, stop="<|pad|>")).json()["choices"][0]
        assert (chat["message"]["content"], chat["finish_reason"]) == ("hello", "stop")
        whole = (await front.complete(max_tokens=20, stop="<|end|>", ignore_eos=True)).json()["choices"][0]
        assert (whole["text"], whole["finish_reason"]) == ("hello w!", "stop")

    run(tmp_path, test)


def test_completion_logprobs_and_echo(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        body = (await front.complete(prompt="hello w", max_tokens=2, logprobs=2, echo=True)).json()
        choice = body["choices"][0]
        scored = choice["logprobs"]
        assert choice["text"] == "hello whello w"
        assert scored["tokens"] == ["<|start|>", "hello", " w", "hello", " w"]
        assert scored["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
        assert scored["top_logprobs"][0] is None
        assert set(scored["top_logprobs"][-1]) == {" w", front.codec.token_text(100)}  # type: ignore[union-attr]
        assert scored["text_offset"] == [0, 9, 14, 16, 21]
        plain = (await front.complete(prompt="hello w", max_tokens=2, logprobs=0)).json()["choices"][0]
        assert plain["logprobs"]["tokens"] == ["hello", " w"]
        assert plain["logprobs"]["top_logprobs"] == [{"hello": -0.25}, {" w": -0.25}]
        echoed = (await front.complete(prompt="hello w", max_tokens=1, logprobs=0, echo=True)).json()[
            "choices"
        ][0]
        assert echoed["logprobs"]["top_logprobs"] == [None, {"hello": -0.25}, {" w": -0.25}, {"hello": -0.25}]
        events = await front.events("/v1/completions", prompt="hello w", max_tokens=2, logprobs=2, echo=True)
        parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
        assert [t for part in parts for t in part["tokens"]] == scored["tokens"]
        assert [o for part in parts for o in part["text_offset"]] == scored["text_offset"]
        assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]

    run(tmp_path, test)


def test_echo_alone_scores_a_prompt(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        body = (await front.complete(prompt="hello w", max_tokens=0, logprobs=1, echo=True)).json()
        assert body["choices"][0]["text"] == "hello w"
        assert body["choices"][0]["logprobs"]["tokens"] == ["<|start|>", "hello", " w"]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0
        assert error_of(await front.complete(max_tokens=0)) == (400, "invalid_sampling", "max_tokens")

    run(tmp_path, test)


def test_chat_by_the_openai_client(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("日本 hello")
        answer = await front.openai.chat.completions.create(
            model=BASE,
            messages=[
                {"role": "system", "content": "be"},
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
            ],
            logprobs=True,
            top_logprobs=2,
        )
        assert answer.choices[0].message.content == "日本 hello"
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
        assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == "日本 hello<|end|>"
        assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
        assert content[0].top_logprobs[0].token == content[0].token
        submit = front.engine.of(Submit)[0]
        prompt = np.frombuffer(submit.prompt, "<i4").tolist()
        assert front.codec is not None
        assert (
            front.codec.decode(prompt, skip_special=False)
            == "<|start|>[system]be<|end|>[user]h\ni<|end|>[assistant]"
        )
        assert submit.sampling.max_tokens == MAX_LEN - len(prompt)
        await front.chat(max_completion_tokens=7)
        await front.chat(max_tokens=6)
        assert [m.sampling.max_tokens for m in front.engine.of(Submit)[1:]] == [7, 6]

    run(tmp_path, test)


def test_chat_stream(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("hello 👩")
        stream = await front.openai.chat.completions.create(
            model=BASE,
            messages=[{"role": "user", "content": "x"}],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        for index in range(2):
            mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
            assert mine[0].delta.role == "assistant"
            assert "".join(c.delta.content or "" for c in mine) == "hello 👩"
            assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2 * (len(front.ids("hello 👩")) + 1)
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}

    run(tmp_path, test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_away_withdraws_its_requests(tmp_path: Path, path: str, stream: bool) -> None:
    async def test(front: Front) -> None:
        front.engine.hold.clear()
        body: dict[str, Any] = {"model": BASE, "n": 2, "stream": stream}
        body |= (
            {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        )
        raw, gone = json.dumps(body).encode(), asyncio.Event()
        first = True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": raw, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path,
            "headers": [(b"content-type", b"application/json")]
        }  # fmt: skip
        serving = asyncio.ensure_future(front.app(scope, receive, send))
        await front.engine.submitted.wait()
        assert len(front.engine.running) == 2
        gone.set()
        await front.engine.withdrawn.wait()
        await serving
        assert len(front.engine.of(Abort)) == 2
        assert sent[0]["status"] == 499  # who closed only its own side may read it
        metrics = (await front.http.get("/metrics")).text
        assert f'endpoint="{path[4:].replace("/", "_")}",outcome="aborted"}} 1.0' in metrics

    run(tmp_path, test)


def test_disconnect_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.script = lambda _: front.ids("h") * 150
        gone, body = asyncio.Event(), b'{"model":"base-model","prompt":"a","stream":true,"max_tokens":150}'
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        count = 0

        async def send(message: Any) -> None:
            nonlocal count
            count += 1
            if count == 3:
                gone.set()
            await asyncio.sleep(0)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await front.app(scope, receive, send)
        assert count < 10
        assert len(front.engine.of(Abort)) == 1

    run(tmp_path, test)


def test_error_before_the_first_token_has_its_status(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.queue_full = True
        for stream in (False, True):
            response = await front.complete(stream=stream)
            assert error_of(response) == (429, "queue_full", None)
            assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            await front.openai.completions.create(model=BASE, prompt="a")

    run(tmp_path, test)


def test_error_inside_a_stream_is_an_event(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.fail_after = (2, ErrorCode.NUMERIC_FAULT)
        events = await front.events("/v1/completions", prompt="hello w hello w")
        assert events[-1]["error"]["code"] == "numeric_fault"
        assert events[0]["choices"][0]["text"] == "hello"
        with pytest.raises(openai.APIError):
            async for _ in await front.openai.completions.create(model=BASE, prompt="hello w w", stream=True):
                pass
        assert error_of(await front.complete(prompt="hello w w"))[:2] == (500, "numeric_fault")

    run(tmp_path, test)


def test_a_folder_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        body = (await front.complete(prompt=[5, 6], return_token_ids=True, logprobs=0)).json()
        choice = body["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["prompt_token_ids"]) == ("", [5, 6, 1], [5, 6])
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:1"]
        assert error_of(await front.complete(prompt="a")) == (400, "tokenizer_missing", "prompt")
        assert error_of(await front.complete(prompt=[5], stop="x")) == (400, "tokenizer_missing", "stop")
        assert error_of(await front.chat()) == (400, "tokenizer_missing", "messages")

    run(tmp_path, test, text=False)


def test_options_reach_the_engine(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await front.complete(
            max_tokens=3,
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            seed=3,
            repetition_penalty=1.5,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"5": 2, "3": -1},
            ignore_eos=True,
            priority=-4,
            ttft_deadline_ms=250,
            user="u",
        )
        message = front.engine.of(Submit)[0]
        sampling = message.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (3, 0.0, 0.5, 7)
        assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 3, 1.5)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
        assert sampling.logit_bias == ((3, -1.0), (5, 2.0))
        assert sampling.stop_token_ids == ()
        assert message.priority == -4
        assert message.deadline_ns - message.arrival_ns == 250_000_000

    run(tmp_path, test)


def test_both_ways_to_say_that_top_k_is_off(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for given in (0, -1, None):
            assert (await front.complete(top_k=given)).status_code == 200
            assert (await front.chat(top_k=given)).status_code == 200
        assert [message.sampling.top_k for message in front.engine.of(Submit)] == [0] * 6

    run(tmp_path, test)


def test_a_long_prompt_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        assert front.codec is not None
        encode, others_are_done = front.codec.encode, threading.Event()

        def slow(text: str, add_special: bool = True) -> list[int]:
            if len(text) > SHORT_TEXT_CHARS:
                assert others_are_done.wait(LIMIT_S / 2), "the event loop waits for the tokenizer"
                return [70, 71]
            return encode(text, add_special)

        monkeypatch.setattr(front.codec, "encode", slow)
        monkeypatch.setattr(front.codec, "surely_exceeds", lambda text, tokens: False)
        long = "x" * (SHORT_TEXT_CHARS + 1)
        messages = [{"role": "user", "content": long}]
        waiting = [
            asyncio.ensure_future(front.complete(prompt=long)),
            asyncio.ensure_future(front.chat(messages=messages)),
        ]
        for _ in range(3):
            assert (await front.complete(prompt="hello")).status_code == 200
        others_are_done.set()
        assert [(await answer).status_code for answer in waiting] == [200, 200]

    run(tmp_path, test)


def test_a_text_that_cannot_fit_is_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        def never(*_: object) -> list[int]:
            raise AssertionError("it was tokenised")

        assert front.codec is not None
        monkeypatch.setattr(front.codec, "encode", never)
        long = "x" * 100_000
        refused = await front.complete(prompt=["a", long][1:])
        assert error_of(refused) == (400, "context_length_exceeded", "prompt")
        refused = await front.chat(messages=[{"role": "user", "content": long}])
        assert error_of(refused) == (400, "context_length_exceeded", "messages")
        many = [{"role": "user", "content": "x"}] * 5000
        assert error_of(await front.chat(messages=many)) == (400, "invalid_request", "messages")

    run(tmp_path, test)
