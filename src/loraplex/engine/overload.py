"""Early abort, where an engine was given a limit for it: requests end before anything is spent on them.

Follows the engine's messages and events, and asks `schedule.early_abort` whom to end. Off unless
`EngineLimits.early_abort_ns` is set; then every request is in its ledger, those refused at the door included.

Specification: 0x09F (early abort), 0x09M (rejected ones are counted).
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.core.events import Event, FirstToken, RequestAdmitted, RequestFinished, RequestQueued
from loraplex.core.messages import Submit, ToEngine
from loraplex.engine import endings
from loraplex.engine.state import EngineState


def offer(state: EngineState, messages: Sequence[ToEngine]) -> None:
    """Note the requests among messages that were handled in this step, its first events are theirs."""
    if state.early_abort is None:
        return
    queued = [event for event in state.events if isinstance(event, RequestQueued)]
    state.early_abort.refuse(sum(isinstance(message, Submit) for message in messages) - len(queued))
    for event in queued:
        record = state.records.get(event.request_id)
        arrival = record.arrival_ns if record is not None else event.at_ns
        prefill_ns = state.estimates.prefill_ns(
            event.prompt_tokens, -(-event.prompt_tokens // state.limits.token_budget)
        )
        state.early_abort.offer(event.request_id, arrival, prefill_ns, event.at_ns)


def follow(state: EngineState, events: Sequence[Event]) -> None:
    """Note what became of requests, from the events of a step."""
    if state.early_abort is None:
        return
    for event in events:
        match event:
            case RequestAdmitted():
                state.early_abort.admit(event.request_id, event.at_ns)
            case FirstToken():
                state.early_abort.serve(event.request_id)
            case RequestFinished():
                state.early_abort.end(event.request_id, rejected=event.reason == ErrorCode.EARLY_ABORT)
            case _:
                pass


def abort(state: EngineState) -> None:
    """End the requests that cannot have their first token in time."""
    if state.early_abort is None:
        return
    for request_id in state.early_abort.due(state.clock.now_ns()):
        record = state.records.get(request_id)
        if record is not None:
            error = CapacityError(
                ErrorCode.EARLY_ABORT,
                f"the first token cannot come within {state.limits.early_abort_ns / 1e9:g} s, under early "
                "abort; try again later",
            )
            endings.end(state, record, error=error)
