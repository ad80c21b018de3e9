"""Fields that clients of OpenAI's and vLLM's interfaces send: what asks for nothing is accepted, the rest
done or refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.rig import BASE, MAX_LEN, Front, error_of, run

from loraplex.core.messages import Submit

NOTHING: list[dict[str, Any]] = [
    {"store": False}, {"service_tier": "auto"}, {"service_tier": "default"}, {"metadata": {}},
    {"min_tokens": 0},
    {"skip_special_tokens": True}, {"stop_token_ids": []}, {"use_beam_search": False},
    {"length_penalty": 1.0},
    {"allowed_token_ids": None}, {"bad_words": []}, {"stream_options": None},
    {"truncate_prompt_tokens": None},
    {"structured_outputs": None}, {"guided_json": None}, {"safety_identifier": "u"},
    {"prompt_cache_key": "k"},
    {"include_stop_str_in_output": False}, {"structured_outputs": {}},
    {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": True}},
]  # fmt: skip
CHAT_NOTHING: list[dict[str, Any]] = [
    {"parallel_tool_calls": False}, {"modalities": ["text"]}, {"top_logprobs": 0}, {"tools": []},
    {"tool_choice": "none"}, {"functions": []},
    {"messages": [{"role": "user", "name": "ann", "content": [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}]},
]  # fmt: skip
SOMETHING: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"), ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"),
]  # fmt: skip


def test_what_asks_for_nothing_changes_nothing_and_what_asks_is_refused_by_name(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for body in NOTHING:
            for ask in (front.complete, front.chat):
                assert (await ask(**body)).status_code == 200, body
        assert (await front.complete(suffix="")).status_code == 200
        for body in CHAT_NOTHING:
            assert (await front.chat(**body)).status_code == 200, body
        for body, field in SOMETHING:
            for ask in (front.complete, front.chat):
                assert error_of(await ask(**body)) == (400, "unsupported_option", field)
        assert error_of(await front.complete(suffix="x")) == (400, "unsupported_option", "suffix")

    run(tmp_path, test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_counts_tokens_where_that_is_asked(tmp_path: Path, path: str) -> None:
    async def test(front: Front) -> None:
        front.say("ab")
        asks = (
            {"prompt": "hello"}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "hello"}]}
        )
        options = {"continuous_usage_stats": True}
        events = await front.events(path, **asks, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 3
        assert events[-1]["choices"] == []

    run(tmp_path, test)


def test_special_tokens_and_stop_strings_stay_where_that_is_asked(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.script = lambda _: [*front.ids("a"), 2, *front.ids("bSTOPc"), 1]

        async def text(**body: Any) -> str:
            return str((await front.complete(**body)).json()["choices"][0]["text"])

        assert front.service.engine_info["eos_token_ids"] == [1, 2]
        assert await text(ignore_eos=True) == "abSTOPc"
        assert await text(ignore_eos=True, skip_special_tokens=False) == "a<|pad|>bSTOPc<|end|>"
        assert await text(ignore_eos=True, stop="STOP") == "ab"
        assert await text(ignore_eos=True, stop="STOP", include_stop_str_in_output=True) == "abSTOP"
        for stop, kept in (
            ("<|pad|>", "a<|pad|>"), ("a<|pad|>b", "a<|pad|>b"), ("<|pad|>bS", "a<|pad|>bS"), ("ab", "ab"),
        ):  # fmt: skip
            assert await text(ignore_eos=True, stop=stop, include_stop_str_in_output=True) == kept
            assert await text(ignore_eos=True, stop=stop) == kept.removesuffix(stop)
            events = await front.events(
                "/v1/completions",
                prompt="hello",
                ignore_eos=True,
                stop=[stop],
                include_stop_str_in_output=True,
            )
            assert "".join(event["choices"][0]["text"] for event in events) == kept
        (b,) = front.ids("b")
        front.engine.sent.clear()
        stopped = (await front.complete(stop_token_ids=[b], ignore_eos=True)).json()["choices"][0]
        assert (stopped["text"], stopped["finish_reason"]) == ("a", "stop")
        assert stopped["stop_reason"] == b
        for ask in (front.complete, front.chat):
            answer = (await ask(ignore_eos=True, stop=["STOP", "no"])).json()["choices"][0]
            assert answer["stop_reason"] == "STOP"
        assert "stop_reason" not in (await front.complete()).json()["choices"][0]
        kept = await text(stop_token_ids=[b], ignore_eos=True, include_stop_str_in_output=True)
        assert kept == "ab"
        assert front.engine.of(Submit)[0].sampling.stop_token_ids == (b,)

    run(tmp_path, test)


def test_prompts_are_cut_and_begun_as_asked(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        async def prompt(**body: Any) -> list[int]:
            front.engine.sent.clear()
            assert (await front.complete(**body)).status_code == 200
            return [int(token) for token in np.frombuffer(front.engine.of(Submit)[0].prompt, "<i4")]

        whole = await prompt()
        assert whole[0] == 0
        assert await prompt(add_special_tokens=False) == whole[1:]
        assert await prompt(truncate_prompt_tokens=1) == whole[-1:]
        assert await prompt(prompt="x" * MAX_LEN, truncate_prompt_tokens=5, max_tokens=3) == front.ids(
            "xxxxx"
        )
        assert await prompt(truncate_prompt_tokens=-1) == whole
        long = await front.complete(prompt="x" * (MAX_LEN + 5), truncate_prompt_tokens=-1, max_tokens=1)
        assert error_of(long)[1] == "context_length_exceeded"
        assert f"({MAX_LEN} in the prompt" in long.json()["error"]["message"]
        for value in (0, -2):
            wrong = await front.complete(truncate_prompt_tokens=value)
            assert error_of(wrong) == (400, "invalid_request", "truncate_prompt_tokens")

    run(tmp_path, test)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'start: "yes"'),
    ({"structured_outputs": {"regex": "[a-z]{3}"}}, "[a-z]{3}"),
    ({"structured_outputs": {"json": {"type": "integer"}}}, "integer"),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, "integer"),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, '"a"'),
    ({"guided_grammar": 'root ::= "a" | "b"'}, '"a"'),
    ({"guided_choice": ["yes", "no"]}, 'start: "yes"'),
    ({"guided_regex": "[a-z]{3}"}, "[a-z]{3}"),
    ({"guided_json": {"type": "integer"}}, "integer"),
]


def test_an_answer_is_held_to_the_form_that_is_asked(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for body, words in FORMS:
            for ask in (front.complete, front.chat):
                front.engine.sent.clear()
                response = await ask(**body)
                assert response.status_code == 200, response.text
                assert words in (front.engine.of(Submit)[0].grammar or "")
        for body, code, field in (
            ({"guided_regex": "(a"}, "schema_unsupported", "guided_regex"),
            ({"guided_grammar": "start: nowhere"}, "schema_unsupported", "guided_grammar"),
            ({"guided_grammar": "start: %json {}"}, "schema_unsupported", "guided_grammar"),
            ({"structured_outputs": {"choice": []}}, "schema_unsupported", "structured_outputs.choice"),
            ({"structured_outputs": {"json": "{"}}, "invalid_request", "structured_outputs.json"),
            (
                {"structured_outputs": {"regex": "a", "choice": ["a"]}},
                "invalid_request",
                "structured_outputs.regex",
            ),
            ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_request", "guided_regex"),
            (
                {"guided_regex": "a", "response_format": {"type": "json_object"}},
                "invalid_request",
                "guided_regex",
            ),
        ):
            assert error_of(await front.complete(**body)) == (400, code, field)

    run(tmp_path, test)


def test_errors_have_the_words_that_clients_look_for(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for response in (
            await front.complete(max_tokens=MAX_LEN),
            await front.chat(messages=[{"role": "user", "content": "x" * 9 * MAX_LEN}]),
        ):
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"maximum context length is {MAX_LEN} tokens" in error["message"]
        body = {"lora_name": "a", "lora_path": front.source("a")}
        assert (await front.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
        again = await front.http.post("/v1/load_lora_adapter", json=body)
        assert again.status_code == 400
        assert "has already been loaded" in again.json()["error"]["message"]
        nowhere = {**body, "lora_name": "b", "lora_path": str(front.roots / "nowhere")}
        assert error_of(await front.http.post("/v1/load_lora_adapter", json=nowhere))[0] == 404

    run(tmp_path, test)


def test_loads_take_the_fields_of_other_servers(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        more = {"base_model_name": f"owner/{BASE}", "lora_int_id": 3, "is_3d_lora_weight": False}
        body = {"lora_name": "a", "lora_path": front.source("a"), **more}
        assert (await front.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
        listed = (await front.http.get("/v1/models/a")).json()
        revision = front.adapters.catalog.get(next(iter(front.adapters)).alias_key)
        assert revision is not None
        assert listed["created"] == revision.at_ms // 1000
        for wrong, code, field in (
            ({"base_model_name": "another"}, "invalid_request", "base_model_name"),
            ({"is_3d_lora_weight": True}, "unsupported_option", "is_3d_lora_weight"),
        ):
            refused = await front.http.post("/v1/load_lora_adapter", json={**body, "lora_name": "b", **wrong})
            assert error_of(refused) == (400, code, field)
        gone = await front.http.post("/v1/unload_lora_adapter", json={"lora_name": "a", **more})
        assert gone.status_code == 200

    run(tmp_path, test)


def test_no_model_is_the_base_where_there_is_one_tenant(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        answer = await front.http.post("/v1/completions", json={"prompt": "hello"})
        assert (answer.status_code, answer.json()["model"]) == (200, BASE)

    run(tmp_path, test)


def test_no_model_is_refused_where_tenants_may_mean_different_ones(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        headers = {"authorization": "Bearer one"}
        answer = await front.http.post("/v1/completions", json={"prompt": "hello"}, headers=headers)
        assert error_of(answer) == (400, "invalid_request", "model")

    keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": key} for key in ("one", "two")]
    (tmp_path / "keys").write_text("\n".join(map(json.dumps, keys)))
    run(tmp_path, test, api_key_file=str(tmp_path / "keys"))


def test_a_conversation_ends_as_asked(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "STOP w"}]

        async def prompt(**body: Any) -> str:
            front.engine.sent.clear()
            response = await front.chat(messages=talk, **body)
            assert response.status_code == 200, response.text
            ids = np.frombuffer(front.engine.of(Submit)[0].prompt, "<i4").tolist()
            assert front.codec is not None
            return front.codec.decode(ids, skip_special=False)

        whole = "<|start|>[user]hello<|end|>[assistant]STOP w<|end|>"
        assert await prompt() == whole + "[assistant]"
        assert await prompt(add_generation_prompt=False) == whole
        assert await prompt(continue_final_message=True) == whole.removesuffix("<|end|>")
        assert (
            await prompt(chat_template_kwargs={"bos_token": "h"})
            == whole.replace("<|start|>", "h") + "[assistant]"
        )
        for body, field in (
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ):
            refused = await front.chat(messages=talk, **body)
            assert error_of(refused) == (400, "invalid_request", field)
        for last in ([], [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]):
            body = {"messages": last, "continue_final_message": True}
            for nothing in (await front.http.post("/tokenize", json=body), await front.chat(**body)):
                assert nothing.status_code == 400, nothing.text
        shown = {"messages": talk, "continue_final_message": True}
        ids = (await front.http.post("/tokenize", json=shown)).json()["tokens"]
        assert (await front.http.post("/detokenize", json={"tokens": ids})).json()["prompt"] == whole[:-7]

    run(tmp_path, test)
