"""What the server answers with: OpenAI's response bodies as structs, and the JSON encoding of everything.

Specification: interface "HTTP".
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core import limits
from loraplex.core.errors import CODES, LoraplexError, Root

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot write; the value that OpenAI's own service uses."""

_ENCODER: Final = msgspec.json.Encoder()
_TYPES: Final = {
    Root.CALLER: "invalid_request_error",
    Root.CAPACITY: "capacity_error",
    Root.OURS: "internal_error",
}


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: of the prompt tokens, those whose KV rows were reused instead of computed."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token; the first prompt token has neither a log probability nor alternatives."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a position of the prompt. rank: among all tokens, from 1. decoded_token: null without a
    tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By position and token id; null at the first one, which nothing predicts."""


class CompletionChoice(msgspec.Struct, frozen=True):
    """One sample of a completion, or the part of it that a chunk adds. stop_reason: the stop string or stop
    token that ended it.

    token_ids: only if asked for.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer, and chunk, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token at a position and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities in chat's shape."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """What is called. name: in a stream with the call's first chunk only. arguments: JSON text, or what a
    chunk adds.
    """

    arguments: str
    name: str | UnsetType = UNSET


class CallPart(msgspec.Struct, frozen=True):
    """A call (no index), or what a chunk adds to one (index). id, type: with the first chunk only."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """The whole answer of one choice. content: null where it only calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[CallPart] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a chat answer (`message`), or what a chunk adds to it (`delta`)."""

    index: int
    message: AssistantMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer, and chunk, of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


def encode(value: Any) -> bytes:
    """Compact JSON. Numbers that JSON cannot write must not reach this."""
    return _ENCODER.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


DONE: Final = b"data: [DONE]\n\n"
"""Ends a stream of chunks."""


def error_body(error: LoraplexError) -> dict[str, Any]:
    """The JSON of a typed error. What a message quotes of the request does not make the answer as long as
    that.
    """
    return {
        "error": {
            "message": _cut(error.message, limits.MAX_ERROR_CHARS),
            "type": _TYPES[CODES[error.code].root],
            "param": None if error.param is None else _cut(error.param, limits.MAX_ERROR_PARAM_CHARS),
            "code": error.code.value,
        }
    }


def failure(error: LoraplexError) -> bytes:
    """The end of a stream of chunks that an error cuts off."""
    return event(error_body(error)) + DONE


def _cut(text: str, most: int) -> str:
    """The text, or its beginning and its end with how much is left out between them."""
    if len(text) <= most:
        return text
    head, tail = most * 3 // 4, most // 8
    return f"{text[:head]} ... {len(text) - head - tail} characters ... {text[-tail:]}"
