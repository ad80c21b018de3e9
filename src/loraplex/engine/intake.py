"""drain: messages from clients become state. Every refusal is typed and changes nothing."""

from __future__ import annotations

import itertools
from typing import assert_never

import numpy as np

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.events import RequestQueued
from loraplex.core.messages import (
    Abort,
    Ended,
    EngineCall,
    EngineSampling,
    Finish,
    Inspect,
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    RegisterAdapter,
    RemoveAdapter,
    Reply,
    RevokeAdapter,
    SetLimits,
    Submit,
    ToEngine,
)
from loraplex.core.packed import I32
from loraplex.core.request import FinishReason
from loraplex.engine import endings, prefixes
from loraplex.engine.inspect import inspect_engine
from loraplex.engine.request_state import RequestRecord
from loraplex.engine.residency import feasibility, registration, wants
from loraplex.engine.state import EngineState
from loraplex.engine.token_rules import check_rules
from loraplex.memory.leases import RevisionLease
from loraplex.memory.residency import AdapterEntry
from loraplex.schedule.queue import Ticket


def handle(state: EngineState, message: ToEngine) -> None:
    """Apply one message; a typed refusal becomes the answer."""
    match message:
        case Submit():
            try:
                submit(state, message)
            except LoraplexError as error:
                state.outbox.append(
                    Ended(message.request_id, code=error.code.value, message=error.message, param=error.param)
                )
        case Abort():
            record = state.records.get(message.request_id)
            if record is not None:
                code = ErrorCode.SLOW_CLIENT if message.slow else ErrorCode.ABORTED
                endings.end(state, record, error=CallerError(code, "the client withdrew the request"))
        case Finish():
            record = state.records.get(message.request_id)
            if record is not None:
                record.outputs = min(record.outputs, message.tokens)
                endings.end(state, record, reason=FinishReason.STOP)
        case _:
            try:
                _call(state, message)
            except LoraplexError as error:
                state.outbox.append(Reply(message.call_id, error.code.value, error.message))


def _call(state: EngineState, message: EngineCall) -> None:
    match message:
        case RegisterAdapter():
            registration.register(state, message)
        case RemoveAdapter():
            registration.remove(state, message)
        case LoadAdapter():
            wants.load(state, message)
        case PrefetchAdapter():
            wants.prefetch(state, message)
        case PinAdapter():
            wants.pin(state, message)
        case RevokeAdapter():
            registration.revoke(state, message)
        case SetLimits():
            wants.set_limits(state, message)
        case Inspect():
            state.outbox.append(Reply(message.call_id, body=inspect_engine(state, message.keys)))
        case _:
            assert_never(message)


def submit(state: EngineState, message: Submit) -> None:
    """Enqueue a request: check it, take its revision lease, give it its place."""
    if len(message.prompt) % 4 or message.arrival_ns < 0 or message.deadline_ns < 0:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            f"a request of {len(message.prompt)} prompt bytes, arrival {message.arrival_ns} and deadline "
            f"{message.deadline_ns} was refused; prompts are int32 words and times are not negative",
        )
    prompt = np.frombuffer(message.prompt, dtype="<i4").astype(np.int32)
    entry = _well_formed(state, message, prompt)
    prefixes.check_invocation(message, prompt, entry)
    prefix = prefixes.begin(state, message, prompt, entry)
    _require_feasible(state, entry, int(prompt.size) + message.sampling.max_tokens)
    if len(state.queue) >= state.limits.max_waiting:
        raise CapacityError(
            ErrorCode.QUEUE_FULL, f"{len(state.queue)} requests are waiting, the limit; try again later"
        )
    state.arrivals += 1
    sampling = message.sampling
    record = RequestRecord(
        request_id=message.request_id,
        adapter=message.adapter,
        tenant=message.tenant,
        arrival_ns=message.arrival_ns or state.clock.now_ns(),
        deadline_ns=message.deadline_ns,
        ticket=Ticket(message.priority, state.arrivals, message.request_id),
        sampling=sampling,
        stop_ids=frozenset(sampling.stop_token_ids),
        prompt_tokens=int(prompt.size),
        tokens=prompt,
        revision=RevisionLease.take(entry) if entry is not None else None,
        grammar=message.grammar,
        own_ends=message.own_ends,
        invoked_at=message.invoked_at,
        prefix=prefix,
    )
    state.records[record.request_id] = record
    state.queue.push(record.ticket)
    state.emit(
        RequestQueued(
            state.clock.now_ns(), record.request_id, record.adapter, record.tenant, record.prompt_tokens
        )
    )


