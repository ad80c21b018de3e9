"""What the generation endpoints have in common: one request from its decoded fields to its last byte.

An endpoint says how its prompts are read (`Endpoint.prepare`) and how its answer looks (`Rendering`); binding
the model, holding to a format, submitting, streaming and counting are here, once.

Specification: architecture "A request's way" (1, 2, 11), interface "HTTP".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.request import AnswerForm, SamplingParams
from loraplex.server.answers import Usage, encode
from loraplex.server.generation.generate import Generation, Job, ServedModel, bind_model, urgency
from loraplex.server.generation.keyed import keyed
from loraplex.server.live import LiveRequest
from loraplex.server.routing import Call, named_model, until_disconnect
from loraplex.server.structured_wire import StructuredOutputs, answer_form
from loraplex.server.wire import (
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    TextFormat,
)
from loraplex.text.assembly import Piece
from loraplex.text.codec import SHORT_TEXT_CHARS, TextCodec
from loraplex.text.engine_sampling import word_tokens
from loraplex.text.grammars import schema_grammar
from loraplex.text.structured import form_grammar
from loraplex.text.tools.tool_use import ToolUse

R = TypeVar("R", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request asks to have generated. given: the prompts in the caller's form, ids: as tokens.

    echoes: the prompts as texts, where the answer repeats them. tools: what the answer may call.
    """

    given: Sequence[Any]
    ids: Sequence[Sequence[int]]
    params: SamplingParams
    echoes: Sequence[str] | None = None
    tools: ToolUse | None = None


class Rendering(Protocol):
    """The bytes and bodies of one answer."""

    def opening(self) -> bytes:
        """Events before the first token."""
        ...

    def chunk(self, piece: Piece) -> bytes:
        """The event of a piece; nothing where it has no news."""
        ...

    def closing(self) -> bytes:
        """Events after the last token, the stream's end included."""
        ...

    def failed(self, error: LoraplexError) -> bytes:
        """Events of an answer that had begun and ends with an error, the stream's end included."""
        ...

    def whole(self, parts: dict[int, list[Piece]]) -> msgspec.Struct:
        """The body of an answer that is not streamed. parts: every choice's pieces, in order."""
        ...


class Endpoint(Protocol[R]):
    """One path. prefix: of its ids. param: the body's field that holds what is asked."""

    prefix: str
    param: str

    async def read(self, call: Call) -> R:
        """The request that a body holds. Raises what `routing.read_body` raises."""
        ...

    async def prepare(self, call: Call, request: R, model: ServedModel) -> Prepared:
        """Check the request's own fields and tokenise for a model. Raises the typed error of what is
        wrong.
        """
        ...

    def rendering(self, about: About, request: R, prepared: Prepared, generation: Generation) -> Rendering:
        """How the answer is written."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """What every chunk of an answer says. model: as the caller named it. usage_always: every chunk counts
    tokens.
    """

    call: Call
    id: str
    model: str
    served: ServedModel
    wants_usage: bool
    usage_always: bool

    def chunk_usage(self, usage: Callable[[], Usage]) -> Usage | UnsetType | None:
        """What a chunk says of token counts: nothing, null until the last one, or what there is so far."""
        if self.usage_always:
            return usage()
        return None if self.wants_usage else UNSET

    def fields(self, choices: list[Any]) -> dict[str, Any]:
        """The fields that bodies and chunks share."""
        return {
            "id": self.id,
            "created": self.call.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.served.fingerprint,
        }


async def serve(call: Call, endpoint: Endpoint[R]) -> None:
    """Decode, check, generate and answer, until the client goes away."""
    arrival = call.service.clock.now_ns()
    request = await endpoint.read(call)
    await until_disconnect(call, _serve(call, endpoint, request, arrival))


async def _serve(call: Call, endpoint: Endpoint[R], request: R, arrival_ns: int) -> None:
    service, exchange = call.service, call.exchange
    service.require_ready()
    if request.stream_options is not None and not request.stream:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "stream_options needs stream to be true", param="stream_options"
        )
    priority, deadline = urgency(request, arrival_ns)
    tenant, asked = call.caller.tenant, named_model(call, request.model)
    async with bind_model(service, asked, tenant) as named:
        prepared = await endpoint.prepare(call, request, named)
        fallback = prepared.params.alora_fallback is not None
        keys = await keyed(service, named, prepared.ids, tenant, fallback, endpoint.param)
        model = keys.model
        grammar = await _grammar(call, request, prepared.tools)
        words = await _bad_words(call, prepared.params, model)
        answer_id = f"{endpoint.prefix}{exchange.request_id}"
        job = Job(
            f"{answer_id}.{next(call.site.serial)}",
            prepared.ids,
            keys.keys,
            keys.namespace,
            prepared.params,
            tenant,
            priority,
            arrival_ns,
            deadline,
            grammar,
            prepared.tools,
            bad_words=words,
            scores_each=prepared.echoes is not None,
        )
        exchange.answer_headers |= model.headers
        call.facts.model, call.facts.stream = model.name, bool(request.stream)
        if service.config.log_prompts:
            call.facts.prompt = logged(prepared.given)
        options = request.stream_options
        about = About(call, answer_id, asked, model, *_usage_wishes(options))
        with ExitStack() as serving:
            generation = serving.enter_context(Generation(service, model, job))
            live = LiveRequest(exchange.request_id, tenant, model.name, generation.sample_ids)
            serving.enter_context(service.live.serving(live))
            call.facts.generation = generation
            rendering = endpoint.rendering(about, request, prepared, generation)
            if request.stream:
                await _stream(call, generation, rendering)
            else:
                parts = await _collect(generation)
                pieces = [piece for part in parts.values() for piece in part]
                body = await _written(call, pieces, lambda: encode(rendering.whole(parts)))
                await exchange.respond(200, body)


def logged(given: Sequence[Any]) -> str:
    """Prompts as one value of the access line, cut to what a line may hold."""
    return msgspec.json.encode(list(given)).decode()[: limits.MAX_LOGGED_PROMPT_CHARS]


def _usage_wishes(options: StreamOptions | None) -> tuple[bool, bool]:
    """Whether a last chunk counts tokens, and whether every chunk does."""
    always = options is not None and bool(options.continuous_usage_stats)
    return always or (options is not None and bool(options.include_usage)), always


async def _stream(call: Call, generation: Generation, rendering: Rendering) -> None:
    """Send pieces as events. The response begins with the first piece, so that a refusal still has its own
    status.
    """
    exchange = call.exchange
    pieces = await generation.read()
    await exchange.begin_events()
    data = rendering.opening()
    try:
        while pieces:
            data += await _written(call, pieces, partial(_chunks, rendering, pieces))
            if data:
                await exchange.write(data)
            data = b""
            pieces = await generation.read()
        data = rendering.closing()
    except LoraplexError as error:
        call.facts.failed(error)
        data = rendering.failed(error)
    await exchange.write(data)
    await exchange.end()


def _chunks(rendering: Rendering, pieces: Sequence[Piece]) -> bytes:
    return b"".join(map(rendering.chunk, pieces))


async def _written(call: Call, pieces: Sequence[Piece], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of pieces; many log probabilities do not hold up the event loop."""
    scores = sum(len(piece.logprobs) + len(piece.prompt_logprobs) for piece in pieces)
    return await call.service.workers.run_if(scores > limits.SHORT_SCORES, write)


