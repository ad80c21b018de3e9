"""POST /v1/chat/completions.

Specification: DESIGN 5 "HTTP".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import TokenLogprobs
from loraplex.core.request import SamplingParams
from loraplex.runtime.text import TextCodec
from loraplex.server.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    event,
)
from loraplex.server.generate import (
    Generation,
    Job,
    Piece,
    ServedModel,
    bind_model,
    check_context,
    check_prompt,
    need_codec,
    urgency,
)
from loraplex.server.logprobs import chat_logprobs
from loraplex.server.routing import LONG_TEXT_CHARS, Call, stream_pieces, until_disconnect
from loraplex.server.sampling import sampling_params
from loraplex.server.wire import ChatRequest, decode


async def chat_completions(call: Call) -> None:
    """Decode, check, and serve until the client goes away."""
    arrival = call.service.clock.now_ns()
    request = decode(await call.exchange.body(), ChatRequest)
    await until_disconnect(call, _serve(call, request, arrival))


def _check(request: ChatRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"response_format {request.response_format.type!r} is not supported by this server; only text is",
            param="response_format",
        )
    if request.top_logprobs is not None and not request.logprobs:
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
            f"max_tokens is {request.max_tokens} and max_completion_tokens is {request.max_completion_tokens}; give one",
            param="max_completion_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "stream_options needs stream to be true", param="stream_options"
        )
    if not request.messages:
        raise CallerError(ErrorCode.EMPTY_PROMPT, "messages is empty; give at least one", param="messages")


async def _prompt(codec: TextCodec, request: ChatRequest) -> list[int]:
    messages = [{"role": message.role, "content": message.text} for message in request.messages]
    if sum(len(message["content"]) for message in messages) <= LONG_TEXT_CHARS:
        return codec.chat(messages)
    return await asyncio.to_thread(codec.chat, messages)


def _parameters(call: Call, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
    """Without a limit of the request's own, the answer may be as long as the context leaves."""
    given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if given is None:
        check_context(call.service, prompt_tokens, 1, "messages")
        given = call.service.engine_info["max_model_len"] - prompt_tokens
    params = sampling_params(request, given, (request.top_logprobs or 0) if request.logprobs else None)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    check_context(call.service, prompt_tokens, params.max_tokens, name)
    return params


async def _serve(call: Call, request: ChatRequest, arrival_ns: int) -> None:
    service = call.service
    service.require_ready()
    _check(request)
    priority, deadline = urgency(request, arrival_ns)
    async with bind_model(service, request.model) as model:
        codec = need_codec(service, "messages")
        ids = await _prompt(codec, request)
        check_prompt(service, ids, "messages")
        params = _parameters(call, request, len(ids))
        engine_id = f"chatcmpl-{call.exchange.request_id}.{next(call.site.serial)}"
        job = Job(engine_id, [ids], params, call.caller.tenant, priority, arrival_ns, deadline)
        call.exchange.answer_headers |= model.headers
        call.exchange.facts |= {"model": model.name, "stream": bool(request.stream)}
        with Generation(service, model, job) as generation:
            call.exchange.facts["generation"] = generation
            answer = _Answer(call, request, model, codec, generation, ids)
            if request.stream:
                await answer.stream(params.n)
            else:
                await answer.whole()


class _Answer:
    """Builds the answer of one request, whole or in chunks."""

    def __init__(
        self,
        call: Call,
        request: ChatRequest,
        model: ServedModel,
        codec: TextCodec,
        generation: Generation,
        prompt: Sequence[int],
    ) -> None:
        self._call = call
        self._request = request
        self._model = model
        self._codec = codec
        self._generation = generation
        self._prompt = list(prompt)
        self._with_ids = bool(request.return_token_ids)

    async def whole(self) -> None:
        """Collect everything and answer once."""
        parts: dict[int, list[Piece]] = {}
        while pieces := await self._generation.read():
            for piece in pieces:
                parts.setdefault(piece.choice, []).append(piece)
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage("".join(piece.text for piece in parts[index])),
                logprobs=self._logprobs([entry for piece in parts[index] for entry in piece.logprobs]),
                finish_reason=parts[index][-1].finish_reason,
                token_ids=self._ids([token for piece in parts[index] for token in piece.token_ids]),
            )
            for index in sorted(parts)
        ]
        body = self._body("chat.completion", choices)
        await self._call.exchange.answer(
            ChatCompletion(
                **body,
                usage=self._generation.usage(),
                prompt_token_ids=self._prompt if self._with_ids else UNSET,
            )
        )

    async def stream(self, count: int) -> None:
        """Answer in chunks; each choice opens with its role."""
        opening = b"".join(
            self._event(ChatChoice(index=index, delta=Delta(role="assistant", content="")))
            for index in range(count)
        )
        await stream_pieces(self._call, self._generation, opening, self._chunk, self._closing)

    def _chunk(self, piece: Piece) -> bytes:
        if not (piece.text or piece.finish_reason or piece.logprobs or (self._with_ids and piece.token_ids)):
            return b""
        choice = ChatChoice(
            index=piece.choice,
            delta=Delta(content=piece.text) if piece.text or not piece.finish_reason else Delta(),
            logprobs=self._logprobs(piece.logprobs) if piece.logprobs else None,
            finish_reason=piece.finish_reason,
            token_ids=self._ids(piece.token_ids),
        )
        return self._event(choice)

    def _event(self, choice: ChatChoice) -> bytes:
        body = self._body("chat.completion.chunk", [choice])
        return event(ChatCompletion(**body, usage=None if self._wants_usage else UNSET))

    @property
    def _wants_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and options.include_usage

    def _closing(self) -> bytes:
        if not self._wants_usage:
            return b""
        return event(
            ChatCompletion(**self._body("chat.completion.chunk", []), usage=self._generation.usage())
        )

    def _body(self, kind: str, choices: list[ChatChoice]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._call.exchange.request_id}",
            "object": kind,
            "created": self._call.created,
            "model": self._request.model,
            "choices": choices,
            "system_fingerprint": self._model.fingerprint,
        }

    def _ids(self, ids: list[int]) -> Any:
        return ids if self._with_ids else UNSET

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._codec, entries, self._request.top_logprobs or 0)
