"""What tenants' accounts and clocks hear of requests, adapters and commits.

Each request is counted where it is: waiting, or in a place of its own from its admission until nothing of it
is in flight. Service is debited once a plan's rows are committed, before their tokens end anybody: to
requests that are live and whose logits were finite, for positions of the prompt that were not debited before,
and for each token that is sent.

Specification: 0x09H, 0x09K (completed_service_debited); rulings "Scheduling".
"""

from __future__ import annotations

import numpy as np

from loraplex.core.events import ServiceDebited
from loraplex.core.plan import BatchPlan
from loraplex.engine.request_state import RequestRecord, Stage
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry


def opened(state: EngineState, record: RequestRecord) -> None:
    """A request was accepted and waits."""
    now, entry = state.clock.now_ns(), record.entry
    record.waiting_since_ns = now
    record.account = state.service.arrive(record.tenant)
    if entry is None:
        state.starvation.opened(record.tenant, now)
    else:
        state.starvation.opened(record.tenant, now, id(entry), entry.key, there=entry.resident)


def requeue(state: EngineState, record: RequestRecord) -> None:
    """An admitted request waits again, at its old place in the queue."""
    record.stage, record.waiting_since_ns = Stage.WAITING, state.clock.now_ns()
    state.service.requeue(record.tenant)
    state.queue.push(record.ticket)


def closed(state: EngineState, record: RequestRecord, was: Stage) -> None:
    """A request ended. One that ran keeps its place until nothing of it is in flight."""
    if was is Stage.WAITING:
        state.service.end_waiting(record.tenant)
    elif was is Stage.LOADING:
        state.service.end_running(record.tenant)
    entry = record.entry
    state.starvation.closed(record.tenant, state.clock.now_ns(), id(entry) if entry is not None else 0)


def moved(state: EngineState, entry: AdapterEntry) -> None:
    """An adapter changed its state, or lost its pages."""
    state.starvation.moved(id(entry), state.clock.now_ns(), there=entry.resident)


def debit(state: EngineState, plan: BatchPlan, faulty: set[int]) -> None:
    """Service of a plan whose rows were just committed. faulty: request slots whose logits are not finite."""
    requests, table = plan.requests, state.table
    slots = requests.slot
    if not slots.size:
        return
    live = np.ones(slots.size, dtype=np.bool_)
    for index in np.flatnonzero(table.stopping[slots]).tolist():
        live[index] = state.by_slot[int(slots[index])].stage is not Stage.ENDED
    if faulty:
        live &= ~np.isin(slots, list(faulty))
    sampled = np.zeros(slots.size, dtype=np.int32)
    sampled[plan.samples.request] = 1
    prompt, served = table.prompt[slots], table.served[slots]
    first, last = np.minimum(requests.kv_start, prompt), np.minimum(requests.kv_end, prompt)
    cached = np.maximum(first - served, 0)
    computed = np.maximum(last - np.maximum(first, served), 0)
    table.served[slots[live]] = np.maximum(served, last)[live]
    now = state.clock.now_ns()
    tenants, buckets = state.service.debit(
        table.tenant[slots[live]],
        state.rank_buckets[requests.adapter_slot[live]],
        computed[live],
        cached[live],
        sampled[live],
    )
    if tenants:
        state.starvation.completed([tenant for tenant, *_ in tenants], now)
        state.emit(ServiceDebited(now, plan.generation, tenants, buckets))


def report(state: EngineState) -> None:
    """Say who starves."""
    for event in state.starvation.due(state.clock.now_ns()):
        state.emit(event)


def check(state: EngineState) -> None:
    """Raise `service_ledger` unless every request is counted where it is."""
    waiting: dict[str, int] = {}
    running: dict[str, int] = {}
    for record in state.records.values():
        if record.stage is Stage.WAITING:
            waiting[record.tenant] = waiting.get(record.tenant, 0) + 1
        elif record.stage is Stage.LOADING:
            running[record.tenant] = running.get(record.tenant, 0) + 1
    for record in state.by_slot.values():
        running[record.tenant] = running.get(record.tenant, 0) + 1
    state.service.check(waiting, running)
