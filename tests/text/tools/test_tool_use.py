"""A model's form is found from its template, conversations with calls go through any template, wrong tools
are refused.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.text.tools.tool_cases import (
    ARGS_TEMPLATE,
    CLOCK,
    CODER_TEMPLATE,
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    MISTRAL_TEMPLATE,
    PLAIN_TEMPLATE,
    TOOLS,
    WEATHER,
    XML_TEMPLATE,
    call_of,
    said_and_called,
)

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.tool_formats import TOOL_FORMATS
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.tools.choosing import FORMATS
from loraplex.text.tools.tool_format import ToolFormat
from loraplex.text.tools.tool_types import Message, Tool, ToolChoice
from loraplex.text.tools.tool_use import ToolUse, messages_for, tool_of, use_of

HISTORY: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo, and the time?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call_of("get_weather", {"city": "Oslo"}), call_of("clock", {}, "call_2")],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    {"role": "tool", "content": "noon", "tool_call_id": "call_2"},
]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def rendered(source: str, form: str | None = None, messages: list[Message] = HISTORY) -> str:
    made = template(source)
    use = use_of(made, TOOLS, ToolChoice.AUTO, form=form)
    return made.render(*messages_for(made, messages, use))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (HERMES_TEMPLATE, "hermes"),
        (LLAMA_TEMPLATE, "llama3"),
        (MISTRAL_TEMPLATE, "mistral"),
        (ARGS_TEMPLATE, "mistral_args"),
        (CODER_TEMPLATE, "qwen3_coder"),
        (PLAIN_TEMPLATE, "json"),
        (XML_TEMPLATE, None),
        (HERMES_TEMPLATE + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}", None),
    ],
)
def test_the_form_is_the_one_that_reads_what_the_template_writes(source: str, name: str | None) -> None:
    form = template(source).tool_format
    assert (None if form is None else form.name) == name


def test_a_form_that_is_not_known_is_refused_by_name_and_can_be_given() -> None:
    with pytest.raises(CallerError, match="--tool-format") as refused:
        use_of(template(XML_TEMPLATE), TOOLS, ToolChoice.AUTO)
    assert (refused.value.code, refused.value.param) == (ErrorCode.UNSUPPORTED_OPTION, "tools")
    given = use_of(template(XML_TEMPLATE), TOOLS, ToolChoice.AUTO, form="hermes")
    assert given is not None
    assert given.form is FORMATS["hermes"]


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects() -> None:
    text = rendered(HERMES_TEMPLATE)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert '"function": {"name": "clock", "parameters"' in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_templates_of_mistral_get_ids_that_they_take_and_equal_ones_stay_equal() -> None:
    text = rendered(MISTRAL_TEMPLATE)
    written = text.partition('"id": "')[2][:9]
    assert written.isalnum()
    assert f"[R]rain {written}[/R]" in text
    kept = [{**HISTORY[2], "tool_calls": [call_of("clock", {}, "abc123XYZ")]}]
    assert '"id": "abc123XYZ"' in rendered(MISTRAL_TEMPLATE, messages=kept)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_template_without_tools_gets_text_that_its_form_reads_again(name: str) -> None:
    text = rendered(PLAIN_TEMPLATE, None if name == "json" else name)
    assert text.startswith("system: Be brief.\n\n")
    assert '"name": "get_weather"' in text
    assert "rain" in text.partition("user: ")[2].partition("user: ")[2]
    answer = text.partition("\nassistant: ")[2].partition("\nuser: ")[0]
    parser = FORMATS[name].parser()
    called = said_and_called([*parser.push(answer), *parser.finish()])
    assert called == ("", [("get_weather", '{"city": "Oslo"}'), ("clock", "{}")])
    assert text.count("user: ") == 2
    assert text.endswith("assistant: ")


def test_a_conversation_without_a_system_message_gets_one_and_text_beside_calls_stays() -> None:
    said = [{"role": "user", "content": "Go."}, {**HISTORY[2], "content": "I look."}]
    text = rendered(PLAIN_TEMPLATE, messages=said)
    assert text.startswith("system: These functions")
    assert 'assistant: I look.\n{"name": "get_weather"' in text
    developer: list[Message] = [{"role": "developer", "content": "Be kind."}, *said]
    assert rendered(PLAIN_TEMPLATE, messages=developer).startswith("system: Be kind.\n\nThese functions")


def test_arguments_without_end_are_refused_before_they_are_written_out() -> None:
    deep: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call_of("f", nested(100_000))]}
    ]
    for source in (PLAIN_TEMPLATE, HERMES_TEMPLATE):
        with pytest.raises(CallerError) as refused:
            rendered(source, messages=deep)
        assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_REQUEST, "messages")


def test_a_history_with_calls_needs_no_tools() -> None:
    made = template(PLAIN_TEMPLATE)
    given, offered = messages_for(made, HISTORY, None)
    assert not offered
    assert [message["role"] for message in given] == ["system", "user", "assistant", "user"]
    known = template(XML_TEMPLATE)
    assert messages_for(known, HISTORY, None) == (HISTORY, [])


def test_messages_without_tools_are_left_alone() -> None:
    plain = HISTORY[:2]
    assert messages_for(template(PLAIN_TEMPLATE), plain, None) == (plain, ())


@pytest.mark.parametrize(
    ("tools", "choice", "named", "param"),
    [
        ((CLOCK, WEATHER, CLOCK), ToolChoice.AUTO, None, "tools[2].function.name"),
        ((CLOCK,), ToolChoice.NAMED, "get_weather", "tool_choice"),
        ((), ToolChoice.REQUIRED, None, "tool_choice"),
        (tuple(Tool(f"f{index}", None, {}) for index in range(129)), ToolChoice.AUTO, None, "tools"),
    ],
)
def test_tools_that_contradict_are_refused(
    tools: tuple[Tool, ...], choice: ToolChoice, named: str | None, param: str
) -> None:
    with pytest.raises(CallerError) as refused:
        use_of(template(PLAIN_TEMPLATE), tools, choice, named)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_REQUEST, param)


def test_none_and_no_tools_ask_for_nothing() -> None:
    made = template(PLAIN_TEMPLATE)
    assert use_of(made, TOOLS, ToolChoice.NONE) is None
    assert use_of(made, (), ToolChoice.AUTO) is None


@pytest.mark.parametrize(
    ("name", "parameters", "param"),
    [
        ("", None, "tools[3].function.name"),
        ("a b", None, "tools[3].function.name"),
        ("x" * 65, None, "tools[3].function.name"),
        ("f", {"type": "string"}, "tools[3].function.parameters.type"),
        ("f", {"properties": {"a": {"x-mine": 1}}}, "tools[3].function.parameters"),
        ("f", nested(600), "tools[3].function.parameters"),
    ],
)
def test_a_tool_has_a_name_and_takes_an_object(
    name: str, parameters: dict[str, Any] | None, param: str
) -> None:
    with pytest.raises(CallerError) as refused:
        tool_of(3, name, None, parameters)
    assert refused.value.param == param


def test_a_tool_without_parameters_takes_no_arguments_and_without_a_type_an_object() -> None:
    assert tool_of(0, "f", None, None).parameters["additionalProperties"] is False
    assert tool_of(0, "f", None, {"properties": {}}).parameters["type"] == "object"


def test_every_form_has_a_file_and_a_name() -> None:
    assert tuple(FORMATS) == TOOL_FORMATS
    assert all(isinstance(form, ToolFormat) for form in FORMATS.values())
    assert isinstance(use_of(template(PLAIN_TEMPLATE), TOOLS, ToolChoice.AUTO), ToolUse)
