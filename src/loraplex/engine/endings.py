"""The end of a request: told once, its slot, pages and leases given back as soon as nothing of it is in
flight.

Never decides that a request ends: commits, messages, refusals and failures do.

Specification: 0x07H (leases end once), rulings "Frontiers and depth", "Leases".
"""

from __future__ import annotations

from loraplex.core.errors import LoraplexError
from loraplex.core.events import RequestFinished
from loraplex.core.messages import Ended
from loraplex.engine import prefixes
from loraplex.engine.request_state import RequestRecord, Stage
from loraplex.engine.residency import transitions
from loraplex.engine.state import EngineState
from loraplex.memory.pages import PageState


def end(
    state: EngineState,
    record: RequestRecord,
    *,
    reason: str | None = None,
    error: LoraplexError | None = None,
    stop_token: int | None = None,
) -> None:
    """End a request, once: its `Ended` message and event go out, its resources as soon as nothing is in
    flight.
    """
    if record.stage is Stage.ENDED:
        return
    was, record.stage = record.stage, Stage.ENDED
    del state.records[record.request_id]
    state.queue.discard(record.request_id)
    code = error.code.value if error is not None else None
    message = error.message if error is not None else ""
    state.outbox.append(Ended(record.request_id, reason, stop_token, code, message))
    now = state.clock.now_ns()
    state.emit(
        RequestFinished(
            now,
            record.request_id,
            record.adapter,
            record.tenant,
            reason or code or "",
            record.prompt_tokens,
            record.outputs,
            now - record.arrival_ns,
        )
    )
    if was is Stage.RUNNING:
        state.table.stopping[record.slot] = True
    elif was is Stage.LOADING and record.transaction is not None:
        record.transaction.release_kv(state.newest_launch)
        record.transaction = None
        prefixes.release(state, record)
    settle(state, record)


def settle(state: EngineState, record: RequestRecord) -> None:
    """Let go of an ended request's slot and leases once nothing of it is in flight."""
    if record.slot >= 0:
        if state.table.inflight[record.slot]:
            return
        release_slot(state, record)
    if record.revision is not None and record.revision.open:
        record.revision.release()


def release_slot(state: EngineState, record: RequestRecord) -> None:
    """Free a running request's slot, pages and slot lease; nothing of it may be in flight. Cached blocks stay
    without it.
    """
    slot = record.slot
    pages = state.table.own_pages(slot)
    incarnation = int(state.table.incarnation[slot])
    state.table.close(slot)
    del state.by_slot[slot]
    record.slot, record.rules = -1, None
    if pages.size:
        state.free_pages(pages, PageState.KV, slot, incarnation)
    prefixes.release(state, record)
    transitions.release_slot_lease(state, record)
