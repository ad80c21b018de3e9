"""What POST /v1/responses takes, decoded strictly, and the same request as a chat request.

Owns which items a conversation may hold, and what a field of the one interface is called in the other. Never
generates: `generation/responses.py` does, by the way that chat goes. Specification: interface "HTTP".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.neutral import ABSENT, NO_EFFECT, Unread, Unsupported, refuse_unsupported
from loraplex.server.wire import (
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    SchemaFormat,
    SchemaName,
    TextFormat,
)
from loraplex.text.conversation import (
    CalledFunction,
    ChatMessage,
    EarlierCall,
    Function,
    FunctionName,
    FunctionTool,
    NamedChoice,
    Role,
    TextPart,
    ToolChoiceField,
    check_messages,
)

_METADATA: Final = (16, 64, 512)
"""Pairs, and characters of a key and of a value."""
_LOGPROBS: Final = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What an answer is to include. All but log probabilities are parts of items that no answer here has."""


class ItemPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message or of a function's output; text is the only kind that the models read.

    logprobs, parsed: of an earlier answer; its text says all that the model reads. prompt_cache_breakpoint:
    that a prefix may be cached; every one is.
    """

    type: Annotated[Literal["input_text", "output_text"], NO_EFFECT]
    text: str
    annotations: Unsupported = ABSENT
    logprobs: Unread = ABSENT
    parsed: Unread = ABSENT
    prompt_cache_breakpoint: Unread = ABSENT


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A message (also without a type), a call that an earlier answer made, what its function returned, or the
    reasoning of an earlier answer, which must be empty.

    id, status: of an item of an earlier answer. parsed_arguments: as a client read them, which says nothing
    more. summary, encrypted_content: of reasoning. phase: which part of an answer a message was.
    """

    type: (
        Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None
    ) = None
    id: Annotated[str | None, NO_EFFECT] = None
    status: Annotated[Literal["in_progress", "completed", "incomplete"] | None, NO_EFFECT] = None
    role: Role | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: Unread = ABSENT
    output: str | list[ItemPart] | None = None
    summary: Unsupported = ABSENT
    encrypted_content: Unsupported = ABSENT
    phase: Annotated[Literal["commentary", "final_answer"] | None, NO_EFFECT] = None
    caller: Unsupported = ABSENT
    namespace: Unsupported = ABSENT


class ResponseTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that may be called; the only kind of tool. strict: every schema is enforced, whatever it
    says.
    """

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Unsupported = ABSENT
    defer_loading: Unsupported = ABSENT
    output_schema: Unsupported = ABSENT


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer is one call of this function."""

    type: Literal["function"]
    name: str


