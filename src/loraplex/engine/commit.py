"""commit: what a plan produced becomes state. Only here do committed frontiers, outputs and service move, and
only here are blocks cached.

Specification: 0x09K (publication events), rulings "Frontiers and depth".
"""

from __future__ import annotations

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault, error_for
from loraplex.core.events import FirstToken, IterationCompleted, PlanDiscarded, StepFailed
from loraplex.core.messages import TokenBinding, TokenLogprobs, Tokens
from loraplex.core.packed import I32, bits_float, each
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.core.request import FinishReason
from loraplex.engine import admission, constraints, endings, growth, prefixes
from loraplex.engine.request_state import RequestRecord, Stage
from loraplex.engine.residency import loads
from loraplex.engine.state import EngineState, Flight
from loraplex.schedule.running import Slots

STALE = frozenset(
    {
        ErrorCode.STALE_PLAN_GENERATION,
        ErrorCode.STALE_REQUEST_GENERATION,
        ErrorCode.STALE_SLOT_GENERATION,
        ErrorCode.STALE_KV_FRONTIER,
    }
)
"""Refusals after which the same work is planned again; any other failure ends the step's requests."""


def apply_result(state: EngineState, flight: Flight, result: StepResult) -> None:
    """Commit one plan's result."""
    plan = flight.plan
    _check(flight, result)
    slots: Slots = plan.requests.slot.astype(np.int64)
    state.table.commit(slots, plan.requests.rows)
    state.table.forget_references(plan.generation)
    state.committed_launch = plan.generation
    faulty = {int(slots[index]) for index in result.faults.request}
    scored = _prompt_logprobs(state, flight, result)
    sampled: Slots = plan.sample_slots.astype(np.int64)
    wrong = prefixes.publish(
        state, plan.generation, sampled[~np.isin(sampled, list(faulty))] if faulty else sampled
    )
    for record, fault in wrong:
        endings.end(state, record, error=fault)
    _commit_tokens(state, flight, result, faulty, scored)
    for slot in faulty:
        record = state.by_slot[slot]
        endings.end(
            state,
            record,
            error=InternalFault(ErrorCode.NUMERIC_FAULT, "the model produced logits that are not finite"),
        )
    copied = result.copied
    for slot, generation, intact in each(copied.adapter_slot, copied.adapter_generation, copied.intact):
        job = loads.finish(state, slot, generation, bool(intact))
        if job is not None and intact:
            admission.loaded(state, job)
    settle_slots(state, slots)
    _emit_iteration(state, flight, result)


def _check(flight: Flight, result: StepResult) -> None:
    plan = flight.plan
    if result.generation != plan.generation:
        raise InternalFault(
            ErrorCode.RESULT_MALFORMED, f"result of plan {result.generation} came for plan {plan.generation}"
        )
    if result.tokens.size != len(plan.samples) or result.logprob_indptr.size != len(plan.samples) + 1:
        raise InternalFault(
            ErrorCode.RESULT_MALFORMED, f"{result.tokens.size} tokens came for {len(plan.samples)} samples"
        )
    asked = len(plan.prompt_logprobs)
    if result.prompt_logprob_indptr.size != asked + 1 or result.prompt_logprob_ranks.size != asked:
        raise InternalFault(ErrorCode.RESULT_MALFORMED, "prompt log probabilities disagree with the plan")


def _logprobs(indptr: I32, ids: I32, values: I32, index: int, rank: int = 0) -> TokenLogprobs:
    lo, hi = int(indptr[index]), int(indptr[index + 1])
    return TokenLogprobs(tuple(ids[lo:hi].tolist()), tuple(bits_float(values[lo:hi]).tolist()), rank)


def _prompt_logprobs(
    state: EngineState, flight: Flight, result: StepResult
) -> dict[int, list[TokenLogprobs]]:
    """Prompt log probabilities by request slot, in position order."""
    out: dict[int, list[TokenLogprobs]] = {}
    plan = flight.plan
    for index in range(len(plan.prompt_logprobs)):
        slot = int(plan.requests.slot[plan.prompt_logprobs.request[index]])
        entry = _logprobs(
            result.prompt_logprob_indptr,
            result.prompt_logprob_ids,
            result.prompt_logprob_values,
            index,
            int(result.prompt_logprob_ranks[index]),
        )
        out.setdefault(slot, []).append(entry)
        state.table.scored[slot] += 1
    return out


def _commit_tokens(
    state: EngineState,
    flight: Flight,
    result: StepResult,
    faulty: set[int],
    scored: dict[int, list[TokenLogprobs]],
) -> None:
    """Append tokens to live requests, send them, and end the requests that they finish."""
    plan, table = flight.plan, state.table
    slots = plan.sample_slots.astype(np.int64)
    records = list(map(state.by_slot.get, slots.tolist()))
    for index in np.flatnonzero(table.stopping[slots]).tolist():
        records[index] = _live(state, int(slots[index]))
    if faulty:
        records = [None if slot in faulty else r for slot, r in zip(slots.tolist(), records, strict=True)]
    alive = np.array([record is not None for record in records], dtype=np.bool_)
    table.commit_tokens(slots[alive], result.tokens[alive])
    plain = table.plain[slots] & (table.outputs[slots] < table.max_outputs[slots])
    if scored:
        plain[:] = False
    outbox = state.outbox
    each = zip(records, result.tokens.tolist(), plain.tolist(), strict=True)
    for index, (record, token, counts) in enumerate(each):
        if record is None:
            continue
        if counts and token not in record.stop_ids:
            record.outputs += 1  # what nearly every token of nearly every step is: one more
            outbox.append(Tokens(record.request_id, (token,)))
        else:
            _commit_token(state, flight, result, record, index, scored)
    for slot, entries in scored.items():
        owner = _live(state, slot)
        if owner is not None:
            state.outbox.append(Tokens(owner.request_id, (), (), tuple(entries)))


