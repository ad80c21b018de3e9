"""POST /v1/responses: chat's generation in items and events, through the `openai` client and raw."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.server.rig import BASE, Front, error_of, run
from tests.text.tools.tool_cases import CLOCK, HERMES_TEMPLATE, WEATHER

from loraplex.core import limits
from loraplex.core.errors import ErrorCode
from loraplex.core.messages import Submit
from loraplex.text.chat_template import ChatTemplate

PATH = "/v1/responses"
TOOLS: Any = [
    {"type": "function", **tool.as_template()["function"], "strict": True} for tool in (WEATHER, CLOCK)
]
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
CLOCKS = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BAD, OPTION, SCHEMA = (400, "invalid_request"), (400, "unsupported_option"), (400, "schema_unsupported")


def serve(folder: Path, test: Callable[[Front], Awaitable[None]]) -> None:
    """A server over a model that knows tools, and room for prompts with them."""

    async def over(front: Front) -> None:
        front.supervisor.info["max_model_len"] = 6000
        assert front.codec is not None
        front.codec._template = ChatTemplate(HERMES_TEMPLATE, {})
        await test(front)

    run(folder, over)


def submitted(front: Front) -> Submit:
    found: Submit = front.engine.of(Submit)[-1]
    return found


def prompt(front: Front) -> str:
    """The latest prompt as text."""
    assert front.codec is not None
    return front.codec.decode(list(memoryview(submitted(front).prompt).cast("i")), skip_special=False)


async def events(front: Front, **body: Any) -> list[dict[str, Any]]:
    """A stream's events, each under its own name and numbered, with no end mark."""
    response = await front.respond(stream=True, **body)
    assert response.status_code == 200, response.text
    found = []
    for text in response.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def told(found: list[dict[str, Any]]) -> list[str]:
    """Kinds of events; what comes piece by piece once."""
    kinds = [event["type"].removeprefix("response.") for event in found]
    return [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]