class ResponseSchemaFormat(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """The answer is JSON under a schema. strict: every schema is enforced, whatever it says."""

    name: SchemaName
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of an answer is held to."""

    format: TextFormat | JsonObjectFormat | ResponseSchemaFormat | None = None
    verbosity: Unsupported = ABSENT


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_obfuscation: as in `wire.StreamOptions`."""

    include_obfuscation: Annotated[bool | None, NO_EFFECT] = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses.

    store: whether the answer is kept, which OpenAI's own service does unless this is false; here none is, and
    every answer says so. max_tool_calls: of tools that a server calls by itself; there are none. metadata: is
    in the answer again. Extensions: seed and below.
    """

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    include: list[Include] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: Annotated[bool | None, NO_EFFECT] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: list[ResponseTool] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    ttft_deadline_ms: int | None = None
    alora_fallback: str | None = None
    access_programs: Unsupported = ABSENT
    background: Unsupported = ABSENT
    background_options: Unsupported = ABSENT
    context_management: Unsupported = ABSENT
    conversation: Unsupported = ABSENT
    image: Unsupported = ABSENT
    moderation: Unsupported = ABSENT
    previous_response_id: Unsupported = ABSENT
    prompt: Unsupported = ABSENT
    prompt_cache_options: Unsupported = ABSENT
    prompt_cache_retention: Unsupported = ABSENT
    reasoning: Unsupported = ABSENT
    service_tier: Unsupported = ABSENT
    truncation: Unsupported = ABSENT

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text has log probabilities."""
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


_SAME_NAME: Final = (
    "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "stream", "temperature", "top_p",
    "user", "seed", "stop", "top_k", "min_p", "repetition_penalty", "ignore_eos", "priority",
    "ttft_deadline_ms", "alora_fallback",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    """Which items a message was made of. first: its own, None for the instructions. calls: of its calls."""

    first: int | None
    calls: list[int]


class AsChat:
    """A request as chat reads it. chat: the same request. Raises with the fields of this interface."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._places: list[_Place] = []
        self._messages: list[ChatMessage] = []
        if request.instructions is not None:
            self._add(ChatMessage("system", request.instructions), None)
        self._read_input(request.input)
        _check_metadata(request.metadata)
        if request.stream_options is not None and not request.stream:
            raise _wrong("stream_options", "needs stream to be true")
        if request.wants_logprobs and request.tools:
            raise _refused("include", "asks for log probabilities beside tools; leave one of them out")
        self.chat = ChatRequest(
            messages=self._messages,
            max_completion_tokens=request.max_output_tokens,
            response_format=_response_format(request.text),
            tools=_tools(request.tools),
            tool_choice=_choice(request.tool_choice),
            logprobs=request.wants_logprobs or None,
            top_logprobs=request.top_logprobs,
            **{name: getattr(request, name) for name in _SAME_NAME},
        )
        try:
            check_messages(self._messages)
        except CallerError as error:
            self.rename(error)
            raise

    def rename(self, error: LoraplexError) -> None:
        """Say what an error of chat's reading says with the fields of this interface."""
        if error.param is None:
            return
        name = self._name(error.param)
        if error.param != "messages":  # an everyday word
            error.message = error.message.replace(error.param, name)
        elif error.message.startswith("messages"):
            error.message = name + error.message.removeprefix("messages")
        error.param = name

    def _name(self, param: str) -> str:
        found = re.fullmatch(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function)?)?(.*)", param)
        if found is not None:
            place = self._places[int(found[1])]
            item = place.first if found[2] is None else place.calls[int(found[2])]
            return "instructions" if item is None else f"input[{item}]{found[3]}"
        named = _NAMES.get(param, param)
        return re.sub(r"^(tools\[\d+\])\.function", r"\1", named)

    def _read_input(self, given: str | Sequence[InputItem]) -> None:
        if isinstance(given, str):
            self._add(ChatMessage("user", given), 0)
            return
        if not given:
            raise CallerError(ErrorCode.EMPTY_PROMPT, "input is empty; give at least one item", param="input")
        if len(given) > limits.MAX_MESSAGES:
            raise _wrong("input", f"has {len(given)} items, the limit is {limits.MAX_MESSAGES}")
        for index, item in enumerate(given):
            place = f"input[{index}]"
            refuse_unsupported(item, place + ".")
            match item.type:
                case None | "message":
                    self._add(_message(item, place), index)
                case "function_call":
                    self._add_call(item, index, place)
                case "function_call_output":
                    self._add(_result(item, place), index)
                case "reasoning":
                    if item.content:
                        raise _refused(place, "is reasoning, which the models here do not read; leave it out")
                case "item_reference":
                    raise _refused(
                        place,
                        "refers to an item of an earlier answer, and none is stored; send the item itself "
                        "(clients do with store set to false)",
                    )

    def _add(self, message: ChatMessage, first: int | None) -> None:
        self._messages.append(message)
        self._places.append(_Place(first, []))

    def _add_call(self, item: InputItem, index: int, place: str) -> None:
        """Calls belong to the assistant's message before them, as its model wrote them."""
        _require(item, place, "call_id", "name", "arguments")
        call = EarlierCall(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))
        if not self._messages or self._messages[-1].role != "assistant":
            self._add(ChatMessage("assistant", None, tool_calls=[call]), index)
        else:
            before = self._messages[-1]
            self._messages[-1] = msgspec.structs.replace(
                before, tool_calls=[*(before.tool_calls or ()), call]
            )
        self._places[-1].calls.append(index)


def _message(item: InputItem, place: str) -> ChatMessage:
    if item.role is None or item.role == "tool":
        raise _wrong(f"{place}.role", "is not one of system, developer, user and assistant")
    _require(item, place, "content")
    return ChatMessage(item.role, _content(item.content or "", f"{place}.content"))


def _result(item: InputItem, place: str) -> ChatMessage:
    _require(item, place, "call_id", "output")
    return ChatMessage("tool", _content(item.output or "", f"{place}.output"), tool_call_id=item.call_id)


def _content(given: str | list[ItemPart], place: str) -> str | list[TextPart]:
    if isinstance(given, str):
        return given
    for index, part in enumerate(given):
        refuse_unsupported(part, f"{place}[{index}].")
    return [TextPart("text", part.text) for part in given]


def _require(item: InputItem, place: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise _wrong(f"{place}.{name}", f"is missing; an item of type {item.type or 'message'} has it")


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None:
        return None
    refuse_unsupported(text, "text.")
    form = text.format
    if isinstance(form, ResponseSchemaFormat):
        return JsonSchemaFormat(SchemaFormat(form.name, form.schema, form.description, form.strict))
    return form


def _tools(tools: Sequence[ResponseTool] | None) -> list[FunctionTool]:
    for index, tool in enumerate(tools or ()):
        refuse_unsupported(tool, f"tools[{index}].")
    return [
        FunctionTool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))
        for tool in tools or ()
    ]


def _choice(choice: Literal["none", "auto", "required"] | NamedTool | None) -> ToolChoiceField | None:
    return NamedChoice("function", FunctionName(choice.name)) if isinstance(choice, NamedTool) else choice


def _check_metadata(metadata: dict[str, str] | None) -> None:
    pairs, key_chars, value_chars = _METADATA
    given = metadata or {}
    if len(given) > pairs or any(len(k) > key_chars or len(v) > value_chars for k, v in given.items()):
        raise _wrong(
            "metadata",
            f"has more than {pairs} pairs, a key above {key_chars} characters or a value above {value_chars}",
        )


_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def _wrong(param: str, what: str) -> CallerError:
    return CallerError(ErrorCode.INVALID_REQUEST, f"{param} {what}", param=param)


def _refused(param: str, what: str) -> CallerError:
    return CallerError(ErrorCode.UNSUPPORTED_OPTION, f"{param} {what}", param=param)
