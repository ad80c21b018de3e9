"""Snapshots of waiting requests and of this worker, taken from the engine's state for the predicates.

Specification: 0x09A, 0x09B.
"""

from __future__ import annotations

from typing import Final

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.ids import Module
from loraplex.engine.request_state import RequestRecord
from loraplex.engine.residency import feasibility
from loraplex.engine.state import EngineState
from loraplex.memory.residency import AdapterEntry, Residency
from loraplex.schedule.predicates import Infeasible, infeasible
from loraplex.schedule.snapshot import (
    BLOCK,
    PAGES,
    AdapterSnapshot,
    Capabilities,
    RequestSnapshot,
    SlotSnapshot,
    WorkerSnapshot,
)

TARGETS: Final = frozenset(int(module) for module in Module)
UNNAMED_BASE: Final = "base"


def request_of(
    state: EngineState, request_id: str, entry: AdapterEntry | None, lease: int, kv_pages: int
) -> RequestSnapshot:
    """A request. lease: the revision that it bound. kv_pages: that it needs at least."""
    return RequestSnapshot(
        request_id=request_id,
        base=state.limits.base_abi or UNNAMED_BASE,
        need=feasibility.need_of(state, entry, kv_pages),
        adapter=_adapter_of(entry) if entry is not None else None,
        lease=lease,
    )


def waiting_of(state: EngineState, record: RequestRecord) -> RequestSnapshot:
    """A waiting request, with the pages of what is known of it."""
    lease = record.revision.generation if record.revision is not None else 0
    kv_pages = state.limits.kv.pages_for(int(record.tokens.size))
    return request_of(state, record.request_id, record.entry, lease, kv_pages)


def worker_of(state: EngineState, entry: AdapterEntry | None, *leases: str) -> WorkerSnapshot:
    """This worker, as far as requests of one adapter are concerned. leases: those of them that bound it."""
    return WorkerSnapshot(
        capabilities=Capabilities(
            base=state.limits.base_abi or UNNAMED_BASE, targets=TARGETS, rank_limit=limits.MAX_RANK
        ),
        room=feasibility.room_of(state, entry),
        slots={entry.key: _slot_of(entry, frozenset(leases))} if entry is not None else {},
    )


def _adapter_of(entry: AdapterEntry) -> AdapterSnapshot:
    """Registration names the ranks that there are, not each module's: the largest stands for all."""
    largest = max((rank for rank, _ in entry.ranks), default=0)
    return AdapterSnapshot(
        digest=entry.key,
        generation=entry.revision,
        targets=entry.modules,
        ranks=(largest,) * len(entry.modules),
        layout=BLOCK if entry.size_class else PAGES,
    )


def _slot_of(entry: AdapterEntry, leases: frozenset[str]) -> SlotSnapshot:
    """One whose pages a transaction has taken serves nobody any more, whatever it was."""
    serving = entry.resident
    return SlotSnapshot(
        state=Residency.LOADING if entry.evicting else entry.residency,
        published=entry.revision if serving else 0,
        copied=serving,
        hosted=entry.host_source_verified,
        leases=leases,
    )


def refusal(request: RequestSnapshot, worker: WorkerSnapshot) -> LoraplexError | None:
    """Why the request can never be served here, as it is told; None where it can."""
    match reason := infeasible(request, worker):
        case None:
            return None
        case Infeasible.BASE:
            return InternalFault(ErrorCode.LEASE_MISMATCH, "the request was made for another base")
        case Infeasible.TARGETS | Infeasible.RANKS | Infeasible.LAYOUT:
            return CallerError(
                ErrorCode.ADAPTER_UNSUPPORTED,
                f"this worker cannot execute the adapter's {reason.value}; ask one that can",
                param="model",
            )
        case Infeasible.GENERATION:
            lease, asked = request.lease, request.adapter.generation if request.adapter is not None else 0
            return InternalFault(
                ErrorCode.LEASE_MISMATCH, f"the request asks for revision {asked} and leased {lease}"
            )
        case _:
            return feasibility.sentence(reason, request.need, worker.room)
