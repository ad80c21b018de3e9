"""What a Python caller says in `LLM.chat`, read by the rules of a request body."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.text.tools.tool_cases import CLOCK, HERMES_TEMPLATE, WEATHER

from loraplex.api.conversations import read_conversations, read_offer
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.tools.tool_types import ToolChoice

TOOLS = [WEATHER.as_template(), CLOCK.as_template()]
NOTHING = read_offer(None, None, True)
HELLO = {"role": "user", "content": "hello"}
CALLED = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TEMPLATE = ChatTemplate(HERMES_TEMPLATE, {})


def test_one_conversation_and_several() -> None:
    [one] = read_conversations([HELLO], NOTHING)
    assert one.messages == [HELLO]
    two = read_conversations(([HELLO], [HELLO, HELLO]), NOTHING)
    assert [len(conversation.messages) for conversation in two] == [1, 2]


def test_messages_are_those_of_a_body() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    called = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    [read] = read_conversations([parts, called, result], NOTHING)
    assert read.messages[0] == {"role": "user", "content": "a\nb"}
    assert read.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert read.messages[2] == result


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "messages"), ("hello", "messages"), ([], "messages"), ([[]], "messages"), ({"role": "user"},
         "messages"),
        ([{"role": "user"}], "messages[0].content"), ([{**HELLO, "role": "poet"}], "messages[0].role"),
        ([{**HELLO, "content": 5}], "messages[0].content"), ([{**HELLO, "more": 1}], "messages[0]"),
        ([HELLO, {**HELLO, "content": b"x"}], "messages"), ([SimpleNamespace()], "messages"),
        ([{**HELLO, "content": "\ud800"}], "messages"), ([{**HELLO, "refusal": "no"}], "messages[0].refusal"),
        ([HELLO, {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f",
         "arguments": "{"}}]}],
         "messages[1].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused(given: Any, param: str) -> None:
    with pytest.raises(CallerError) as caught:
        read_conversations(given, NOTHING)
    assert caught.value.param == param


def test_what_may_be_called_depends_on_the_choice() -> None:
    assert NOTHING.use(TEMPLATE, None) is None
    assert read_offer(TOOLS, "none", True).use(TEMPLATE, None) is None
    named = {"type": "function", "function": {"name": "clock"}}
    use = read_offer(TOOLS, named, False).use(TEMPLATE, None)
    assert use is not None
    assert (use.choice, use.named, use.parallel, use.form.name) == (
        ToolChoice.NAMED,
        "clock",
        False,
        "hermes",
    )
    carded = read_offer(TOOLS, None, True).use(TEMPLATE, "llama3")
    assert carded is not None
    assert (carded.choice, carded.form.name) == (ToolChoice.AUTO, "llama3")


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "param"),
    [
        ([{"type": "function"}], None, True, "tools[0]"), ("clock", None, True, "tools"),
        (TOOLS, "any", True, "tool_choice"), (TOOLS, None, 1, "parallel_tool_calls"),
        ([{"type": "function", "function": {"name": "a b"}}], None, True, "tools[0].function.name"),
        (None, "required", True, "tool_choice"), ([TOOLS[0], TOOLS[0]], None, True, "tools[1].function.name"),
        (TOOLS, {"type": "function", "function": {"name": "g"}}, True, "tool_choice"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_called_are_refused(tools: Any, choice: Any, parallel: Any, param: str) -> None:
    with pytest.raises(CallerError) as caught:
        read_offer(tools, choice, parallel).use(TEMPLATE, None)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)
