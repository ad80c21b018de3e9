"""What one request may call: its tools and its choice, as a prompt, a grammar and a parser.

The way in for the server and for `LLM`. Owns which tools are refused and how much of them there may be. Never
knows how a request or an answer is written. Specification: interface "HTTP".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.grammars import (
    check_keywords,
    check_multiples,
    checked_grammar,
    embedded_schema,
    schema_grammar,
)
from loraplex.text.tools import choosing
from loraplex.text.tools.call_grammar import Asked, Vocabulary
from loraplex.text.tools.call_parser import CallParser
from loraplex.text.tools.tool_format import ToolFormat
from loraplex.text.tools.tool_types import Message, Tool, ToolChoice
from loraplex.text.tools.untemplated import written_out

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


class Template(Protocol):
    """What of a chat template matters here."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """The form in which its model writes calls."""
        ...

    @property
    def knows_tools(self) -> bool:
        """Whether it writes tools itself."""
        ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call. named: the function to call where the choice is NAMED. parallel: more than
    once.

    Made by `use_of`, which checks.
    """

    tools: tuple[Tool, ...]
    choice: ToolChoice
    form: ToolFormat
    named: str | None = None
    parallel: bool = True

    def parser(self) -> CallParser:
        """For one sample."""
        return self.form.parser(self.tools)

    def grammar(self, vocabulary: Vocabulary, answer: Mapping[str, Any] | None = None) -> str:
        """What the answer must follow. answer: schema of an answer without calls. May take long.

        Raises `schema_unsupported` for a tool whose arguments could not be held to its schema.
        """
        required = self.choice is not ToolChoice.AUTO
        if answer is not None and not required and not self.form.holds_answers:
            raise CallerError(
                ErrorCode.UNSUPPORTED_OPTION,
                f"response_format beside tools is not supported in the form {self.form.name}, where a call "
                "is an answer "
                "in JSON too; leave one of them out",
                param="response_format",
            )
        self._check_schemas()
        tools = [tool for tool in self.tools if self.named in (None, tool.name)]
        asked = Asked(
            tools,
            required,
            single=not self.parallel or self.choice is ToolChoice.NAMED,
            answer=None if answer is None else embedded_schema(dict(answer)),
        )
        return checked_grammar(self.form.grammar(asked, embedded_schema, vocabulary))

    def _check_schemas(self) -> None:
        size = 0
        for index, tool in enumerate(self.tools):
            param = f"tools[{index}].function.parameters"
            try:
                schema_grammar(dict(tool.parameters))
            except CallerError as error:
                raise _of_tool(error, index, tool.name) from error
            size += len(msgspec.json.encode(tool.parameters))
            if size > limits.MAX_TOOL_SCHEMA_BYTES:
                raise CallerError(
                    ErrorCode.SCHEMA_UNSUPPORTED,
                    f"the parameters of the tools up to {tool.name} have {size} bytes, the limit is "
                    f"{limits.MAX_TOOL_SCHEMA_BYTES}; offer fewer tools at a time",
                    param=param,
                )
        try:
            check_multiples({"anyOf": [dict(tool.parameters) for tool in self.tools]})
        except CallerError as error:
            raise CallerError(error.code, f"of the tools together, {error.message}", param="tools") from error


def tool_of(index: int, name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    """A checked tool of a request. index: its place, for the error. Without parameters it takes no
    arguments.
    """
    if not _NAME.fullmatch(name):
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"a function's name is 1 to 64 letters, digits, '_', '-' and '.', got {name!r:.80}",
            param=f"tools[{index}].function.name",
        )
    given = NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    if given["type"] != "object":
        raise CallerError(
            ErrorCode.SCHEMA_UNSUPPORTED,
            f"the parameters of {name} must be a schema of type object, got {given['type']!r:.80}",
            param=f"tools[{index}].function.parameters.type",
        )
    try:
        check_keywords(given)  # before anything writes it out: it may be nested without end
    except CallerError as error:
        raise _of_tool(error, index, name) from error
    return Tool(name, description, given)


def _of_tool(error: CallerError, index: int, name: str) -> CallerError:
    return CallerError(
        error.code, f"of tool {name}, {error.message}", param=f"tools[{index}].function.parameters"
    )


def use_of(
    template: Template,
    tools: Sequence[Tool],
    choice: ToolChoice,
    named: str | None = None,
    *,
    parallel: bool = True,
    form: str | None = None,
) -> ToolUse | None:
    """What a request may call; None where that is nothing. form: by its name, instead of the
    template's own.
    """
    _check_names(tools)
    if named is not None and named not in {tool.name for tool in tools}:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"tool_choice names the function {named!r:.80}, which is not among the tools",
            param="tool_choice",
        )
    if not tools and choice is ToolChoice.REQUIRED:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "tool_choice is required and there are no tools", param="tool_choice"
        )
    if not tools or choice is ToolChoice.NONE:
        return None
    chosen = template.tool_format if form is None else choosing.FORMATS[form]
    if chosen is None:
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            "the model's chat template writes calls in a form that is not known; serve it with --tool-format "
            "or leave "
            "tools out",
            param="tools",
        )
    return ToolUse(tuple(tools), choice, chosen, named, parallel)


def _check_names(tools: Sequence[Tool]) -> None:
    if len(tools) > limits.MAX_TOOLS:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"{len(tools)} tools were sent, the limit is {limits.MAX_TOOLS}",
            param="tools",
        )
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                f"two tools have the name {tool.name}",
                param=f"tools[{index}].function.name",
            )
        seen.add(tool.name)


def messages_for(
    template: Template, messages: Sequence[Message], use: ToolUse | None
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
    """A conversation and its tools as a template takes them: as they are, or as text where it knows
    no tools.
    """
    tools = () if use is None else use.tools
    called = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if not tools and not called:
        return messages, ()
    form = template.tool_format if use is None else use.form
    if template.knows_tools:
        given = messages if form is None else form.history(messages)
        return given, [tool.as_template() for tool in tools]
    try:
        return written_out(messages, tools, choosing.FORMATS["json"] if form is None else form), ()
    except RecursionError as error:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "the arguments of a call are nested too deeply", param="messages"
        ) from error
