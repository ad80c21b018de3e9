"""Messages and tools of a conversation, decoded strictly, and as chat templates read them.

Owns what a message may hold by its role, for the server and for `LLM`. Specification: interface "HTTP".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.neutral import ABSENT, NO_EFFECT, Unread, Unsupported, refuse_unsupported
from loraplex.text.tools.tool_types import Tool, ToolChoice
from loraplex.text.tools.tool_use import tool_of

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A content part; text is the only kind that the models read.

    cache_control: that a prefix may be cached; every one is.
    """

    type: Literal["text"]
    text: str
    cache_control: Unread = ABSENT


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an earlier answer called. arguments: JSON text. parsed_arguments: as a client read them, which
    says nothing more.
    """

    name: str
    arguments: str
    parsed_arguments: Unread = ABSENT


class EarlierCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of an earlier answer. index: its place, where it was put together from a stream."""

    id: str
    function: CalledFunction
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation. name: for the template. tool_calls: an assistant's. tool_call_id:
    a tool's. parsed: the content as a client read it, which says nothing more.
    """

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    refusal: Unsupported = ABSENT
    annotations: Unsupported = ABSENT
    audio: Unsupported = ABSENT
    function_call: Unsupported = ABSENT
    parsed: Unread = ABSENT
    reasoning: Unsupported = ABSENT
    reasoning_content: Unsupported = ABSENT

    @property
    def text(self) -> str:
        """The content as one string: parts are lines."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that may be called. strict: every schema is enforced, whatever it says."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, NO_EFFECT] = None


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which function is called."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer is one call of this function."""

    type: Literal["function"]
    function: FunctionName


ToolChoiceField = Literal["none", "auto", "required"] | NamedChoice


def read_choice(choice: ToolChoiceField | None) -> tuple[ToolChoice, str | None]:
    """What a request says of calling, and the function that it names."""
    if isinstance(choice, NamedChoice):
        return ToolChoice.NAMED, choice.function.name
    return ToolChoice.AUTO if choice is None else ToolChoice(choice), None


def read_tools(tools: Sequence[FunctionTool] | None) -> list[Tool]:
    """The functions of a request. Raises with the field at fault."""
    given = [tool.function for tool in tools or ()]
    return [tool_of(at, f.name, f.description, f.parameters) for at, f in enumerate(given)]


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise `unsupported_option` and `invalid_request` for what a message may not hold."""
    for index, message in enumerate(messages):
        place = f"messages[{index}]."
        refuse_unsupported(message, place)
        for number, call in enumerate(message.tool_calls or ()):
            if call.index not in (None, number):
                raise _wrong(f"{place}tool_calls[{number}].index", f"must be {number}, got {call.index}")
        if message.tool_calls and message.role != "assistant":
            raise _wrong(f"{place}tool_calls", f"stands in a message of role {message.role}, not assistant")
        if message.tool_call_id is not None and message.role != "tool":
            raise _wrong(f"{place}tool_call_id", f"stands in a message of role {message.role}, not tool")
        if message.content is None and not message.tool_calls:
            raise _wrong(
                f"{place}content", "is missing; only an assistant's message with tool_calls has none"
            )
    held = sum(
        len(m.tool_calls or ()) + (len(m.content) if isinstance(m.content, list) else 0) for m in messages
    )
    if held > limits.MAX_CONTENT_PARTS:
        raise _wrong(
            "messages", f"has {held} content parts and tool calls, the limit is {limits.MAX_CONTENT_PARTS}"
        )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates read them; what is null or empty is left out."""
    return [_as_template(message, f"messages[{index}]") for index, message in enumerate(messages)]


def texts_of(messages: Sequence[ChatMessage]) -> list[str]:
    """What of messages surely becomes prompt text."""
    arguments = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    return [message.text for message in messages] + arguments


def _as_template(message: ChatMessage, place: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{number}].function.arguments")
            for number, call in enumerate(message.tool_calls)
        ]
    return made


def _call(call: EarlierCall, param: str) -> Mapping[str, Any]:
    raw = call.function.arguments
    try:
        arguments = msgspec.json.decode(raw) if raw.strip() else {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise _wrong(param, f"is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise _wrong(param, f"is JSON of a {type(arguments).__name__}, expected an object")
    return {
        "id": call.id,
        "type": call.type or "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _wrong(param: str, what: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_REQUEST, f"{param} {what}", param=param)
