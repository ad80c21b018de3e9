"""Deadlines of first tokens: who is near his goes first, who cannot meet it is refused while that still
helps.

A request comes up when half of its time has gone, and from then on it is urgent; and again when what is left
is no more than its load and its prefill take by what was measured. It is looked at on time also while it is
parked, while its adapter is loaded, and while no place is free. The estimate leaves waiting out and counts
what was not measured as nothing: a refusal means that not even an empty engine would make it.

Specification: 0x09C (urgency), 0x09F (early abort's inequality); rulings "Scheduling".
"""

from __future__ import annotations

from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.engine import endings, prefixes
from loraplex.engine.request_state import RequestRecord
from loraplex.engine.state import EngineState

_NS_PER_MS = 1_000_000


def watch(state: EngineState, record: RequestRecord) -> None:
    """Note when to look at a request that begins to wait, if its first token has a deadline."""
    if record.deadline_ns and not record.outputs:
        state.deadlines.look_at(record.request_id, min(_half_gone(record), _latest_start(state, record)))


def enforce(state: EngineState) -> None:
    """Look at everybody whose moment has come."""
    now = state.clock.now_ns()
    for request_id in state.deadlines.due(now):
        record = state.records.get(request_id)
        if record is None or record.slot >= 0 or record.outputs:
            continue
        latest = _latest_start(state, record)
        if now > latest:
            endings.end(state, record, error=_missed(record, now, record.deadline_ns - latest))
            continue
        if now >= _half_gone(record) and not record.ticket.pressing:
            record.ticket = state.queue.press(record.ticket)
        after = latest if record.ticket.pressing else min(latest, _half_gone(record))
        state.deadlines.look_at(request_id, max(after, now) + 1)


def _half_gone(record: RequestRecord) -> int:
    return (record.arrival_ns + record.deadline_ns) // 2


def _latest_start(state: EngineState, record: RequestRecord) -> int:
    """The last moment at which its load and its prefill could begin."""
    return record.deadline_ns - _remaining_ns(state, record)


def _remaining_ns(state: EngineState, record: RequestRecord) -> int:
    """What its first token takes at least, by what was measured: cached blocks take nothing, nor does a load
    that is under way.
    """
    limits, entry = state.limits, record.entry
    cached = prefixes.look_up(state, record).reused * limits.kv.page_tokens
    rows = int(record.tokens.size) - cached
    steps = -(-rows // limits.token_budget)
    cold = entry is not None and not entry.resident and not entry.loading
    load_ns = state.estimates.load_ns(state.image_bytes(entry)) if entry is not None and cold else 0
    return load_ns + state.estimates.prefill_ns(rows, steps)


def _missed(record: RequestRecord, now: int, needed_ns: int) -> CapacityError:
    left = (record.deadline_ns - now) / _NS_PER_MS
    return CapacityError(
        ErrorCode.DEADLINE_EXCEEDED,
        f"the first token takes {needed_ns / _NS_PER_MS:.1f} ms more and {left:.1f} ms are left of its time; "
        "allow more time or ask again when less is running",
    )
