"""What POST /v1/responses answers with, and the events of its streams. Specification: interface "HTTP"."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loraplex.server.answers import PromptTokensDetails, TokenLogprob, Usage, encode
from loraplex.server.responses_wire import NamedTool, ResponseSchemaFormat, ResponseTool
from loraplex.server.wire import JsonObjectFormat, TextFormat

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a message. logprobs: only if asked for."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What is said."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call. call_id: what its result names. arguments: JSON text, cut off where the answer was."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputCall


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why an answer failed that had begun. code: of the errors that are listed."""

    code: str
    message: str


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: none; what a model thinks is text here."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts of a request."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        """The same counts by this interface's names."""
        return cls(
            usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details
        )


class AnswerText(msgspec.Struct, frozen=True):
    """What the text was held to."""

    format: TextFormat | JsonObjectFormat | ResponseSchemaFormat = TextFormat()


class NoReasoning(msgspec.Struct, frozen=True):
    """Reasoning was not asked for."""

    effort: None = None
    summary: None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of /v1/responses, and in its stream. store: nothing is kept, whatever the request says."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: NoReasoning = NoReasoning()
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool = False
    system_fingerprint: str
    temperature: float
    text: AnswerText
    tool_choice: Literal["none", "auto", "required"] | NamedTool
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


def named_event(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    """One server-sent event with its name. number: of the event in its stream."""
    data = encode({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
