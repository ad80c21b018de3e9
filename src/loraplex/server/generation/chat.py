"""POST /v1/chat/completions: how a conversation is read, and how its answer looks.

Specification: interface "HTTP".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.messages import TokenLogprobs
from loraplex.core.request import SamplingParams
from loraplex.server.answers import (
    DONE,
    AssistantMessage,
    CalledFunction,
    CallPart,
    ChatChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    PromptLogprobs,
    event,
    failure,
)
from loraplex.server.generation.generate import (
    Generation,
    ServedModel,
    check_context,
    check_prompt,
    check_submitted,
    need_codec,
    truncated,
)
from loraplex.server.generation.logprobs import chat_logprobs, check_scores, prompt_logprobs
from loraplex.server.generation.sampling_fields import sampling_params, scored_prompt
from loraplex.server.generation.serving import About, Prepared, serve
from loraplex.server.routing import Call, read_body, require_fitting
from loraplex.server.wire import ChatRequest, TokenizeRequest
from loraplex.text.assembly import Piece
from loraplex.text.codec import SHORT_TEXT_CHARS, TextCodec
from loraplex.text.conversation import read_choice, read_tools, template_messages, texts_of
from loraplex.text.engine_sampling import check_sampling
from loraplex.text.tools.tool_types import Message, ToolChoice, joined
from loraplex.text.tools.tool_use import ToolUse, use_of


async def chat_completions(call: Call) -> None:
    """Answer a conversation."""
    await serve(call, Chat())


class Chat:
    """`serving.Endpoint` of conversations."""

    prefix = "chatcmpl-"
    param = "messages"

    async def read(self, call: Call) -> ChatRequest:
        """The body."""
        return await read_body(call, ChatRequest)

    async def prepare(self, call: Call, request: ChatRequest, model: ServedModel) -> Prepared:
        """The conversation through the model's template."""
        _check(request)
        codec = need_codec(model.codec, "messages")
        longest: int = call.service.engine_info["max_model_len"]
        texts = texts_of(request.messages)
        require_fitting(codec, texts, longest, "messages")
        long = sum(map(len, texts)) > SHORT_TEXT_CHARS or len(texts) > limits.SHORT_CONVERSATION
        given = template_messages(request.messages)
        tools = _tools(call, request, model, codec)
        ids = await call.service.workers.run_if(
            long or tools is not None,
            lambda: conversation_ids(codec, request, given, tools, model.chat_suffix),
        )
        ids = truncated(call.service, ids, request)
        check_prompt(call.service, ids, "messages")
        params = _parameters(call, request, len(ids))
        check_sampling(params, codec)
        check_submitted(len(ids), params.n)
        check_scores(len(ids), 1, params.prompt_logprobs, "prompt_logprobs")
        return Prepared(given, [ids], params, tools=tools)

    def rendering(
        self, about: About, request: ChatRequest, prepared: Prepared, generation: Generation
    ) -> ChatRendering:
        """Chat's chunks and body."""
        return ChatRendering(about, request, need_codec(about.served.codec, "messages"), prepared, generation)


def conversation_ids(
    codec: TextCodec,
    request: ChatRequest | TokenizeRequest,
    given: Sequence[Message],
    tools: ToolUse | None = None,
    suffix: str | None = None,
) -> list[int]:
    """Token ids of a conversation, by what the request says of its end. suffix: how an answer opens, of the
    model's card.
    """
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            "continue_final_message goes on with the last message and add_generation_prompt begins another; "
            "give one",
            param="continue_final_message",
        )
    return codec.chat(
        given,
        tools,
        "" if request.add_generation_prompt is False else suffix,
        bool(request.add_special_tokens),
        continues=continues,
        variables=request.chat_template_kwargs,
    )


def _tools(call: Call, request: ChatRequest, model: ServedModel, codec: TextCodec) -> ToolUse | None:
    """What the answer may call."""
    tools, (choice, named) = read_tools(request.tools), read_choice(request.tool_choice)
    if not tools and named is None and choice is not ToolChoice.REQUIRED:
        return None
    return use_of(
        codec.template(),
        tools,
        choice,
        named,
        parallel=request.parallel_tool_calls is not False,
        form=model.tool_format,
    )


def _check(request: ChatRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "top_logprobs needs logprobs to be true", param="top_logprobs"
        )
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= limits.MAX_LOGPROBS:
        raise CallerError(
            ErrorCode.INVALID_SAMPLING,
            f"top_logprobs must be from 0 to {limits.MAX_LOGPROBS}, got {request.top_logprobs}",
            param="top_logprobs",
        )
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"max_tokens is {request.max_tokens} and max_completion_tokens is "
            f"{request.max_completion_tokens}; give one",
            param="max_completion_tokens",
        )
    if len(request.messages) > limits.MAX_MESSAGES:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"{len(request.messages)} messages were sent, the limit is {limits.MAX_MESSAGES}",
            param="messages",
        )
    if not request.messages:
        raise CallerError(ErrorCode.EMPTY_PROMPT, "messages is empty; give at least one", param="messages")


