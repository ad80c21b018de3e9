"""POST /v1/completions.

Specification: DESIGN 5 "HTTP".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import TokenLogprobs
from loraplex.core.request import SamplingParams
from loraplex.server.answers import Completion, CompletionChoice, CompletionLogprobs, event
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
from loraplex.server.logprobs import CompletionScores, joined
from loraplex.server.routing import Call, encode_text, stream_pieces, until_disconnect
from loraplex.server.sampling import sampling_params
from loraplex.server.service import Service
from loraplex.server.wire import CompletionRequest, decode

DEFAULT_MAX_TOKENS = 16


async def completions(call: Call) -> None:
    """Decode, check, and serve until the client goes away."""
    arrival = call.service.clock.now_ns()
    request = decode(await call.exchange.body(), CompletionRequest)
    await until_disconnect(call, _serve(call, request, arrival))


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts in either of four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {str}:
        return list(prompt)
    if kinds == {int}:
        return [prompt]
    if kinds == {list} and all({type(token) for token in item} <= {int} for item in prompt):
        return list(prompt)
    if not prompt:
        raise CallerError(
            ErrorCode.EMPTY_PROMPT, "the prompt has no tokens; give at least one", param="prompt"
        )
    raise CallerError(
        ErrorCode.INVALID_REQUEST,
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids",
        param="prompt",
    )


def _parameters(request: CompletionRequest) -> SamplingParams:
    echo_only = request.max_tokens == 0 and bool(request.echo)
    given = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    top = request.logprobs
    params = sampling_params(
        request, max(given, 1) if echo_only else given, top, top if request.echo else None
    )
    if request.best_of not in (None, params.n):
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"best_of is {request.best_of} and n is {params.n}; only equal values are supported",
            param="best_of",
        )
    if request.stream_options is not None and not request.stream:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "stream_options needs stream to be true", param="stream_options"
        )
    return params


async def _serve(call: Call, request: CompletionRequest, arrival_ns: int) -> None:
    service = call.service
    service.require_ready()
    params = _parameters(request)
    priority, deadline = urgency(request, arrival_ns)
    given = _prompts(request.prompt)
    if len(given) * params.n > limits.MAX_CHOICES:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"{len(given)} prompts of {params.n} samples make {len(given) * params.n} choices, "
            f"the limit is {limits.MAX_CHOICES}",
            param="n",
        )
    if params.stop_strings:
        need_codec(service, "stop")
    async with bind_model(service, request.model) as model:
        prompts = [
            await encode_text(need_codec(service, "prompt"), item) if isinstance(item, str) else item
            for item in given
        ]
        for ids in prompts:
            check_prompt(service, ids, "prompt")
            check_context(service, len(ids), params.max_tokens, "max_tokens")
        engine_id = f"cmpl-{call.exchange.request_id}.{next(call.site.serial)}"
        job = Job(engine_id, prompts, params, call.caller.tenant, priority, arrival_ns, deadline)
        call.exchange.answer_headers |= model.headers
        call.exchange.facts |= {"model": model.name, "stream": bool(request.stream)}
        with Generation(service, model, job) as generation:
            answer = _Answer(call, request, model, job, generation, given)
            call.exchange.facts["generation"] = generation
            if request.stream:
                await answer.stream()
            else:
                await answer.whole()


class _Answer:
    """Builds the answer of one request, whole or in chunks."""

    def __init__(
        self,
        call: Call,
        request: CompletionRequest,
        model: ServedModel,
        job: Job,
        generation: Generation,
        given: Sequence[str | list[int]],
    ) -> None:
        self._call = call
        self._request = request
        self._model = model
        self._job = job
        self._generation = generation
        self._echoes = [_echo(call.service, item) for item in given] if request.echo else None
        self._silent = request.max_tokens == 0
        self._with_ids = bool(request.return_token_ids)
        count = len(job.prompts) * job.params.n
        self._scores = (
            None
            if request.logprobs is None
            else [CompletionScores(call.service.codec, request.logprobs) for _ in range(count)]
        )
        self._begun: set[int] = set()

    async def whole(self) -> None:
        """Collect everything and answer once."""
        texts: dict[int, list[CompletionChoice]] = {}
        while pieces := await self._generation.read():
            for piece in pieces:
                texts.setdefault(piece.choice, []).append(self._choice(piece))
        choices = [_merge(texts[index]) for index in sorted(texts)]
        body = self._body(choices)
        await self._call.exchange.answer(
            Completion(**{**body, "usage": self._generation.usage(0 if self._silent else None)})
        )

    async def stream(self) -> None:
        """Answer in chunks."""
        await stream_pieces(self._call, self._generation, b"", self._chunk, self._closing)

    def _chunk(self, piece: Piece) -> bytes:
        choice = self._choice(piece)
        news = choice.text or choice.finish_reason or choice.logprobs is not None
        if not news and not (self._with_ids and choice.token_ids):
            return b""
        return event(Completion(**self._body([choice]), usage=None if self._wants_usage else UNSET))

    @property
    def _wants_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and options.include_usage

    def _closing(self) -> bytes:
        if not self._wants_usage:
            return b""
        return event(Completion(**self._body([]), usage=self._generation.usage(0 if self._silent else None)))

    def _body(self, choices: list[CompletionChoice]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._call.exchange.request_id}",
            "created": self._call.created,
            "model": self._request.model,
            "choices": choices,
            "system_fingerprint": self._model.fingerprint,
        }

    def _choice(self, piece: Piece) -> CompletionChoice:
        index = piece.choice
        prompt = index // self._job.params.n
        first = index not in self._begun
        self._begun.add(index)
        text, ids, entries = piece.text, piece.token_ids, piece.logprobs
        reason = piece.finish_reason
        if self._silent:
            text, ids, entries = "", [], []
            reason = None if reason is None else "length"
        if first and self._echoes is not None:
            text = self._echoes[prompt] + text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, prompt, first, piece, entries),
            finish_reason=reason,
            token_ids=list(ids) if self._with_ids else UNSET,
            prompt_token_ids=list(self._job.prompts[prompt]) if first and self._with_ids else UNSET,
        )

    def _logprobs(
        self, index: int, prompt: int, first: bool, piece: Piece, entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if self._scores is None:
            return None
        scores = self._scores[index]
        begin = [scores.first(self._job.prompts[prompt][0])] if first and self._echoes is not None else []
        added = scores.add([*piece.prompt_logprobs, *entries])
        return joined([*begin, added]) if begin or added.tokens else None


def _echo(service: Service, item: str | list[int]) -> str:
    if isinstance(item, str):
        return item
    return "" if service.codec is None else service.codec.decode(item, skip_special=False)


def _merge(parts: list[CompletionChoice]) -> CompletionChoice:
    """One choice from its pieces."""
    scored = [part.logprobs for part in parts if part.logprobs is not None]
    last = parts[-1]
    return CompletionChoice(
        index=last.index,
        text="".join(part.text for part in parts),
        logprobs=joined(scored) if scored else None,
        finish_reason=last.finish_reason,
        token_ids=UNSET if last.token_ids is UNSET else [t for part in parts for t in part.token_ids or ()],
        prompt_token_ids=parts[0].prompt_token_ids,
    )
