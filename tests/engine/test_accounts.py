"""Service in the running engine: debited at commits, each token once, to the tenant; limits; who starves;
what holds a request back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engine.rig import CACHED, Rig, both_depths
from tests.prompts import prompt

from loraplex.core.events import LoadStarved, RequestPreempted, ServiceDebited, StepFailed, TenantStarved
from loraplex.core.messages import Abort, Inspect, SetTenants
from loraplex.core.tenants import TenantLimits
from loraplex.schedule.policy import DEFICIT


def totals(rig: Rig, tenant: str) -> tuple[int, int, int]:
    """Computed, cached and output tokens in all debits of a tenant."""
    rows = [
        row[1:]
        for e in rig.log.events
        if isinstance(e, ServiceDebited)
        for row in e.tenants
        if row[0] == tenant
    ]
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0, 0, 0)  # type: ignore[return-value]


def set_limits(rig: Rig, *tenants: TenantLimits) -> Any:
    rig.calls += 1
    rig.mailbox.inbox.append(SetTenants(rig.calls, tenants))
    rig.step()
    return rig.mailbox.replies[rig.calls]


def asked(rig: Rig, *names: str) -> list[dict[str, Any]]:
    rig.calls += 1
    rig.mailbox.inbox.append(Inspect(rig.calls, (), names))
    rig.step()
    found: list[dict[str, Any]] = rig.mailbox.replies[rig.calls].body["asked"]
    return found


@both_depths
def test_prompt_and_output_tokens_are_debited_once_each(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.register("x")
    rig.submit("one", prompt(20, 1), "x", tenant="a", max_tokens=5)
    rig.submit("two", prompt(7, 2), None, tenant="b", max_tokens=3)
    rig.run()
    assert totals(rig, "a") == (20, 0, 5)
    assert totals(rig, "b") == (7, 0, 3)
    debits = [event for event in rig.log.events if isinstance(event, ServiceDebited)]
    assert {row[0] for event in debits for row in event.buckets} == {"base", "<=8"}
    for event in debits:
        assert [sum(row[kind] for row in event.tenants) for kind in (1, 2, 3)] == [
            sum(row[kind] for row in event.buckets) for kind in (1, 2, 3)
        ]
    assert rig.engine.state.service.completed("a") == 20 + 2 * 5


@both_depths
def test_what_is_computed_again_after_a_preemption_is_no_service(depth: int) -> None:
    rig = Rig(depth=depth, pages=11, growth_horizon=0)
    for index in range(3):
        rig.submit(f"r{index}", prompt(8, index), None, tenant=f"t{index}", max_tokens=16)
    rig.run()
    assert any(isinstance(event, RequestPreempted) for event in rig.log.events)
    assert [totals(rig, f"t{index}") for index in range(3)] == [(8, 0, 16)] * 3


@both_depths
def test_cached_tokens_count_apart_and_once(depth: int) -> None:
    rig = Rig(depth=depth, **CACHED)
    rig.submit("first", prompt(17, 1), None, tenant="a", max_tokens=2)
    rig.run()
    rig.submit("again", prompt(17, 1), None, tenant="a", max_tokens=2)
    rig.run()
    assert totals(rig, "a") == (17 + 1, 16, 4)
    assert rig.engine.state.service.completed("a") == 18 + 16 / 8 + 2 * 4


def test_tokens_of_a_request_that_had_ended_are_no_service() -> None:
    """A stop that is found late: at depth 1 another plan holds a row of the request by then."""
    late = Rig(depth=1)
    late.submit("stops", prompt(6, 1), None, tenant="a", max_tokens=20)
    expected = late.expected("stops")
    late.mailbox.inbox.clear()
    late.submit("stops", prompt(6, 1), None, tenant="a", max_tokens=20, stop_token_ids=(expected[2],))
    late.run()
    sent = late.mailbox.tokens["stops"]
    assert totals(late, "a") == (6, 0, len(sent))
    late.submit("withdrawn", prompt(6, 2), None, tenant="b", max_tokens=20)
    for _ in range(4):
        late.step()
    late.mailbox.inbox.append(Abort("withdrawn"))
    late.run()
    assert totals(late, "b") == (6, 0, len(late.mailbox.tokens["withdrawn"]))


@both_depths
def test_failed_work_is_no_service(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.faults.fail_plans.add(1)
    rig.submit("fails", prompt(6, 1), None, tenant="a")
    rig.run()
    assert any(isinstance(event, StepFailed) for event in rig.log.events)
    rig.faults.nan_plans.add(rig.engine.state.newest_launch + 1)
    rig.submit("not finite", prompt(6, 1), None, tenant="a")
    rig.run()
    assert totals(rig, "a") == (0, 0, 0)
    assert rig.engine.state.service.virtual_service("a") == 0.0


def test_a_tenant_runs_as_many_as_it_may_and_others_take_the_rest() -> None:
    rig = Rig(depth=1, pages=65)
    assert set_limits(rig, TenantLimits("a", max_running=2)).code is None
    for index in range(6):
        rig.submit(f"a{index}", prompt(4, index), None, tenant="a", max_tokens=6)
    rig.submit("b", prompt(4, 9), None, tenant="b", max_tokens=6)
    most = 0
    for _ in range(4):
        rig.step()
        running = [record.tenant for record in rig.engine.state.by_slot.values()]
        most = max(most, running.count("a"))
        if len(running) == 3:
            assert running.count("b") == 1
    assert most == 2
    (held,) = asked(rig, "a5")
    assert (held["stage"], held["held_by"], held["reason"]) == ("waiting", "eligible", "max_running")
    set_limits(rig)
    rig.step()
    assert sum(record.tenant == "a" for record in rig.engine.state.by_slot.values()) > 2
    rig.run()
    rig.assert_answered(*rig.prompts)


def test_a_loading_request_takes_a_place_of_its_tenant() -> None:
    rig = Rig(depth=1, pages=65)
    set_limits(rig, TenantLimits("a", max_running=1))
    rig.register("x", pages=4)
    rig.submit("cold", prompt(4, 1), "x", tenant="a", max_tokens=2)
    rig.submit("ready", prompt(4, 2), None, tenant="a", max_tokens=2)
    rig.step()
    while rig.engine.state.records:
        rig.step()
        places = len(rig.engine.state.by_slot) + sum(
            record.stage == "loading" for record in rig.engine.state.records.values()
        )
        assert places <= 1
    rig.assert_answered("cold", "ready")


def test_more_than_may_wait_is_refused_as_the_tenants_own_limit() -> None:
    rig = Rig(depth=1)
    set_limits(rig, TenantLimits("a", max_waiting=2))
    for index in range(3):
        rig.submit(f"a{index}", prompt(4, index), None, tenant="a", max_tokens=2)
    rig.submit("b", prompt(4, 9), None, tenant="b", max_tokens=2)
    rig.run()
    (refused,) = rig.mailbox.ended["a2"]
    assert refused.code == "tenant_queue_full"
    assert "2 requests" in refused.message
    rig.assert_answered("a0", "a1", "b")


def test_malformed_limits_are_refused_and_the_old_ones_stay() -> None:
    rig = Rig(depth=1)
    set_limits(rig, TenantLimits("a", weight=3))
    reply = set_limits(rig, TenantLimits("a", weight=0))
    assert reply.code == "config_invalid"
    assert rig.engine.state.service.limits_of("a").weight == 3


def test_weights_share_a_full_engine() -> None:
    """Two floods, weights 1 and 3: the second completes three times as much while both want more."""
    rig = Rig(depth=1, pages=65, max_requests=2, policy=replace(DEFICIT, service_quantum=1))
    set_limits(rig, TenantLimits("b", weight=3))
    for index in range(60):
        for tenant in "ab":
            rig.submit(f"{tenant}{index}", prompt(4, index), None, tenant=tenant, max_tokens=4)
    for _ in range(150):
        rig.step()
    a, b = (rig.engine.state.service.completed(tenant) for tenant in "ab")
    assert 2.5 < b / a < 3.5
    rig.run()


def test_an_adapter_that_does_not_come_starves_its_load_and_no_tenant() -> None:
    rig = Rig(depth=1, pages=17, load_starved_ns=20_000, service_starved_ns=20_000, growth_horizon=0)
    for index in range(3):
        rig.submit(f"r{index}", prompt(4, index), None, tenant="hot", max_tokens=15 - 4 * index)
    for _ in range(3):
        rig.step()
    rig.register("x", pages=13)
    rig.submit("cold", prompt(4, 9), "x", tenant="poor", max_tokens=2)
    for _ in range(60):
        rig.step()
        for index in range(3):
            if f"r{index}" not in rig.engine.state.records:
                rig.submit(f"r{index}", prompt(4, index), None, tenant="hot", max_tokens=15)
    (held,) = asked(rig, "cold")
    assert (held["held_by"], held["reason"]) == ("ready", "adapter_cold")
    assert held["held_ns"] > 50_000
    assert held["adapter"]["key"] == "x"
    starved = [event for event in rig.log.events if isinstance(event, LoadStarved)]
    assert {event.adapter for event in starved} == {"x"}
    assert not any(isinstance(event, TenantStarved) for event in rig.log.events)


def test_a_tenant_that_could_run_and_gets_nothing_starves() -> None:
    rig = Rig(depth=1, max_requests=1, service_starved_ns=10_000)
    rig.submit("long", prompt(4, 1), None, tenant="hot", max_tokens=40)
    rig.submit("waits", prompt(4, 2), None, tenant="poor", max_tokens=2)
    for _ in range(15):
        rig.step()
    (held,) = asked(rig, "waits")
    assert (held["held_by"], held["reason"]) == ("eligible", "places")
    rig.run()
    starved = [event for event in rig.log.events if isinstance(event, TenantStarved)]
    assert {event.tenant for event in starved} == {"poor"}
    rig.assert_answered("long", "waits")


def test_what_holds_a_request_back_is_told_with_its_time() -> None:
    rig = Rig(depth=1, pages=9, growth_horizon=0)
    rig.submit("runs", prompt(20, 1), None, tenant="a", max_tokens=8)
    rig.submit("pages", prompt(20, 2), None, tenant="b", max_tokens=8)
    for _ in range(3):
        rig.step()
    runs, pages = asked(rig, "runs", "pages", "nobody")
    assert (runs["stage"], runs["held_by"], runs["reason"]) == ("running", None, None)
    assert (pages["held_by"], pages["reason"]) == ("eligible", "pages")
    (later,) = asked(rig, "pages")
    assert later["held_ns"] == pages["held_ns"] + 1000  # one step of the rig
    assert later["age_ns"] >= later["held_ns"]
    rig.run()
    assert asked(rig, "pages") == []


@pytest.mark.parametrize("count", [1, 3])
def test_blocks_that_another_computes_are_named(count: int) -> None:
    rig = Rig(depth=1, token_budget=4, **CACHED)
    rig.submit("first", prompt(24, 1), None, max_tokens=2)
    rig.step()
    for index in range(count):
        rig.submit(f"same{index}", prompt(24, 1), None, max_tokens=2)
    rig.step()
    assert {held["reason"] for held in asked(rig, *(f"same{i}" for i in range(count)))} == {"blocks"}
    rig.run()