def _commit_token(
    state: EngineState,
    flight: Flight,
    result: StepResult,
    record: RequestRecord,
    index: int,
    scored: dict[int, list[TokenLogprobs]],
) -> None:
    """Send the token of sample `index` with all that belongs to it, and end its request if it is finished."""
    plan, token = flight.plan, int(result.tokens[index])
    logprobs: tuple[TokenLogprobs, ...] = ()
    if plan.samples.logprobs[index] >= 0:
        logprobs = (_logprobs(result.logprob_indptr, result.logprob_ids, result.logprob_values, index),)
    prompt = tuple(scored.pop(record.slot, ()))
    binding = _binding(state, record, plan.generation)
    state.outbox.append(Tokens(record.request_id, (token,), logprobs, prompt, binding))
    state.table.plain[record.slot] = record.constraint is None and record.sampling.logprobs < 0
    _count_output(state, record, token)


def _binding(state: EngineState, record: RequestRecord, plan: int) -> TokenBinding | None:
    """What the first token of an admission was bound to; None for later ones, which are bound to the same."""
    if record.bound_admission == record.admissions:
        return None
    record.bound_admission = record.admissions
    table, slot, prefix = state.table, record.slot, record.prefix
    size = state.limits.kv.page_tokens
    return TokenBinding(
        slot,
        int(table.incarnation[slot]),
        int(table.adapter_slot[slot]),
        int(table.adapter_generation[slot]),
        plan,
        int(table.committed_generation[slot]),
        record.outputs,
        record.admissions,
        prefix.matched * size if prefix is not None else 0,
        prefix.receipt.covered if prefix is not None else 0,
    )


def _live(state: EngineState, slot: int) -> RequestRecord | None:
    """The request that runs in `slot` and has not ended."""
    record = state.by_slot.get(slot)
    return record if record is not None and record.stage is not Stage.ENDED else None


def _count_output(state: EngineState, record: RequestRecord, token: int) -> None:
    record.outputs += 1
    if not record.first_token:
        record.first_token = True
        now = state.clock.now_ns()
        state.emit(FirstToken(now, record.request_id, now - record.arrival_ns))
    complete = constraints.accept(state, record, token)
    if token in record.stop_ids:
        endings.end(state, record, reason=FinishReason.STOP, stop_token=token)
    elif complete:
        endings.end(state, record, reason=FinishReason.STOP)
    elif record.outputs >= record.sampling.max_tokens:
        endings.end(state, record, reason=FinishReason.LENGTH)


def settle_slots(state: EngineState, slots: Slots) -> None:
    """Free ended requests and carry out preemptions that waited for this commit."""
    table = state.table
    for slot in slots[table.stopping[slots] & (table.inflight[slots] == 0)].tolist():
        record = state.by_slot.get(slot)
        if record is None:
            continue
        if record.stage is Stage.ENDED:
            endings.settle(state, record)
        elif record.preempting:
            growth.preempt(state, record)


def _emit_iteration(state: EngineState, flight: Flight, result: StepResult) -> None:
    plan = flight.plan
    group_rows = plan.group_offsets[1:] - plan.group_offsets[:-1]
    state.emit(
        IterationCompleted(
            at_ns=state.clock.now_ns(),
            step=plan.generation,
            prefill_rows=plan.doff,
            decode_rows=plan.rows - plan.doff,
            requests=len(plan.requests),
            distinct_adapters=int(plan.group_adapters.size),
            runs_before=_runs_before(plan),
            runs=int(plan.segment_adapters.size),
            rank_rows=int((state.rank_sums[plan.group_adapters] * group_rows).sum()),
            sampled=len(plan.samples),
            free_pages=state.pool.free,
            plan_ns=flight.plan_ns,
            execute_ns=result.execute_us * 1000,
            waiting=len(state.queue),
        )
    )


def _runs_before(plan: BatchPlan) -> int:
    """Runs of one adapter that the requests make in scheduler order, which packing shortened."""
    adapters = np.empty(len(plan.requests), dtype=np.int32)
    adapters[plan.requests.scheduler_index] = plan.requests.adapter_slot
    return int(np.count_nonzero(adapters[1:] != adapters[:-1])) + (adapters.size > 0)


def undo(state: EngineState, failed: list[tuple[Flight, str]]) -> None:
    """Roll back plans that did not run, oldest first, and end the requests of those that failed for good."""
    for flight, message in failed:
        plan = flight.plan
        slots: Slots = plan.requests.slot.astype(np.int64)
        samples = np.zeros(len(plan.requests), dtype=np.bool_)
        samples[plan.samples.request] = True
        state.table.rollback_planned(slots, plan.requests.rows, samples)
        state.table.forget_references(plan.generation)
        state.committed_launch = max(state.committed_launch, plan.generation)
        code, _, text = message.partition(": ")
        known = code if code in ErrorCode._value2member_map_ else ErrorCode.BACKEND_FAILED.value
        now = state.clock.now_ns()
        if ErrorCode(known) in STALE:
            state.emit(PlanDiscarded(now, plan.generation, known, text))
        else:
            state.emit(StepFailed(now, plan.generation, known, text or message, len(plan.requests)))
            _end_all(state, slots, ErrorCode(known), text or message)
        settle_slots(state, slots)
    for flight, _ in reversed(failed):
        state.deltas.restore(flight.deltas)


def _end_all(state: EngineState, slots: Slots, code: ErrorCode, message: str) -> None:
    for slot in slots.tolist():
        record = _live(state, slot)
        if record is not None:
            endings.end(
                state, record, error=error_for(code, f"the step that served the request failed: {message}")
            )
