"""Five predicates, kept apart: feasible, ready, eligible, preferred, selected (0x09B).

Feasible is decided at enqueue (`engine.intake`): the empty worker could serve the request. Ready and eligible
are decided here, each step, for the heads of the queue. Preference is the queue's order and only orders what
is already legal. Selected rows are a plan; only a commit makes them completed service.
"""

from __future__ import annotations

from enum import StrEnum

from loraplex.memory.residency import AdapterEntry, AdapterState
from loraplex.memory.transaction import Demand, admissible


class Readiness(StrEnum):
    """What stands between a feasible request and an adapter kernel."""

    READY = "ready"
    ABSENT = "absent"
    LOADING = "loading"
    COLD = "cold"


def readiness(entry: AdapterEntry | None) -> Readiness:
    """Whether the leased revision can be bound now; a retiring slot stays ready for those who leased it."""
    if entry is None or entry.resident:
        return Readiness.READY
    if entry.loading or entry.evicting:
        return Readiness.LOADING
    return Readiness.ABSENT if entry.state is AdapterState.ABSENT else Readiness.COLD


def loadable(entry: AdapterEntry) -> bool:
    """Whether a load may be started: it authorises a transaction, not a model row."""
    return entry.state is AdapterState.HOST_READY and entry.host_source_verified


def eligible(ready: Readiness, free_slots: int, demand: Demand, free_pages: int, reclaimable: int) -> bool:
    """Whether the request may be admitted: a slot is free and the joint inequality of 0x05C holds."""
    return (
        ready in (Readiness.READY, Readiness.COLD)
        and free_slots > 0
        and admissible(demand, free_pages, reclaimable)
    )