def _parameters(call: Call, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
    """Without a limit of the request's own, the answer may be as long as the context leaves."""
    given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if given is None:
        check_context(call.service, prompt_tokens, 1, "messages")
        given = call.service.engine_info["max_model_len"] - prompt_tokens
    top = (request.top_logprobs or 0) if request.logprobs else None
    params = sampling_params(request, given, top, scored_prompt(request))
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    check_context(call.service, prompt_tokens, params.max_tokens, name)
    return params


def _delta(piece: Piece) -> ChatDelta:
    calls = [
        CallPart(
            CalledFunction(call.arguments, UNSET if call.name is None else call.name),
            call.index,
            UNSET if call.id is None else call.id,
            UNSET if call.name is None else "function",
        )
        for call in piece.calls
    ]
    silent = not piece.text and (calls or piece.finish_reason)
    return ChatDelta(content=UNSET if silent else piece.text, tool_calls=calls or UNSET)


def _message(pieces: Sequence[Piece]) -> AssistantMessage:
    text = "".join(piece.text for piece in pieces)
    calls = [
        CallPart(CalledFunction(call.arguments, call.name), id=call.id, type="function")
        for call in joined([delta for piece in pieces for delta in piece.calls])
    ]
    return AssistantMessage(None if calls and not text else text, tool_calls=calls or UNSET)


class ChatRendering:
    """`serving.Rendering` of conversations."""

    def __init__(
        self,
        about: About,
        request: ChatRequest,
        codec: TextCodec,
        prepared: Prepared,
        generation: Generation,
    ) -> None:
        self._about = about
        self._request = request
        self._codec = codec
        self._prepared = prepared
        self._generation = generation
        self._with_ids = bool(request.return_token_ids)

    def opening(self) -> bytes:
        """Each choice opens with its role."""
        return b"".join(
            self._event(ChatChoice(index=index, delta=ChatDelta(role="assistant", content="")))
            for index in range(self._prepared.params.n)
        )

    def chunk(self, piece: Piece) -> bytes:
        """A delta of one choice."""
        news = piece.text or piece.calls or piece.finish_reason or piece.logprobs
        if not (news or (self._with_ids and piece.token_ids)):
            return b""
        choice = ChatChoice(
            index=piece.choice,
            delta=_delta(piece),
            logprobs=self._logprobs(piece.logprobs) if piece.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=UNSET if piece.stop_reason is None else piece.stop_reason,
            token_ids=self._ids(piece.token_ids),
        )
        return self._event(choice)

    def closing(self) -> bytes:
        """Token counts, where they were asked for."""
        if not self._about.wants_usage:
            return DONE
        counts = ChatCompletion(
            object="chat.completion.chunk", **self._about.fields([]), usage=self._generation.usage()
        )
        return event(counts) + DONE

    def failed(self, error: LoraplexError) -> bytes:
        """The error."""
        return failure(error)

    def whole(self, parts: dict[int, list[Piece]]) -> msgspec.Struct:
        """The answer with its messages."""
        choices = [
            ChatChoice(
                index=index,
                message=_message(pieces),
                logprobs=self._logprobs([entry for piece in pieces for entry in piece.logprobs]),
                finish_reason=pieces[-1].finish_reason,
                stop_reason=UNSET if pieces[-1].stop_reason is None else pieces[-1].stop_reason,
                token_ids=self._ids([token for piece in pieces for token in piece.token_ids]),
            )
            for index, pieces in parts.items()
        ]
        return ChatCompletion(
            object="chat.completion",
            **self._about.fields(choices),
            usage=self._generation.usage(),
            prompt_token_ids=list(self._prepared.ids[0]) if self._with_ids else UNSET,
            prompt_logprobs=self._prompt_scores(parts[0]),
        )

    def _event(self, choice: ChatChoice) -> bytes:
        usage = self._about.chunk_usage(self._generation.usage)
        return event(
            ChatCompletion(object="chat.completion.chunk", **self._about.fields([choice]), usage=usage)
        )

    def _prompt_scores(self, pieces: Sequence[Piece]) -> PromptLogprobs | UnsetType:
        top = self._request.prompt_logprobs
        if top is None:
            return UNSET
        return prompt_logprobs(
            self._codec, [entry for piece in pieces for entry in piece.prompt_logprobs], top
        )

    def _ids(self, ids: list[int]) -> Any:
        return ids if self._with_ids else UNSET

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._codec, entries, self._request.top_logprobs or 0)
