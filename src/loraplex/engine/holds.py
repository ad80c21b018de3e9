"""Why a live request does not run: which predicate holds it back, for what reason, since when.

Read from state when somebody asks; only what a look at the queue's head alone can tell is noted there.
Decides nothing.

Specification: 0x09B (predicates); interface "HTTP" (`GET /v1/requests/{x-request-id}`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loraplex.engine.request_state import RequestRecord, Stage
from loraplex.engine.residency.registration import describe
from loraplex.engine.state import EngineState
from loraplex.schedule.predicates import Readiness, readiness


class Predicate(StrEnum):
    """The first of 0x09B's that a waiting request does not meet. A request that is not feasible was refused.

    selected: it has a place, and rows as plans have room for them.
    """

    READY = "ready"
    ELIGIBLE = "eligible"
    PREFERRED = "preferred"
    SELECTED = "selected"


class Reason(StrEnum):
    """What it waits for: its adapter, a place among its tenant's or all running requests, pages, a compiled
    grammar, blocks that another request computes, or only its turn.
    """

    ABSENT = "adapter_absent"
    COLD = "adapter_cold"
    LOADING = "adapter_loading"
    MAX_RUNNING = "max_running"
    PLACES = "places"
    PAGES = "pages"
    GRAMMAR = "grammar"
    BLOCKS = "blocks"
    TURN = "turn"
    NONE = "none"


_NOT_READY = {
    Readiness.ABSENT: Reason.ABSENT,
    Readiness.COLD: Reason.COLD,
    Readiness.LOADING: Reason.LOADING,
}


@dataclass(frozen=True, slots=True)
class Hold:
    """since_ns: of the engine's clock."""

    predicate: Predicate
    reason: Reason
    since_ns: int


def note(state: EngineState, record: RequestRecord, reason: Reason) -> None:
    """A look at a waiting request found that it waits for this; the time counts from the first such look."""
    if record.hold != reason:
        record.hold, record.hold_since_ns = reason, state.clock.now_ns()


def note_places(state: EngineState, free: int) -> None:
    """How many places are free among the running requests."""
    if free > 0:
        state.full_since_ns = 0
    elif not state.full_since_ns:
        state.full_since_ns = state.clock.now_ns()


def hold_of(state: EngineState, record: RequestRecord) -> Hold:
    """What holds a live request back."""
    since, entry, service = record.waiting_since_ns, record.entry, state.service
    if record.stage is Stage.RUNNING:
        return Hold(Predicate.SELECTED, Reason.NONE, since)
    ready = readiness(entry)
    if entry is not None and ready is not Readiness.READY:
        awaited = state.starvation.waits_since(id(entry))
        return Hold(Predicate.READY, _NOT_READY[ready], max(since, awaited or 0))
    if not service.may_run(record.tenant):
        return Hold(Predicate.ELIGIBLE, Reason.MAX_RUNNING, max(since, service.full_since_ns(record.tenant)))
    if state.full_since_ns:
        return Hold(Predicate.ELIGIBLE, Reason.PLACES, max(since, state.full_since_ns))
    if record.hold and record.hold_since_ns >= since:
        return Hold(Predicate.ELIGIBLE, Reason(record.hold), record.hold_since_ns)
    return Hold(Predicate.PREFERRED, Reason.TURN, since)


def describe_request(state: EngineState, record: RequestRecord) -> dict[str, Any]:
    """One live request, for replies. Times in nanoseconds before now."""
    now, hold, entry = state.clock.now_ns(), hold_of(state, record), record.entry
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "stage": record.stage.value,
        "held_by": None if record.stage is Stage.RUNNING else hold.predicate.value,
        "reason": None if record.stage is Stage.RUNNING else hold.reason.value,
        "held_ns": now - hold.since_ns,
        "age_ns": now - record.arrival_ns,
        "priority": record.ticket.priority,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.outputs,
        "admissions": record.admissions,
        "load_failures": record.load_failures,
        "adapter": describe(state, entry) if entry is not None else None,
    }
