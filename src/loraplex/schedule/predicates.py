"""Five predicates, kept apart: feasible, ready, eligible, preferred, selected (0x09B).

Pure functions over snapshots. Feasible: this worker could serve the request, however long it takes; decided
when the request comes and again before anything is reserved for it. Ready: its adapter's exact generation can
be bound now. Eligible: ready, and the base scheduler may run it; only that enters a launch. A cold request
may be load-eligible, which authorises a transaction and never a row. Preference (`policy`) orders what is
legal and repairs nothing. Selected rows are a plan; only a commit makes them completed service.
"""

from __future__ import annotations

from enum import StrEnum

from loraplex.memory.residency import AdapterEntry, AdapterState, Residency
from loraplex.schedule.snapshot import Need, RequestSnapshot, Room, WorkerSnapshot


class Infeasible(StrEnum):
    """The first part of feasibility that does not hold."""

    BASE = "base"
    TARGETS = "targets"
    RANKS = "ranks"
    LAYOUT = "layout"
    GENERATION = "generation"
    ADAPTER_LIMIT = "adapter_limit"
    PINNED_SLOTS = "pinned_slots"
    PINNED_ADAPTER_PAGES = "pinned_adapter_pages"
    HOST_MEMORY = "host_memory"
    POOL = "pool"


def unreservable(need: Need, room: Room) -> Infeasible | None:
    """Why a joint reservation can never succeed, whoever ends: limits and pins leave too little."""
    if need.adapter_pages > room.adapter_pages:
        return Infeasible.ADAPTER_LIMIT
    if need.slot and room.pinned_adapters >= room.adapter_slots:
        return Infeasible.PINNED_SLOTS
    if need.slot and need.least_pages + room.pinned_pages > room.adapter_pages:
        return Infeasible.PINNED_ADAPTER_PAGES
    if need.image_bytes and need.image_bytes + room.pinned_bytes > room.host_bytes:
        return Infeasible.HOST_MEMORY
    if need.kv_pages + need.least_pages > room.pages - room.pinned_pages:
        return Infeasible.POOL
    return None


def infeasible(request: RequestSnapshot, worker: WorkerSnapshot) -> Infeasible | None:
    """Why the worker can never serve the request; None where it can."""
    able, adapter = worker.capabilities, request.adapter
    if request.base != able.base:
        return Infeasible.BASE
    if adapter is not None:
        if not able.targets.issuperset(adapter.targets):
            return Infeasible.TARGETS
        if any(rank > able.rank_limit for rank in adapter.ranks):
            return Infeasible.RANKS
        if adapter.layout not in able.layouts:
            return Infeasible.LAYOUT
        if adapter.generation != request.lease:
            return Infeasible.GENERATION
    return unreservable(request.need, worker.room)


def feasible(request: RequestSnapshot, worker: WorkerSnapshot) -> bool:
    """Feasible_A of 0x09B."""
    return infeasible(request, worker) is None


def ready(request: RequestSnapshot, worker: WorkerSnapshot) -> bool:
    """Ready_A of 0x09B: a resident slot of another generation is no hit, and a retiring one serves those
    alone that lease it.
    """
    adapter = request.adapter
    if not feasible(request, worker):
        return False
    if adapter is None:
        return True
    slot = worker.slots.get(adapter.digest)
    return (
        slot is not None
        and (
            slot.state is Residency.RESIDENT
            or (slot.state is Residency.RETIRING and request.request_id in slot.leases)
        )
        and slot.copied
        and slot.published == adapter.generation
    )


def eligible(request: RequestSnapshot, worker: WorkerSnapshot, legal: bool) -> bool:
    """Eligible of 0x09B. legal: continuous batching may run it: a place is free, and its pages (0x05C)."""
    return legal and ready(request, worker)


def load_eligible(request: RequestSnapshot, worker: WorkerSnapshot) -> bool:
    """Whether a load may be started for it: it authorises a transaction, not a model row."""
    adapter = request.adapter
    if adapter is None or not feasible(request, worker):
        return False
    slot = worker.slots.get(adapter.digest)
    return slot is not None and slot.state in (Residency.COLD, Residency.FAILED) and slot.hosted


class Readiness(StrEnum):
    """What stands between a feasible request and an adapter kernel."""

    READY = "ready"
    ABSENT = "absent"
    LOADING = "loading"
    COLD = "cold"


def readiness(entry: AdapterEntry | None) -> Readiness:
    """Why an adapter cannot be bound now, for those who wait for it; a retiring slot stays ready for those
    who leased it.
    """
    if entry is None or entry.resident:
        return Readiness.READY
    if entry.loading or entry.evicting:
        return Readiness.LOADING
    return Readiness.ABSENT if entry.state is AdapterState.ABSENT else Readiness.COLD
