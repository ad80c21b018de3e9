"""POST /v1/completions: how prompts are read, and how their answer looks.

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
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
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
from loraplex.server.generation.logprobs import CompletionScores, check_scores, joined, prompt_logprobs
from loraplex.server.generation.sampling_fields import sampling_params, scored_prompt
from loraplex.server.generation.serving import About, Prepared, serve
from loraplex.server.routing import Call, read_body, require_fitting
from loraplex.server.service import Service
from loraplex.server.wire import CompletionRequest
from loraplex.text.assembly import Piece
from loraplex.text.codec import SHORT_TEXT_CHARS, TextCodec
from loraplex.text.engine_sampling import check_sampling

DEFAULT_MAX_TOKENS = 16


async def completions(call: Call) -> None:
    """Continue prompts."""
    await serve(call, Completions())


class Completions:
    """`serving.Endpoint` of prompts."""

    prefix = "cmpl-"
    param = "prompt"

    async def read(self, call: Call) -> CompletionRequest:
        """The body."""
        return await read_body(call, CompletionRequest)

    async def prepare(self, call: Call, request: CompletionRequest, model: ServedModel) -> Prepared:
        """The prompts as token ids."""
        service, params, prompt = call.service, _parameters(request), request.prompt
        given = await service.workers.run_if(_is_long(prompt), lambda: _prompts(prompt))
        if len(given) * params.n > limits.MAX_CHOICES:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                f"{len(given)} prompts of {params.n} samples make {len(given) * params.n} choices, "
                f"the limit is {limits.MAX_CHOICES}",
                param="n",
            )
        check_sampling(params, model.codec)
        texts = [item for item in given if isinstance(item, str)]
        if texts:
            require_fitting(
                need_codec(model.codec, "prompt"), texts, service.engine_info["max_model_len"], "prompt"
            )
        size = sum(map(len, given))
        ids, echoes = await service.workers.run_if(
            size > SHORT_TEXT_CHARS, lambda: _read(service, model.codec, given, request)
        )
        for tokens in ids:
            check_context(service, len(tokens), params.max_tokens, "max_tokens")
        total = sum(map(len, ids))
        check_submitted(total, params.n)
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        check_scores(total, params.n, params.prompt_logprobs, param)
        return Prepared(given, ids, params, echoes)

    def rendering(
        self, about: About, request: CompletionRequest, prepared: Prepared, generation: Generation
    ) -> CompletionRendering:
        """The chunks and body of completions."""
        return CompletionRendering(about, request, prepared, generation)


def _read(
    service: Service, codec: TextCodec | None, given: Sequence[str | list[int]], request: CompletionRequest
) -> tuple[list[list[int]], list[str] | None]:
    """Prompts as token ids, and as texts where the answer repeats them."""
    special = request.add_special_tokens is not False
    ids = [
        item if isinstance(item, list) else need_codec(codec, "prompt").encode(item, special)
        for item in given
    ]
    ids = [truncated(service, item, request) for item in ids]
    for prompt in ids:
        check_prompt(service, prompt, "prompt")
    return ids, [_echo(codec, item) for item in given] if request.echo else None


def _is_long(prompt: str | list[Any]) -> bool:
    """Whether looking at every item would hold up the event loop."""
    if isinstance(prompt, str):
        return False
    inside = prompt[: limits.MAX_CHOICES]
    return len(prompt) + sum(len(item) for item in inside if isinstance(item, list)) > SHORT_TEXT_CHARS


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
        request,
        max(given, 1) if echo_only else given,
        top,
        scored_prompt(request, top if request.echo else None),
    )
    if request.best_of not in (None, params.n):
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"best_of is {request.best_of} and n is {params.n}; only equal values are supported",
            param="best_of",
        )
    return params


class CompletionRendering:
    """`serving.Rendering` of prompts."""

    def __init__(
        self, about: About, request: CompletionRequest, prepared: Prepared, generation: Generation
    ) -> None:
        self._about = about
        self._prepared = prepared
        self._generation = generation
        self._echoes = prepared.echoes
        self._silent = request.max_tokens == 0
        self._with_ids = bool(request.return_token_ids)
        count = len(prepared.ids) * prepared.params.n
        self._scores = (
            None
            if request.logprobs is None
            else [CompletionScores(about.served.codec, request.logprobs) for _ in range(count)]
        )
        self._prompt_top = request.prompt_logprobs
        self._begun: set[int] = set()

    def opening(self) -> bytes:
        """Nothing: a choice begins with its first text."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """More text of one choice."""
        choice = self._choice(piece)
        news = choice.text or choice.finish_reason or choice.logprobs is not None
        if not news and not (self._with_ids and choice.token_ids):
            return b""
        usage = self._about.chunk_usage(self._usage)
        return event(Completion(**self._about.fields([choice]), usage=usage))

    def closing(self) -> bytes:
        """Token counts, where they were asked for."""
        if not self._about.wants_usage:
            return DONE
        return event(Completion(**self._about.fields([]), usage=self._usage())) + DONE

    def failed(self, error: LoraplexError) -> bytes:
        """The error."""
        return failure(error)

    def _usage(self) -> Usage:
        """Token counts; what was generated only to score a prompt does not count."""
        return self._generation.usage(0 if self._silent else None)

    def whole(self, parts: dict[int, list[Piece]]) -> msgspec.Struct:
        """The answer with its texts."""
        scored = {index: self._prompt_scores(pieces) for index, pieces in parts.items()}
        n = self._prepared.params.n
        choices = [
            _merge([self._choice(piece) for piece in pieces], scored[index // n * n])
            for index, pieces in parts.items()
        ]
        return Completion(**self._about.fields(choices), usage=self._usage())

    def _prompt_scores(self, pieces: Sequence[Piece]) -> PromptLogprobs | UnsetType:
        if self._prompt_top is None:
            return UNSET
        entries = [entry for piece in pieces for entry in piece.prompt_logprobs]
        return prompt_logprobs(self._about.served.codec, entries, self._prompt_top)

    def _choice(self, piece: Piece) -> CompletionChoice:
        index = piece.choice
        prompt = index // self._prepared.params.n
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
            stop_reason=UNSET if piece.stop_reason is None else piece.stop_reason,
            token_ids=list(ids) if self._with_ids else UNSET,
            prompt_token_ids=list(self._prepared.ids[prompt]) if first and self._with_ids else UNSET,
        )

    def _logprobs(
        self, index: int, prompt: int, first: bool, piece: Piece, entries: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if self._scores is None:
            return None
        scores = self._scores[index]
        begin = [scores.first(self._prepared.ids[prompt][0])] if first and self._echoes is not None else []
        added = scores.add([*piece.prompt_logprobs, *entries])
        return joined([*begin, added]) if begin or added.tokens else None


def _echo(codec: TextCodec | None, item: str | list[int]) -> str:
    if isinstance(item, str):
        return item
    return "" if codec is None else codec.decode(item, skip_special=False)


def _merge(parts: list[CompletionChoice], of_prompt: PromptLogprobs | UnsetType) -> CompletionChoice:
    """One choice from its pieces. of_prompt: log probabilities of its prompt."""
    scored = [part.logprobs for part in parts if part.logprobs is not None]
    last = parts[-1]
    return CompletionChoice(
        index=last.index,
        text="".join(part.text for part in parts),
        logprobs=joined(scored) if scored else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=UNSET if last.token_ids is UNSET else [t for part in parts for t in part.token_ids or ()],
        prompt_token_ids=parts[0].prompt_token_ids,
        prompt_logprobs=of_prompt,
    )
