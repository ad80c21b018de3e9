"""0x09B, 0x09G and 0x09I through the shipping predicates, policies and lanes.

The specification gives requests, generations, ranks, completed services and the order of six ticks. Ours are
page counts, modules and layouts (which it leaves open), and for 0x09I the units in which its policy compares:
service in quanta of three completions, age in classes of two ticks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from loraplex.memory.residency import Residency
from loraplex.schedule.cost import Cost
from loraplex.schedule.policy import DEFICIT, POLICIES, Candidate, Policy, ordered
from loraplex.schedule.predicates import Infeasible, eligible, feasible, infeasible, load_eligible, ready
from loraplex.schedule.queue import Ticket, WaitingQueue
from loraplex.schedule.snapshot import (
    AdapterSnapshot,
    Capabilities,
    Need,
    RequestSnapshot,
    Room,
    SlotSnapshot,
    WorkerSnapshot,
)

QV = (0, 2)
ROOM = Room(pages=64, adapter_pages=64, adapter_slots=8, host_bytes=1 << 20)
WORKER = WorkerSnapshot(
    capabilities=Capabilities(base="base", targets=frozenset({0, 1, 2, 3}), rank_limit=16),
    room=ROOM,
    slots={
        "A": SlotSnapshot(state=Residency.RESIDENT, published=7, copied=True, hosted=True),
        "B": SlotSnapshot(state=Residency.COLD, hosted=True),
        "C": SlotSnapshot(state=Residency.RESIDENT, published=5, copied=True, hosted=True),
    },
)


def asks(
    name: str, digest: str, generation: int, lease: int, rank: int = 8, basis: str | None = None
) -> RequestSnapshot:
    adapter = AdapterSnapshot(
        digest=digest, generation=generation, targets=QV, ranks=(rank, rank), layout="pages", basis=basis
    )
    need = Need(kv_pages=2, adapter_pages=4, least_pages=4, image_bytes=4096)
    return RequestSnapshot(request_id=name, base="base", need=need, adapter=adapter, lease=lease)


HOT = asks("r_hot", "A", 7, 7, basis="0")
COLD = asks("r_cold", "B", 3, 3)
PEER = asks("r_peer", "C", 5, 5, basis="0")
STALE = asks("r_stale", "A", 6, 7)  # the catalog publishes 7, so that is what a request accepted now leases
RANK = asks("r_rank", "A", 7, 7, rank=32)
FIVE = (HOT, COLD, PEER, STALE, RANK)


def test_five_requests_in_one_snapshot() -> None:
    assert [r.request_id for r in FIVE if feasible(r, WORKER)] == ["r_hot", "r_cold", "r_peer"]
    assert [r.request_id for r in FIVE if ready(r, WORKER)] == ["r_hot", "r_peer"]
    assert [r.request_id for r in FIVE if eligible(r, WORKER, legal=True)] == ["r_hot", "r_peer"]
    assert not any(eligible(r, WORKER, legal=False) for r in FIVE)
    assert [r.request_id for r in FIVE if load_eligible(r, WORKER)] == ["r_cold"]
    assert infeasible(STALE, WORKER) is Infeasible.GENERATION
    assert infeasible(RANK, WORKER) is Infeasible.RANKS
    assert HOT.adapter is not None
    assert PEER.adapter is not None
    assert HOT.adapter.basis == PEER.adapter.basis
    assert HOT.adapter.digest != PEER.adapter.digest


def test_after_a_swap_the_old_slot_serves_those_alone_that_lease_it() -> None:
    """Slot 7 retires at generation 8 under its lease; slot 8 serves 9 (0x07F)."""
    old, new = asks("request-old", "old", 8, 8), asks("request-new", "new", 9, 9)
    retiring = SlotSnapshot(
        state=Residency.RETIRING, published=8, copied=True, hosted=True, leases=frozenset({"request-old"})
    )
    resident = SlotSnapshot(state=Residency.RESIDENT, published=9, copied=True, hosted=True)
    worker = replace(WORKER, slots={"old": retiring, "new": resident})
    assert ready(old, worker)
    assert ready(new, worker)
    late = asks("late", "old", 8, 8)
    assert feasible(late, worker)
    assert not ready(late, worker)
    assert not load_eligible(late, worker)
    assert not ready(new, replace(worker, slots={"new": replace(resident, published=10)}))
    assert not ready(new, replace(worker, slots={"new": replace(resident, copied=False)}))


@pytest.mark.parametrize(
    ("request_changes", "worker", "reason"),
    [
        ({"base": "another"}, WORKER, Infeasible.BASE),
        ({}, replace(WORKER, capabilities=replace(WORKER.capabilities, targets=frozenset({0}))), "targets"),
        (
            {},
            replace(WORKER, capabilities=replace(WORKER.capabilities, layouts=frozenset({"block"}))),
            "layout",
        ),
        ({"lease": 6}, WORKER, "generation"),
        ({"lease": 0}, WORKER, "generation"),
        ({}, replace(WORKER, room=replace(ROOM, adapter_pages=3)), "adapter_limit"),
        ({}, replace(WORKER, room=replace(ROOM, pages=5)), "pool"),
        ({}, replace(WORKER, room=replace(ROOM, pinned_pages=59)), "pool"),
        ({}, replace(WORKER, room=replace(ROOM, host_bytes=4095)), "host_memory"),
        ({}, replace(WORKER, room=replace(ROOM, pinned_bytes=1 << 20)), "host_memory"),
    ],
)
def test_each_conjunct_alone_makes_it_infeasible(
    request_changes: dict[str, object], worker: WorkerSnapshot, reason: str
) -> None:
    request = replace(HOT, **request_changes)  # type: ignore[arg-type]
    assert infeasible(request, worker) == reason
    assert not ready(request, worker)


def test_a_slot_that_pins_hold_is_no_room_for_a_cold_adapter() -> None:
    cold = replace(COLD, need=replace(COLD.need, slot=True))
    assert infeasible(cold, replace(WORKER, room=replace(ROOM, pinned_adapters=8))) is Infeasible.PINNED_SLOTS
    full = replace(ROOM, adapter_pages=8, pinned_pages=5)
    assert infeasible(cold, replace(WORKER, room=full)) is Infeasible.PINNED_ADAPTER_PAGES
    assert feasible(HOT, replace(WORKER, room=full))  # it is there already


# ---------------------------------------------------------------- 0x09G


def selection(policy: Policy, service: dict[str, int], sequences: int) -> tuple[list[str], list[str]]:
    """Who runs and who may load, of the five, under a budget of sequences."""
    tenants = {"r_hot": "hot", "r_peer": "peer", "r_cold": "cold", "r_stale": "hot", "r_rank": "hot"}
    candidates = [
        Candidate(r.request_id, tenants[r.request_id], 1, service[tenants[r.request_id]], 0, order)
        for order, r in enumerate(FIVE)
    ]
    by_id = {request.request_id: request for request in FIVE}
    preferred = [by_id[candidate.request_id] for candidate in ordered(policy, candidates, 0)]
    executable = [r.request_id for r in preferred if eligible(r, WORKER, legal=True)]
    return executable[:sequences], [r.request_id for r in preferred if load_eligible(r, WORKER)]


def test_of_two_ready_requests_the_tenant_with_less_completed_service_runs() -> None:
    exact = replace(DEFICIT, service_quantum=1)
    services = {"hot": 3, "peer": 1, "cold": 0}
    assert selection(exact, services, 1) == (["r_peer"], ["r_cold"])
    assert selection(exact, services, 9) == (["r_peer", "r_hot"], ["r_cold"])
    assert selection(POLICIES["fcfs"], services, 1)[0] == ["r_hot"]
    assert selection(exact, {"hot": 0, "peer": 1, "cold": 0}, 1)[0] == ["r_hot"]


# ---------------------------------------------------------------- 0x09I


class SixTicks:
    """A is resident and gets a request each tick, B is cold with one request c0; one sequence and one load a
    tick.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.completed: Counter[str] = Counter()
        self.queue = WaitingQueue(lambda tenant: policy.service_class(self.completed[tenant]))
        self.arrival = {"c0": 0}
        self.queue.push(Ticket(0, 0, "c0", "cold"))
        self.loading_since: int | None = None
        self.resident = False
        self.trace: list[str] = []

    def tick(self, now: int) -> None:
        said = []
        if self.loading_since is not None and not self.resident:
            self.resident = True
            said.append("publish B")
        name = f"h{now}"
        self.arrival[name] = now
        self.queue.push(Ticket(0, 1 + now, name, "hot"))
        tickets = {ticket.request_id: ticket for ticket in self.queue.walk()}
        for candidate in ordered(self.policy, [self.candidate(t) for t in tickets.values()], now):
            request, worker = self.snapshots(candidate)
            if eligible(request, worker, legal=True):
                self.queue.take(tickets[candidate.request_id])
                self.completed[candidate.tenant] += 1
                said.append(f"run {candidate.request_id}")
                break
            if load_eligible(request, worker) and self.loading_since is None:
                self.loading_since = now
                said.append("prefetch B")
        self.trace.append("; ".join(said))

    def candidate(self, ticket: Ticket) -> Candidate:
        cold = ticket.tenant == "cold" and not self.resident
        return Candidate(
            ticket.request_id, ticket.tenant, ticket.urgency, self.completed[ticket.tenant],
            self.arrival[ticket.request_id], ticket.order, Cost(load_bytes=4096 if cold else 0),
        )  # fmt: skip

    def snapshots(self, candidate: Candidate) -> tuple[RequestSnapshot, WorkerSnapshot]:
        b = SlotSnapshot(state=Residency.COLD, hosted=True)
        if self.resident:
            b = SlotSnapshot(state=Residency.RESIDENT, published=3, copied=True, hosted=True)
        elif self.loading_since is not None:
            b = SlotSnapshot(state=Residency.LOADING, hosted=True)
        worker = replace(WORKER, slots={**WORKER.slots, "B": b})
        request = COLD if candidate.tenant == "cold" else HOT
        return replace(request, request_id=candidate.request_id), worker


def test_six_ticks_of_resident_greed_never_publish_the_cold_adapter() -> None:
    ticks = SixTicks(POLICIES["resident-greedy"])
    for now in range(6):
        ticks.tick(now)
    assert ticks.trace == [f"run h{now}" for now in range(6)]
    assert ticks.completed == {"hot": 6}
    assert ticks.loading_since is None  # load-starved: eligible for a load throughout, and none was begun


def test_six_ticks_of_deficit_age_and_affinity_serve_everybody() -> None:
    ticks = SixTicks(replace(DEFICIT, service_quantum=3, age_unit_ns=2))
    for now in range(6):
        ticks.tick(now)
    assert ticks.trace == [
        "run h0", "run h1", "prefetch B; run h2", "publish B; run c0", "run h3", "run h4",
    ]  # fmt: skip
    assert ticks.completed == {"hot": 5, "cold": 1}