def test_a_text_is_answered_as_the_client_reads_it(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("Hi there.")
        front.engine.reused = lambda _: 4
        answer = await front.openai.responses.create(model=BASE, input="hello", instructions="Be brief.")
        assert (answer.output_text, answer.status, answer.error) == ("Hi there.", "completed", None)
        assert (answer.object, answer.model, answer.instructions) == ("response", BASE, "Be brief.")
        assert answer.id.startswith("resp_")
        (message,) = answer.output
        assert (message.type, message.status) == ("message", "completed")
        usage = answer.usage
        assert usage is not None
        ids = memoryview(submitted(front).prompt).cast("i")
        assert (usage.input_tokens, usage.output_tokens) == (len(ids), len(front.ids("Hi there.")) + 1)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert usage.input_tokens_details.cached_tokens == 4
        assert usage.output_tokens_details.reasoning_tokens == 0
        assert answer.to_dict()["store"] is False
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        asked = prompt(front)
        await front.chat(messages=said)
        assert prompt(front) == asked

    run(tmp_path, test)


def test_a_stream_tells_of_items_parts_and_the_whole(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("Hi there.")
        found = await events(front, instructions="Be brief.", metadata={"a": "b"})
        assert told(found) == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "Hi there."
        assert len(deltas) > 3
        assert {event.get("item_id") for event in found[3:-2]} == {found[2]["item"]["id"]}
        begun, whole = found[0]["response"], found[-1]["response"]
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
        assert (whole["status"], whole["output"]) == ("completed", [found[-2]["item"]])
        once = (await front.respond(instructions="Be brief.", metadata={"a": "b"})).json()
        assert once["metadata"] == {"a": "b"}

        def lasting(response: dict[str, Any]) -> dict[str, Any]:
            output = [{**item, "id": None} for item in response["output"]]
            return {**response, "id": None, "output": output, "created_at": None}

        assert lasting(whole) == lasting(once)

    run(tmp_path, test)


def test_the_client_s_stream_helper_reads_text_and_calls(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(f"I look. {CALL}\n{CLOCKS}")
        async with front.openai.responses.stream(model=BASE, input="Weather?", tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds
        assert final.output_text == "I look."
        calls = [item for item in final.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("get_weather", OSLO), ("clock", "{}")]

    serve(tmp_path, test)


def test_calls_are_items_and_go_back_in_with_their_results(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(f"I look. {CALL}\n{CLOCKS}")
        found = await events(front, input="Weather?", tools=TOOLS)
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert told(found)[7:] == ["output_item.done", *call, *call, "completed"]
        whole = found[-1]["response"]
        assert [item["type"] for item in whole["output"]] == ["message", "function_call", "function_call"]
        deltas = [
            event["delta"]
            for event in found
            if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == 1
        ]
        assert "".join(deltas) == whole["output"][1]["arguments"] == OSLO
        answer = await front.openai.responses.create(model=BASE, input="Weather?", tools=TOOLS)
        front.say("Rain.")
        calls = [item for item in answer.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "wet"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "noon"}],
            },
        ]
        first: Any = {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
        read: Any = [item.to_dict() for item in answer.output]
        read[0]["content"][0]["parsed"] = read[1]["parsed_arguments"] = {"city": "Oslo"}
        for output in (answer.output, read):
            again: Any = [first, {"type": "reasoning", "id": "rs", "summary": []}, *output, *results]
            final = await front.openai.responses.create(model=BASE, input=again, tools=TOOLS)
            assert final.output_text == "Rain."
            asked = prompt(front)
            assert all(part in asked for part in ("I look.", CALL, CLOCKS))
        chat: list[Any] = [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in calls
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "wet"},
            {"role": "tool", "tool_call_id": "b", "content": "noon"},
        ]
        tools = [WEATHER.as_template(), CLOCK.as_template()]
        grammar = submitted(front).grammar
        await front.chat(messages=chat, tools=tools)
        assert (prompt(front), submitted(front).grammar) == (asked, grammar)

    serve(tmp_path, test)


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "clock"}, {"type": "function", "function": {"name": "clock"}}),
    ],
)
def test_the_choice_of_tools_is_chat_s(tmp_path: Path, choice: Any, same: Any) -> None:
    async def test(front: Front) -> None:
        front.say(CLOCKS)
        answer = await front.respond(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        grammar = submitted(front).grammar
        assert (answer.json()["tool_choice"], answer.json()["parallel_tool_calls"]) == (choice, False)
        tools = [WEATHER.as_template(), CLOCK.as_template()]
        await front.chat(tools=tools, tool_choice=same, parallel_tool_calls=False)
        assert submitted(front).grammar == grammar

    serve(tmp_path, test)


class Thing(BaseModel):
    """What a caller of `parse` asks for."""

    a: int


def test_an_answer_is_held_to_a_format(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say('{"a": 1}')
        parsed = await front.openai.responses.parse(model=BASE, input="hello", text_format=Thing)
        assert parsed.output_parsed == Thing(a=1)
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form = {"type": "json_schema", "name": "n", "schema": schema}
        answer = (await front.respond(text={"format": form, "verbosity": "medium"})).json()
        assert answer["text"]["format"]["schema"] == schema
        held = submitted(front).grammar
        await front.chat(
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        )
        assert submitted(front).grammar == held is not None
        for free in ({}, {"format": None}, {"format": {"type": "text"}}):
            assert (await front.respond(text=free)).status_code == 200
            assert submitted(front).grammar is None
        assert (await front.respond(text={"format": {"type": "json_object"}})).status_code == 200
        assert "object" in (submitted(front).grammar or "")

    run(tmp_path, test)


def test_an_answer_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("Hi there.")
        answer = (await front.respond(max_output_tokens=2)).json()
        assert (answer["status"], answer["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert answer["output"][0]["status"] == "incomplete"
        found = await events(front, max_output_tokens=2)
        assert told(found)[-2:] == ["output_item.done", "incomplete"]
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Hi"
        front.say("")
        empty = (await front.respond()).json()
        assert (empty["status"], empty["output"][0]["content"][0]["text"]) == ("completed", "")

    run(tmp_path, test)


def test_a_call_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(CALL)
        limit = len(front.ids(CALL[: CALL.index("Os") + 2]))
        (call,) = (await front.respond(tools=TOOLS, max_output_tokens=limit)).json()["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"city": "Os')

    serve(tmp_path, test)


def test_a_failure_within_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("Hi there.")
        front.engine.fail_after = (3, ErrorCode.ENGINE_DIED)
        found = await events(front)
        failed = found[-1]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": "engine_died", "message": "the step failed"}
        front.engine.fail_after = None
        front.engine.queue_full = True
        assert (await front.respond(stream=True)).status_code == 429

    run(tmp_path, test)


def test_log_probabilities_are_of_the_text(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("Hi")
        include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        text = (await front.respond(include=include, top_logprobs=2)).json()["output"][0]["content"][0]
        chat = (await front.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
        assert text["logprobs"] == chat["content"]
        assert len(text["logprobs"][0]["top_logprobs"]) == 2
        found = await events(front, include=include)
        deltas = [event["logprobs"] for event in found if event["type"] == "response.output_text.delta"]
        assert [entry["token"] for entries in deltas for entry in entries] == ["H", "i"]
        plain = (await front.respond()).json()["output"][0]["content"][0]
        assert plain["logprobs"] == []

    run(tmp_path, test)


def test_parameters_reach_the_engine_and_the_answer(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        answer = (await front.respond(temperature=0.5, top_p=0.9, seed=7, user="u", max_tool_calls=3)).json()
        sampling = submitted(front).sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
        assert (answer["temperature"], answer["top_p"], answer["user"], answer["max_tool_calls"]) == (
            0.5,
            0.9,
            "u",
            3,
        )

    run(tmp_path, test)


NOTHING: list[dict[str, Any]] = [
    {"store": True}, {"store": False}, {"background": False}, {"truncation": "disabled"},
    {"service_tier": "auto"},
    {"reasoning": {}}, {"reasoning": {"effort": None, "summary": None}}, {"reasoning": {"effort": "none"}},
    {"previous_response_id": None, "conversation": None, "prompt": None}, {"metadata": {}}, {"tools": []},
    {"tool_choice": "auto"}, {"include": []},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"input": [{"role": "user", "content": "hello"}]},
    {"input": [{"type": "message", "role": "user", "content": "hello"}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]}, {"text": None},
    {"prompt_cache_key": "k", "safety_identifier": "s"},
]  # fmt: skip


def test_what_asks_for_nothing_changes_nothing(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        plain = (await front.respond()).json()["output"][0]["content"]
        asked = prompt(front)
        for change in NOTHING:
            answer = await front.respond(**change)
            assert answer.status_code == 200, (change, answer.text)
            assert prompt(front) == asked
            if not change.get("stream"):
                assert answer.json()["output"][0]["content"] == plain

    run(tmp_path, test)


def items(*given: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hello"}, *given]}


def tool(**change: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **change}]}


USED: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], tuple[int, str], str]] = [
    ({"previous_response_id": "resp_1"}, OPTION, "previous_response_id"),
    ({"conversation": "conv_1"}, OPTION, "conversation"),
    ({"background": True}, OPTION, "background"),
    ({"prompt": {"id": "p"}}, OPTION, "prompt"),
    ({"reasoning": {"effort": "high"}}, OPTION, "reasoning"),
    ({"truncation": "auto"}, OPTION, "truncation"),
    ({"service_tier": "flex"}, OPTION, "service_tier"),
    ({"text": {"verbosity": "low"}}, OPTION, "text.verbosity"),
    ({"stream_options": {}}, BAD, "stream_options"),
    ({"more": 1}, BAD, "more"),
    ({"n": 2}, BAD, "n"),
    ({"input": []}, (400, "empty_prompt"), "input"),
    ({"input": [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)}, BAD, "input"),
    ({"metadata": {str(n): "" for n in range(17)}}, BAD, "metadata"),
    ({"include": ["x"]}, BAD, "include[0]"),
    ({"max_output_tokens": 0}, (400, "invalid_sampling"), "max_output_tokens"),
    ({"max_output_tokens": 7000}, (400, "context_length_exceeded"), "max_output_tokens"),
    ({"top_logprobs": 21}, (400, "invalid_sampling"), "top_logprobs"),
    ({"top_logprobs": 1, **tool()}, OPTION, "include"),
    ({"text": {"format": {"type": "x"}}}, BAD, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
     SCHEMA, "text.format"),
    (tool(name="a b"), BAD, "tools[0].name"),
    (tool(parameters={"properties": {"a": {"not": {}}}}), SCHEMA, "tools[0].parameters"),
    (tool(defer_loading=True), OPTION, "tools[0].defer_loading"),
    ({"tools": [{"type": "web_search"}]}, BAD, "tools[0].type"),
    ({**tool(), "tool_choice": {"type": "function", "name": "g"}}, BAD, "tool_choice"),
    (items({"type": "reasoning", "content": [{"type": "output_text", "text": "hm"}]}), OPTION, "input[1]"),
    (items({"type": "item_reference", "id": "msg_1"}), OPTION, "input[1]"),
    (items({"type": "web_search_call", "id": "w"}), BAD, "input[1].type"),
    (items({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}),
     OPTION, "input[1].summary"),
    (items({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
     OPTION, "input[1].encrypted_content"),
    (items({"role": "user"}), BAD, "input[1].content"),
    (items({"content": "x"}), BAD, "input[1].role"),
    (items({"role": "tool", "content": "x"}), BAD, "input[1].role"),
    (items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
     BAD, "input[1].content[0].type"),
    (items({"role": "user", "content": [{"type": "input_text", "text": "x", "annotations": [1]}]}), OPTION,
     "input[1].content[0].annotations"),
    (items({**USED, "arguments": "{"}), BAD, "input[1].arguments"),
    (items(USED, {**USED, "arguments": "[]"}), BAD, "input[2].arguments"),
    (items({**USED, "call_id": None}), BAD, "input[1].call_id"),
    (items({**USED, "namespace": "n"}), OPTION, "input[1].namespace"),
    (items(USED, {"type": "function_call_output", "call_id": "c"}), BAD, "input[2].output"),
]  # fmt: skip


def test_what_is_not_done_is_refused_by_name(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for change, (status, code), param in REFUSED:
            refused = await front.respond(**change)
            assert error_of(refused) == (status, code, param), (change, refused.text)
            message = refused.json()["error"]["message"]
            assert not {"messages[", "response_format", "max_completion_tokens", ".function."} & set(
                message.split()
            )
        assert front.engine.of(Submit) == []
        kept = (await front.respond(previous_response_id="resp_1")).json()["error"]["message"]
        assert "send the conversation whole" in kept

    serve(tmp_path, test)


def test_what_lies_above_and_beside_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await front.openai.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError, match="embedding"):
            await front.openai.embeddings.create(model=BASE, input="x")
        assert (await front.http.get(PATH)).status_code == 405

    run(tmp_path, test)


def test_an_answer_is_an_adapter_s_with_its_record(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        registered = await front.http.put("/v1/adapters/a", json={"source": front.source("a")})
        assert registered.status_code == 201
        for path in (PATH, PATH + "/"):
            answer = await front.http.post(path, json={"model": "a", "input": "hello"})
            assert answer.json()["system_fingerprint"].startswith("a@1:")
            assert answer.headers["x-loraplex-model"] == "a@1"
            found = await front.http.get(f"/v1/requests/{answer.headers['x-request-id']}/provenance")
            assert found.json()["model"] == "a@1"
        metrics = (await front.http.get("/metrics")).text
        assert 'endpoint="responses",outcome="ok"} 2' in metrics
        assert error_of(await front.respond(model="nobody")) == (404, "model_not_found", "model")

    run(tmp_path, test)
