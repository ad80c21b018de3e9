"""Failed loads and fetches: counted, tried again after a pause, told to those who wait when it was the last.

Attempts of a load and attempts of a request are different counters; a retry keeps the request's arrival,
ticket and leased revision.

Specification: 0x09L.
"""

from __future__ import annotations

from loraplex.core import limits
from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.events import LoadFailed
from loraplex.core.messages import Reply
from loraplex.engine import endings
from loraplex.engine.request_state import Purpose, RequestRecord
from loraplex.engine.residency import transitions
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry


def count_failure(
    state: EngineState,
    entry: AdapterEntry,
    purpose: str,
    error: InternalFault,
    record: RequestRecord | None = None,
) -> None:
    """Note a failed load or fetch: pause, then another one; after the last, those who wait hear of it."""
    entry.load_failures += 1
    state.traffic.failures += 1
    if record is not None:
        record.load_failures += 1
    final = entry.load_failures >= limits.MAX_LOAD_ATTEMPTS
    now = state.clock.now_ns()
    state.emit(LoadFailed(now, entry.key, purpose, error.code.value, entry.load_failures, final))
    entry.retry_at_ns = now + (state.limits.load_retry_ns << (entry.load_failures - 1))
    state.queue.unpark(entry.key)  # whoever waited for this attempt asks for the next one, after the pause
    if final:
        _tell_waiting(state, entry, error)
        entry.load_failures, entry.retry_at_ns = 0, 0


def _tell_waiting(state: EngineState, entry: AdapterEntry, error: LoraplexError) -> None:
    attempts = f"{limits.MAX_LOAD_ATTEMPTS} attempts"
    text = f"adapter {entry.key[:12]} could not be loaded in {attempts}: {error.message}"
    for record in list(state.records.values()):
        if record.entry is entry and record.slot < 0:
            endings.end(state, record, error=InternalFault(ErrorCode.ADAPTER_LOAD_FAILED, text))
    for wanted in [wanted for wanted in state.wants if wanted.entry is entry]:
        state.wants.remove(wanted)
        if wanted.call_id:
            state.outbox.append(Reply(wanted.call_id, ErrorCode.ADAPTER_LOAD_FAILED.value, text))
        if wanted.purpose is Purpose.REGISTER and not entry.removing:
            transitions.withdraw(state, entry)  # a registration that failed leaves nothing registered
