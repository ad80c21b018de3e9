"""The preference key: its parts in their order, quanta and classes, windows and bounds, and merged lanes."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.schedule.cost import Cost, in_quanta
from loraplex.schedule.policy import AGE_UNIT_NS, DEFICIT, POLICIES, Candidate, ordered
from loraplex.schedule.queue import Ticket, WaitingQueue

COLD = Cost(load_bytes=1000)
S = 1_000_000_000


def one(name: str, order: int, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {"tenant": "t", "urgency": 1, "service": 0, "arrival_ns": 0}
    return Candidate(request_id=name, order=order, **{**fields, **changes})


def names(policy: str, *candidates: Candidate, now: int = 0) -> list[str]:
    """The order, whatever order they come in."""
    found = {
        tuple(c.request_id for c in ordered(POLICIES[policy], chosen, now))
        for chosen in permutations(candidates)
    }
    assert len(found) == 1
    return list(found.pop())


def test_each_part_of_the_key_decides_before_the_next() -> None:
    urgent = one("urgent", 9, urgency=-1, service=5000, cost=COLD)
    owed = one("owed", 8, owed=True, service=5000, cost=COLD)
    poor = one("poor", 7, service=1023, cost=COLD)
    old = one("old", 6, service=2047, cost=COLD)
    cheap = one("cheap", 5, service=1024, arrival_ns=9 * S)
    dear = one("dear", 2, service=1024, arrival_ns=9 * S, cost=COLD)
    dearer = one("dearer", 3, service=1024, arrival_ns=9 * S, cost=Cost(load_bytes=1))
    order = names("deficit", urgent, owed, poor, old, cheap, dear, dearer, now=9 * S)
    assert order == ["urgent", "owed", "poor", "old", "cheap", "dear", "dearer"]


def test_age_counts_in_doublings_of_a_tenth_of_a_second() -> None:
    ages = [0, 99_999_999, 100_000_000, 199_999_999, 200_000_000, 400_000_000, 799_999_999, 25_600_000_000]
    assert [DEFICIT.age_class(age) for age in ages] == [0, 0, 1, 1, 2, 3, 3, 9]
    assert DEFICIT.age_class(-1) == 0
    assert replace(DEFICIT, age_unit_ns=0).age_class(1 << 60) == 0
    assert AGE_UNIT_NS == 100_000_000


def test_service_counts_in_quanta_and_one_of_them_in_tokens() -> None:
    assert [DEFICIT.service_class(tokens) for tokens in (0, 1023, 1024, 2047.5)] == [0, 0, 1, 1]
    exact = replace(DEFICIT, service_quantum=1)
    assert [exact.service_class(tokens) for tokens in (0, 1, 3)] == [0, 1, 3]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("deficit", ["c", "a", "b", "d"]),  # the old one, then those that need no load
        ("fcfs", ["a", "b", "c", "d"]),
        ("resident-greedy", ["a", "c", "b", "d"]),
        ("clustered", ["c", "a", "b", "d"]),  # c's adapter runs, a's would be a run more
        ("rank-bucketed", ["a", "d", "b", "c"]),  # the first one's bucket
    ],
)
def test_what_each_policy_prefers(policy: str, expected: list[str]) -> None:
    now = 10 * S
    a = one("a", 1, arrival_ns=now - S // 4, bucket=2, cost=Cost(runs=1))
    b = one("b", 2, arrival_ns=now - S // 4, bucket=3, cost=COLD._replace(runs=1))
    c = one("c", 3, arrival_ns=now - S, bucket=4)
    d = one("d", 4, arrival_ns=now - S // 5, bucket=2, cost=COLD._replace(runs=1))
    assert names(policy, a, b, c, d, now=now) == expected


def test_every_policy_states_its_bounds() -> None:
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert 1 <= policy.window <= policy.bound
        owed, first = one("owed", 5, owed=True, cost=COLD, service=9999), one("first", 1)
        assert names(name, owed, first) == ["owed", "first"]


@pytest.mark.parametrize("field", ["bound", "window", "service_quantum", "age_unit_ns"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_a_policy_of_impossible_numbers_is_refused(field: str, value: Any) -> None:
    with pytest.raises(CallerError) as refused:
        replace(DEFICIT, **{field: value})
    assert refused.value.code is ErrorCode.CONFIG_INVALID


# ---------------------------------------------------------------- cost


def test_a_cost_is_never_summed() -> None:
    assert in_quanta(Cost(load_bytes=1, runs=5, kv_pages=7), Cost(load_bytes=100, kv_pages=4)) == (
        1, 0, 0, 0, 0, 0, 2, 0,
    )  # fmt: skip


# ---------------------------------------------------------------- lanes merged at their heads


def lanes(service: dict[str, int | None]) -> WaitingQueue:
    """Three tenants with three waiting each, in turn."""
    queue = WaitingQueue(lambda tenant: service[tenant])
    for order in range(9):
        tenant = "abc"[order % 3]
        queue.push(Ticket(0, order, f"{tenant}{order}", tenant))
    return queue


def test_lanes_are_merged_by_the_tenants_rank_and_arrival() -> None:
    service: dict[str, int | None] = {"a": 0, "b": 0, "c": 0}
    queue = lanes(service)
    assert queue.heads(9) == ["a0", "b1", "c2", "a3", "b4", "c5", "a6", "b7", "c8"]
    service["a"] = 2
    service["b"] = 1
    assert queue.heads(9) == ["c2", "c5", "c8", "b1", "b4", "b7", "a0", "a3", "a6"]
    service["c"] = 3
    assert queue.heads(4) == ["b1", "b4", "b7", "a0"]


def test_a_tenant_that_may_not_run_is_passed_over_and_comes_back() -> None:
    service: dict[str, int | None] = {"a": None, "b": 0, "c": 0}
    queue = lanes(service)
    assert queue.heads(9) == ["b1", "c2", "b4", "c5", "b7", "c8"]
    service["a"] = 0
    assert queue.heads(2) == ["a0", "b1"]


def test_who_is_owed_a_turn_comes_before_every_lane_of_its_urgency() -> None:
    queue = lanes({"a": 5, "b": 0, "c": 0})
    queue.push(Ticket(-1, 20, "urgent", "a"))
    queue.owe(Ticket(0, 6, "a6", "a"))
    assert queue.heads(4) == ["urgent", "a6", "b1", "c2"]
    assert queue.discard("a6")
    assert queue.heads(2) == ["urgent", "b1"]


def test_a_near_deadline_goes_before_its_priority_and_stays_where_it_is_parked() -> None:
    queue = lanes({"a": 5, "b": 0, "c": 0})
    pressing = queue.press(Ticket(0, 8, "c8", "c"))
    assert queue.heads(2) == ["c8", "b1"]
    queue.park(pressing, "adapter")
    assert queue.heads(2) == ["b1", "c2"]
    parked = Ticket(0, 3, "a3", "a")
    queue.park(parked, "adapter")
    queue.press(parked)
    queue.unpark("adapter")
    assert queue.heads(3) == ["a3", "c8", "b1"] or queue.heads(3) == ["c8", "a3", "b1"]


def test_tickets_may_leave_and_come_while_somebody_walks() -> None:
    queue = lanes({"a": 0, "b": 0, "c": 0, "d": 0})
    walk = queue.walk()
    met = [next(walk) for _ in range(3)]
    for ticket in met:
        queue.take(ticket)
    queue.discard("b4")
    queue.push(Ticket(0, 30, "d30", "d"))
    queue.push(met[0])
    rest = [ticket.request_id for ticket in walk]
    assert rest == ["a3", "c5", "a6", "b7", "c8", "d30"]
    assert queue.heads(9) == ["a0", "a3", "c5", "a6", "b7", "c8", "d30"]
    for request_id in queue.heads(9):
        assert queue.discard(request_id)
    assert len(queue) == 0
    assert queue._levels == {}


def test_a_walk_that_ends_early_leaves_everybody_in_place() -> None:
    queue = lanes({"a": 0, "b": 0, "c": 0})
    for count in (1, 4, 9, 2):
        assert queue.heads(count) == ["a0", "b1", "c2", "a3", "b4", "c5", "a6", "b7", "c8"][:count]