def _well_formed(state: EngineState, message: Submit, prompt: I32) -> AdapterEntry | None:
    """Whether any engine of these sizes could read the request; its adapter's entry."""
    limits = state.limits
    if message.request_id in state.records:
        raise CallerError(ErrorCode.DUPLICATE_REQUEST, f"request id {message.request_id!r} is already in use")
    if prompt.size == 0:
        raise CallerError(
            ErrorCode.EMPTY_PROMPT, "the prompt has no tokens; give at least one", param="prompt"
        )
    if int(prompt.min()) < 0 or int(prompt.max()) >= limits.vocab_size:
        worst = int(prompt.max()) if int(prompt.max()) >= limits.vocab_size else int(prompt.min())
        raise CallerError(
            ErrorCode.TOKEN_OUT_OF_RANGE,
            f"token id {worst} lies outside the vocabulary of {limits.vocab_size}",
            param="prompt",
        )
    total = int(prompt.size) + message.sampling.max_tokens
    if message.sampling.max_tokens < 1:
        raise InternalFault(
            ErrorCode.PLAN_MALFORMED, f"max_tokens is {message.sampling.max_tokens}, at least 1 needed"
        )
    if total > limits.max_model_len:
        raise CallerError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {limits.max_model_len} tokens; you requested {total} "
            "tokens "
            f"({prompt.size} in the prompt, {message.sampling.max_tokens} in the answer)",
            param="max_tokens",
        )
    if not 0 <= message.sampling.sampled_ids <= limits.vocab_size:
        raise InternalFault(
            ErrorCode.PLAN_MALFORMED,
            f"{message.sampling.sampled_ids} ids were to be sampled, the vocabulary has {limits.vocab_size}",
        )
    _check_tokens(message.sampling, message.own_ends, limits.vocab_size)
    check_rules(message.sampling)
    entry = None
    if message.adapter is not None:
        entry = state.adapters.get(message.adapter)
        if entry is None or entry.removing:
            raise CallerError(
                ErrorCode.ADAPTER_NOT_FOUND,
                f"adapter {message.adapter[:12]} is not registered",
                param="model",
            )
    return entry


def _check_tokens(sampling: EngineSampling, own_ends: tuple[int, ...], vocab_size: int) -> None:
    """Whether every token that a request names beside its prompt is one of the vocabulary."""
    if not all(sampling.bad_words):
        raise InternalFault(ErrorCode.PLAN_MALFORMED, "a word of bad_words has no tokens")
    named = {
        "stop_token_ids": (*sampling.stop_token_ids, *sampling.late_token_ids, *own_ends),
        "logit_bias": (token for token, _ in sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": itertools.chain.from_iterable(sampling.bad_words),
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise CallerError(
                    ErrorCode.TOKEN_OUT_OF_RANGE,
                    f"{name} holds token id {token}, which lies outside the vocabulary of {vocab_size}",
                    param=name,
                )


def _require_feasible(state: EngineState, entry: AdapterEntry | None, total: int) -> None:
    """Raise unless the empty engine could serve `total` positions with this adapter (0x09B's first
    predicate).
    """
    kv_pages = state.limits.kv.pages_for(total)
    # A small adapter counts a page here: in the empty pool there is no slab to share.
    refusal = feasibility.too_large(
        state, kv_pages + (entry.page_count if entry is not None else 0)
    ) or feasibility.impossible(state, entry, kv_pages)
    if refusal is not None:
        raise refusal
