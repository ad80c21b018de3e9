"""Tools over HTTP: what clients of OpenAI's interface send and read, through the `openai` client and raw."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.server.rig import BASE, Front, error_of, run
from tests.text.tools.tool_cases import (
    ARGS_TEMPLATE,
    CLOCK,
    CODER_TEMPLATE,
    HERMES_TEMPLATE,
    MISTRAL_TEMPLATE,
    WEATHER,
)

from loraplex.core import limits
from loraplex.core.messages import Submit
from loraplex.text.chat_template import ChatTemplate

TOOLS: Any = [WEATHER.as_template(), {**CLOCK.as_template()}]
ASK: Any = [{"role": "user", "content": "Weather in Oslo?"}]
OSLO = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
CLOCKS = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "clock"}}
BAD, OPTION, SCHEMA = (400, "invalid_request"), (400, "unsupported_option"), (400, "schema_unsupported")


def serve(
    folder: Path,
    test: Callable[[Front], Awaitable[None]],
    template: str = HERMES_TEMPLATE,
    formats: tuple[tuple[str | None, str], ...] = (),
) -> None:
    """A server over a model with a template, and room for prompts with tools."""

    async def over(front: Front) -> None:
        front.supervisor.info["max_model_len"] = 6000
        assert front.codec is not None
        front.codec._template = ChatTemplate(template, {})
        await test(front)

    run(folder, over, tool_formats=formats)


def prompt(front: Front) -> str:
    """The latest prompt as text."""
    assert front.codec is not None
    ids = memoryview(front.engine.of(Submit)[-1].prompt).cast("i")
    return front.codec.decode(list(ids), skip_special=False)


def grammar(front: Front) -> str | None:
    found: str | None = front.engine.of(Submit)[-1].grammar
    return found


def test_a_call_is_answered_as_one_and_goes_back_in(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say("I look. " + CALL)
        answer = await front.openai.chat.completions.create(model=BASE, messages=ASK, tools=TOOLS)
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls or ()
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("get_weather", OSLO)
        assert '"name": "get_weather"' in prompt(front)
        assert "<tool_call>" in (grammar(front) or "")
        front.say("Rain.")
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "wet"}]}
        read: Any = choice.message.model_dump()
        read["tool_calls"][0]["function"]["parsed_arguments"] = {"city": "Oslo"}
        for dumped in (
            choice.message,
            read,
            choice.message.model_dump(),
            choice.message.model_dump(exclude_unset=True),
        ):
            again: Any = [*ASK, dumped, result]
            final = await front.openai.chat.completions.create(model=BASE, messages=again, tools=TOOLS)
            assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Rain.", "stop")
            assert final.choices[0].message.tool_calls is None
            assert CALL in prompt(front)
            assert "<|im_start|>tool\nwet" in prompt(front)

    serve(tmp_path, test)


def test_only_calls_leave_the_content_null(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(f"{CALL}\n{CLOCKS}")
        message = (await front.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "clock"]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert all("index" not in call for call in message["tool_calls"])

    serve(tmp_path, test)


def test_a_stream_gives_name_and_id_once_and_arguments_as_they_come(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(f"So. {CALL}\n{CLOCKS}")
        events = await front.events("/v1/chat/completions", messages=ASK, tools=TOOLS, n=2)
        for index in range(2):
            choices = [c for event in events for c in event["choices"] if c["index"] == index]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(c["delta"].get("content", "") for c in choices) == "So."
            parts = [part for c in choices for part in c["delta"].get("tool_calls", ())]
            first = [part for part in parts if part["index"] == 0]
            assert {"id", "type", "index", "function"} == set(first[0])
            assert first[0]["function"]["name"] == "get_weather"
            assert all(set(part) == {"index", "function"} for part in first[1:])
            assert all(set(part["function"]) == {"arguments"} for part in first[1:])
            assert "".join(part["function"]["arguments"] for part in first) == OSLO
            assert len(first) > 4
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]

    serve(tmp_path, test)


WRITTEN: list[tuple[str, str]] = [
    (ARGS_TEMPLATE, f"So.[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]clock[ARGS]{{}}"),
    (
        CODER_TEMPLATE,
        (
            "So.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
            "\n<tool_call>\n<function=clock>\n</function>\n</tool_call>"
        ),
    ),
]


@pytest.mark.parametrize(("template", "answer"), WRITTEN, ids=["mistral_args", "qwen3_coder"])
def test_calls_in_the_form_that_the_template_writes_are_the_same(
    tmp_path: Path, template: str, answer: str
) -> None:
    async def test(front: Front) -> None:
        front.say(answer)
        body: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "max_tokens": 500}
        choice = (await front.chat(**body)).json()["choices"][0]
        events = await front.events("/v1/chat/completions", **body)
        streamed = [part for e in events for c in e["choices"] for part in c["delta"].get("tool_calls", ())]
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"]["tool_calls"]
        ]
        assert calls == [("get_weather", OSLO), ("clock", "{}")]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "So.")
        for index, (name, arguments) in enumerate(calls):
            parts = [part["function"] for part in streamed if part["index"] == index]
            assert parts[0]["name"] == name
            assert "".join(part["arguments"] for part in parts) == arguments

    serve(tmp_path, test, template)


class Clock(BaseModel):
    """Asks for the time."""

    zone: str


def test_the_client_s_stream_helper_and_parser_read_calls(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say('<tool_call>{"name": "Clock", "arguments": {"zone": "UTC"}}</tool_call>')
        tool: Any = openai.pydantic_function_tool(Clock)
        async with front.openai.chat.completions.stream(model=BASE, messages=ASK, tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
        for completion in (
            final,
            await front.openai.chat.completions.parse(model=BASE, messages=ASK, tools=[tool]),
        ):
            (call,) = completion.choices[0].message.tool_calls or ()
            assert call.function.parsed_arguments == Clock(zone="UTC")

    serve(tmp_path, test)


def test_a_call_that_is_cut_off_stays_and_says_so(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(CALL)
        limit = len(front.ids(CALL[: CALL.index("Os") + 2]))
        choice = (await front.chat(tools=TOOLS, max_tokens=limit)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'

    serve(tmp_path, test)


def test_the_choice_decides_prompt_grammar_and_reading(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(CALL)
        none = (await front.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
        assert (none["message"]["content"], none["finish_reason"]) == (CALL, "stop")
        assert grammar(front) is None
        assert "get_weather" not in prompt(front)
        seen = set()
        for change in (
            {},
            {"tool_choice": "required"},
            {"tool_choice": NAMED},
            {"parallel_tool_calls": False},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ):
            answer = (await front.chat(tools=TOOLS, **change)).json()["choices"][0]
            assert answer["message"]["tool_calls"]
            assert "get_weather" in prompt(front)
            seen.add(grammar(front))
        assert len(seen) == 5
        await front.chat(tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
        assert grammar(front) in seen

    serve(tmp_path, test)


def test_an_answer_under_a_format_stands_beside_tools(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say('{"a": 1}')
        for schema in ({"type": "object"}, {}, True):
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            answer = (await front.chat(tools=TOOLS, response_format=form)).json()["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == ('{"a": 1}', "stop")
            assert "answer: %json" in (grammar(front) or "")

    serve(tmp_path, test)


def test_asking_for_no_tools_is_asking_for_nothing(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        plain = (await front.chat()).json()["choices"]
        for change in (
            {"tools": []},
            {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
            {"tool_choice": "none"},
            {"tool_choice": "auto", "parallel_tool_calls": True},
            {"functions": [], "function_call": "none"},
            {"functions": None, "function_call": None},
        ):
            answer = await front.chat(**change)
            assert (answer.status_code, answer.json()["choices"]) == (200, plain), change
            assert grammar(front) is None

    run(tmp_path, test)


DUMPS: dict[str, dict[str, Any]] = {
    "openai": {
        "content": "Yes.", "refusal": None, "role": "assistant", "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    },
    "openai parsed": {
        "content": "Yes.", "refusal": None, "role": "assistant", "annotations": None, "audio": None,
        "function_call": None, "tool_calls": None, "parsed": {"yes": True},
    },
    "vllm": {
        "role": "assistant", "content": "Yes.", "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "tool_calls": [], "reasoning_content": None, "reasoning": None,
    },
    "empty texts": {"role": "assistant", "content": "Yes.", "refusal": "", "reasoning_content": ""},
}  # fmt: skip


@pytest.mark.parametrize("dump", sorted(DUMPS))
def test_assistant_messages_go_back_in_as_clients_dump_them(tmp_path: Path, dump: str) -> None:
    async def test(front: Front) -> None:
        messages = [*ASK, DUMPS[dump], {"role": "user", "content": "So?", "name": "Ada"}]
        assert (await front.chat(messages=messages)).status_code == 200
        assert prompt(front).endswith(
            "Yes.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
        )

    serve(tmp_path, test)


def test_a_developer_s_message_works_with_tools(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.say(CALL)
        messages = [{"role": "developer", "content": "Be brief."}, *ASK]
        answer = await front.chat(messages=messages, tools=TOOLS)
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
        assert "<|im_start|>system\nBe brief." in prompt(front)

    serve(tmp_path, test)


def with_call(**change: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}} | change
    return {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def function(**change: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | change}]}


REFUSED: list[tuple[dict[str, Any], tuple[int, str], str]] = [
    (function(name="a b"), BAD, "tools[0].function.name"),
    (function(parameters={"type": "array"}), SCHEMA, "tools[0].function.parameters.type"),
    (function(parameters={"properties": {"a": {"not": {}}}}), SCHEMA, "tools[0].function.parameters"),
    (function(parameters={"$ref": "http://elsewhere/x"}), SCHEMA, "tools[0].function.parameters"),
    (function(more=1), BAD, "tools[0].function.more"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, BAD, "tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, BAD, "tools[1].function.name"),
    ({"tools": [TOOLS[0]] * (limits.MAX_TOOLS + 1)}, BAD, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, BAD, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, BAD, "tool_choice"),
    ({"tool_choice": "required"}, BAD, "tool_choice"),
    ({"tool_choice": NAMED}, BAD, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, BAD, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, OPTION, "functions"),
    ({"function_call": "auto"}, OPTION, "function_call"),
    ({"function_call": {"name": "f"}}, OPTION, "function_call"),
    (with_call(type="custom"), BAD, "messages[1].tool_calls[0].type"),
    (with_call(index=1), BAD, "messages[1].tool_calls[0].index"),
    (
        with_call(function={"name": "f", "arguments": "{"}),
        BAD,
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        with_call(function={"name": "f", "arguments": "[]"}),
        BAD,
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "content": None}]}, BAD, "messages[0].content"),
    ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, BAD, "messages[0].content"),
    ({"messages": [{**ASK[0], "tool_call_id": "c"}]}, BAD, "messages[0].tool_call_id"),
    (
        {"messages": [{**with_call()["messages"][1], "role": "user", "content": "x"}]},
        BAD,
        "messages[0].tool_calls",
    ),
    ({"messages": [{**ASK[0], "refusal": "no"}]}, OPTION, "messages[0].refusal"),
    ({"messages": [{**ASK[0], "reasoning_content": "hm"}]}, OPTION, "messages[0].reasoning_content"),
    ({"messages": [{**ASK[0], "function_call": {"name": "f"}}]}, OPTION, "messages[0].function_call"),
    ({"messages": [{**ASK[0], "annotations": [1]}]}, OPTION, "messages[0].annotations"),
]


def test_what_is_not_done_is_refused_by_name(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for change, (status, code), param in REFUSED:
            assert error_of(await front.chat(**change)) == (status, code, param), change
        assert front.engine.of(Submit) == []

    serve(tmp_path, test)


def test_the_form_is_a_model_s_an_adapter_s_or_given(tmp_path: Path) -> None:
    """The base's template is Mistral's; one adapter's card says otherwise, and an option speaks of another
    one.
    """

    async def test(front: Front) -> None:
        front.say(CALL)
        for alias, card in (
            ("plain", ""),
            ("carded", 'tool_format: "hermes"\nlicense: mit\n'),
            ("named", ""),
        ):
            source = front.source(alias)
            (Path(source) / "README.md").write_text(f"---\n{card}---\n# {alias}\n")
            registered = await front.http.put(f"/v1/adapters/{alias}", json={"source": source})
            assert registered.status_code == 201, registered.text
        for model, called in ((BASE, False), ("plain", False), ("carded", True), ("named", True)):
            choice = (await front.chat(model=model, tools=TOOLS)).json()["choices"][0]
            assert (choice["finish_reason"] == "tool_calls") is called, model
        front.say(f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}}}]')
        (call,) = (await front.chat(tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9

    serve(tmp_path, test, MISTRAL_TEMPLATE, (("named", "hermes"),))