async def _collect(generation: Generation) -> dict[int, list[Piece]]:
    parts: dict[int, list[Piece]] = {}
    while pieces := await generation.read():
        for piece in pieces:
            parts.setdefault(piece.choice, []).append(piece)
    return dict(sorted(parts.items()))


async def _bad_words(call: Call, params: SamplingParams, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Token ids of `bad_words`, as the model's tokenizer spells them."""
    long = sum(map(len, params.bad_words)) > SHORT_TEXT_CHARS // 4  # many short texts take longer than one
    return await call.service.workers.run_if(long, lambda: word_tokens(params, model.codec))


async def _grammar(call: Call, request: GenerationFields, tools: ToolUse | None) -> str | None:
    """Grammar text of a request; schemas are read in a thread, which lets go of the interpreter meanwhile."""
    schema, form = _schema(request.response_format), _form(request)
    codec = call.service.codec
    if schema is None and tools is None and form is None:
        return None
    name = "response_format" if form is None else form.param
    if codec is None:
        raise CallerError(
            ErrorCode.TOKENIZER_MISSING,
            f"{name} needs a tokenizer, and the model folder has no tokenizer.json; leave it out",
            param=name,
        )
    if form is not None and (schema is not None or tools is not None):
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"{name} stands beside response_format or tools; give one", param=name
        )
    if form is not None:
        return await call.service.workers.run(lambda: form_grammar(form))
    return await call.service.workers.run(lambda: _read_grammar(schema, tools, codec))


def _form(request: GenerationFields) -> AnswerForm | None:
    guided = StructuredOutputs(
        choice=request.guided_choice,
        regex=request.guided_regex,
        json=request.guided_json,
        grammar=request.guided_grammar,
    )
    return answer_form(request.structured_outputs, guided)


def _read_grammar(schema: dict[str, Any] | bool | None, tools: ToolUse | None, codec: TextCodec) -> str:
    answer = None if schema is None else schema_grammar(schema)
    if tools is None:
        return answer or ""
    if schema is None:
        return tools.grammar(codec)
    return tools.grammar(codec, schema if isinstance(schema, dict) else {})


def _schema(form: ResponseFormat | None) -> dict[str, Any] | bool | None:
    """What an answer is held to, if anything."""
    match form:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return {"type": "object"}
        case JsonSchemaFormat():
            return form.json_schema.schema
        case _:
            assert_never(form)
