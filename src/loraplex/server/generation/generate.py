"""Generation: a request's prompts and samples go to the engine together; their text comes back piece by
piece.

Owns the binding of a name to a revision for a request's life. Leaving a generation in any way withdraws what
is still open, so that a client that went away costs no further step.

Specification: architecture "A request's way" (2, 3, 11), rulings "Text".
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from loraplex.artifact.card import Card
from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import Submit, Tokens
from loraplex.core.request import SamplingParams
from loraplex.process.client import RequestGroup
from loraplex.server.answers import PromptTokensDetails, Usage
from loraplex.server.provenance import ChoiceSeen, RanOn, Served
from loraplex.server.service import Service
from loraplex.server.wire import GenerationFields
from loraplex.text.assembly import Piece, SampleAssembly, fewest_cached
from loraplex.text.codec import TextCodec, further_ends, sampled_ids
from loraplex.text.engine_sampling import engine_sampling, prompt_seed
from loraplex.text.prefix_keys import Acting, PromptKeys
from loraplex.text.tools.tool_use import ToolUse

_NS_PER_MS = 1_000_000
_PRIORITY_BOUND = 1 << 31


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a `model` field means. name: the base's, or `alias@revision`. key: semantic digest; None is the
    base.

    served: the digests behind it, for the request's record. codec: reads and writes the text of its requests.
    acting: the adapter, as far as KV rows can tell. card: what its card says of its use, if anything.
    tool_format: how it writes calls, where an option or its card says so.
    """

    name: str
    key: str | None
    digest: str
    served: Served
    codec: TextCodec | None
    acting: Acting | None = None
    card: Card | None = None
    tool_format: str | None = None

    @property
    def invocation_text(self) -> str | None:
        """The invocation as text, where the card gives it."""
        return None if self.card is None else self.card.invocation

    @property
    def chat_suffix(self) -> str | None:
        """What a conversation ends with in place of the template's opening of an answer, where the card gives
        it.
        """
        return None if self.card is None else self.card.chat_suffix

    @property
    def fingerprint(self) -> str:
        """Name and first digits of the digest: what was served, in one string."""
        return f"{self.name if self.key is not None else 'base'}:{self.digest[:16]}"

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that say what was served."""
        return {"x-loraplex-model": self.name, "x-loraplex-semantic-digest": self.digest}


@asynccontextmanager
async def bind_model(service: Service, name: str, tenant: str) -> AsyncIterator[ServedModel]:
    """Resolve a tenant's `model` field once and hold what it means, ready in the engine. Raises
    `model_not_found`.
    """
    if name == service.base_name:
        yield base_model(service)
        return
    async with service.adapters.serving(name, tenant) as (revision, text):
        codec = await service.workers.run_if(not text.at_hand, text.codec)
        register = service.adapters.registration_of(revision.key)
        served = Served(
            revision.name,
            revision.artifact.base,
            revision.namespace,
            revision.artifact.artifact,
            revision.key,
            register.kernel_digest,
            service.adapters.generation,
        )
        acting, card = Acting.of(register), revision.card
        form = service.config.tool_format_of(revision.alias, None if card is None else card.tool_format)
        yield ServedModel(revision.name, revision.key, revision.key, served, codec, acting, card, form)


def base_model(service: Service) -> ServedModel:
    """The base."""
    name, base = service.base_name, str(service.engine_info["base_abi"])
    record = Served(name, base, catalog_generation=service.adapters.generation)
    return ServedModel(
        name, None, base, record, service.codec, tool_format=service.config.tool_format_of(None)
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate: for each prompt, `params.n` samples. Times in nanoseconds of the service's clock, 0
    is none.

    keys: of each prompt. namespace: of the prefix cache. grammar: what every sample must follow, if anything.
    tools: what every sample may call. bad_words: token ids. scores_each: log probabilities of a prompt come
    with every sample, not only with its first.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    keys: Sequence[PromptKeys]
    namespace: str
    params: SamplingParams
    tenant: str
    priority: int
    arrival_ns: int
    deadline_ns: int
    grammar: str | None = None
    tools: ToolUse | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    scores_each: bool = False


def urgency(request: GenerationFields, arrival_ns: int) -> tuple[int, int]:
    """Priority and deadline of a request. Raises `invalid_request` with the field."""
    priority, limit_ms = request.priority or 0, request.ttft_deadline_ms
    if not -_PRIORITY_BOUND <= priority < _PRIORITY_BOUND:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"priority must fit into 32 bits, got {priority}", param="priority"
        )
    if limit_ms is not None and not 1 <= limit_ms <= limits.MAX_TTFT_DEADLINE_MS:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"ttft_deadline_ms must be from 1 to a day's milliseconds, got {limit_ms}",
            param="ttft_deadline_ms",
        )
    return priority, 0 if limit_ms is None else arrival_ns + limit_ms * _NS_PER_MS


def check_prompt(service: Service, ids: Sequence[int], param: str) -> None:
    """Raise unless the ids are a prompt that the model could read."""
    if not ids:
        raise CallerError(ErrorCode.EMPTY_PROMPT, "the prompt has no tokens; give at least one", param=param)
    check_ids(service, ids, param)


def check_ids(service: Service, ids: Sequence[int], param: str) -> None:
    """Raise `token_out_of_range` unless every id lies in the vocabulary."""
    vocab: int = service.engine_info["vocab_size"]
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab:
        raise CallerError(
            ErrorCode.TOKEN_OUT_OF_RANGE,
            f"token id {high if high >= vocab else low} lies outside the vocabulary of {vocab}",
            param=param,
        )


def truncated(service: Service, ids: Sequence[int], request: GenerationFields) -> list[int]:
    """The last tokens of a prompt, as many as a request keeps; -1 keeps as many as the model has positions.
    Raises `invalid_request` for 0 and for a number below -1.
    """
    kept = request.truncate_prompt_tokens
    if kept is not None and kept != -1 and kept < 1:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"truncate_prompt_tokens must be at least 1, or -1 for the model's positions, got {kept}",
            param="truncate_prompt_tokens",
        )
    if kept == -1:
        kept = int(service.engine_info["max_model_len"])
    return list(ids) if kept is None else list(ids[-kept:])


def check_submitted(prompt_tokens: int, samples: int) -> None:
    """Raise `invalid_request` where prompts, each sent once a sample, would be more than one message
    holds.
    """
    if prompt_tokens * samples > limits.MAX_SUBMITTED_TOKENS:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"{prompt_tokens} prompt tokens in {samples} samples make {prompt_tokens * samples}, the limit "
            "is "
            f"{limits.MAX_SUBMITTED_TOKENS}; lower n",
            param="n",
        )


def check_context(service: Service, prompt_tokens: int, max_tokens: int, param: str) -> None:
    """Raise `context_length_exceeded` unless prompt and output fit."""
    limit: int = service.engine_info["max_model_len"]
    if prompt_tokens + max_tokens > limit:
        raise CallerError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limit} tokens; you requested "
            f"{prompt_tokens + max_tokens} tokens "
            f"({prompt_tokens} in the prompt, {max_tokens} in the answer), so shorten the prompt or lower "
            f"{param}",
            param=param,
        )


def need_codec(codec: TextCodec | None, param: str) -> TextCodec:
    """The codec, or `tokenizer_missing` because `param` is text."""
    if codec is None:
        raise CallerError(
            ErrorCode.TOKENIZER_MISSING,
            f"{param} is text and the model folder has no tokenizer.json; send token ids to /v1/completions",
            param=param,
        )
    return codec


class Generation:
    """A job while it runs. Enter it to submit; leaving it withdraws what is still open."""

    def __init__(self, service: Service, model: ServedModel, job: Job) -> None:
        self._service = service
        self._model = model
        self._job = job
        self._choices = [
            SampleAssembly(index, model.codec, job.params, prompt, job.tools)
            for index, prompt in enumerate(prompt for prompt in job.prompts for _ in range(job.params.n))
        ]
        self._group: RequestGroup | None = None
        self._sent: list[Submit] = []
        self.first_token_ns = 0

    def __enter__(self) -> Generation:
        self._sent = self._submits()
        self._group = self._service.client.submit(self._sent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.abort()

    @property
    def served(self) -> Served:
        """The digests behind the model that it was bound to."""
        return self._model.served

    @property
    def sample_ids(self) -> list[str]:
        """The engine's id of each sample, in the order of choices."""
        return [submit.request_id for submit in self._sent]

    def choices_seen(self) -> list[ChoiceSeen]:
        """What became of each sample, for the request's record; empty when nothing was submitted."""
        return [
            ChoiceSeen(
                submit.sampling,
                choice.tokens,
                choice.finish_reason,
                choice.binding,
                self._job.keys[choice.choice // self._job.params.n].history,
            )
            for submit, choice in zip(self._sent, self._choices, strict=False)
        ]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self._job.prompts))

    @property
    def cached_tokens(self) -> int:
        """Of the prompt tokens, those that were reused."""
        samples = self._job.params.n
        return sum(
            fewest_cached(self._choices[at : at + samples]) for at in range(0, len(self._choices), samples)
        )

    @property
    def ran_on(self) -> RanOn:
        """The engine, and what else the keys of its prompts say, for the request's record."""
        service, info = self._service, self._service.engine_info
        return RanOn(
            service.supervisor.restarts,
            service.config.device,
            info["cache_abi"],
            info["graph_revision"],
            self._job.namespace,
        )

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far in all choices, up to and with those that ended them."""
        return sum(choice.tokens for choice in self._choices)

    def usage(self, output_tokens: int | None = None) -> Usage:
        """Token counts. output_tokens: instead of what was generated."""
        output = self.output_tokens if output_tokens is None else output_tokens
        cached = PromptTokensDetails(self.cached_tokens)
        return Usage(self.prompt_tokens, output, self.prompt_tokens + output, cached)

    async def read(self) -> list[Piece]:
        """What arrived since the last read, one piece a choice, waiting for the first; empty when all is
        over.
        """
        group = self._group
        if group is None:
            return []
        pieces: dict[int, Piece] = {}
        while not pieces and not group.done:
            for index, message in await group.read():
                choice = self._choices[index]
                if choice.over:
                    continue
                if isinstance(message, Tokens) and message.token_ids and not self.first_token_ns:
                    self.first_token_ns = self._service.clock.now_ns()
                last = choice.take(message, pieces.setdefault(index, Piece(index)))
                if last is not None:
                    group.finish(index, last)
        return [pieces[index] for index in sorted(pieces)]

    def _submits(self) -> list[Submit]:
        job = self._job
        own = further_ends(self._model.codec, self._service.codec)
        ends = {*self._service.engine_info.get("eos_token_ids", ()), *own}
        sampled = sampled_ids(self._model.codec, self._service.codec)
        later = replace(job.params, prompt_logprobs=None)
        packed = [
            (np.array(ids, dtype="<i4").tobytes(), prompt_seed(job.params), keys)
            for ids, keys in zip(job.prompts, job.keys, strict=True)
        ]
        return [
            Submit(
                request_id=f"{job.request_id}.{index}",
                prompt=prompt,
                sampling=engine_sampling(
                    job.params if job.scores_each or not sample else later,
                    seed,
                    sample,
                    ends,
                    job.bad_words,
                    sampled,
                ),
                adapter=self._model.key,
                tenant=job.tenant,
                priority=job.priority,
                arrival_ns=job.arrival_ns,
                deadline_ns=job.deadline_ns,
                grammar=job.grammar,
                own_ends=() if job.grammar is None else tuple(sorted(own)),
                namespace=job.namespace,
                block_keys=keys.block_keys,
                invoked_at=keys.invoked_at,
            )
            for index, ((prompt, seed, keys), sample) in enumerate(
                itertools.product(packed, range(job.params.n))
            )
        ]
