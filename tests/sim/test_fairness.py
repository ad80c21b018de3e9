"""Shares of tenants on virtual time, 2,000 adapters by Zipf's law: a flood beside a light tenant, beside
another flood, and alone again. Each rule of the accounts is broken in turn, and its share is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.sim.tenant_traffic import Tenant, Traffic

from loraplex.core.tenants import TenantLimits
from loraplex.schedule.policy import POLICIES
from loraplex.schedule.tenant_service import TenantService

Patch = pytest.MonkeyPatch
FLOOD = Tenant("flood", waiting=300)
LIGHT = Tenant("light", every_ns=20_000_000, prompt=100, outputs=16, adapters=8)
STEPS = 500
WARM = 20
"""First requests of the light tenant, which meet cold adapters and an engine that fills."""


def flood(name: str, **changes: Any) -> Tenant:
    return Tenant(name, **{"waiting": 200, "outputs": 24, **changes})


def test_a_light_tenant_beside_a_flood_that_may_not_take_every_place() -> None:
    """Its p99 time to a first token is at most 1.5 times what it is alone; first come, first served it waits
    behind the whole flood.
    """
    alone = Traffic([LIGHT]).run(STEPS).p99_first_ns("light", WARM)
    bounded = Tenant("flood", waiting=300, limits=TenantLimits("flood", max_running=48))
    beside = Traffic([LIGHT, bounded]).run(STEPS)
    assert len(beside.first["light"]) > 150
    assert beside.p99_first_ns("light", WARM) <= 1.5 * alone
    in_turn = Traffic([LIGHT, FLOOD], limits={"policy": POLICIES["fcfs"]}).run(STEPS)
    assert in_turn.p99_first_ns("light", WARM) > 10 * alone


def test_a_flood_that_may_take_every_place_makes_others_wait_for_one_alone() -> None:
    """Without a bound a place must come free first, which some request's end brings within a few steps."""
    alone = Traffic([LIGHT]).run(STEPS).p99_first_ns("light", WARM)
    assert Traffic([LIGHT, FLOOD]).run(STEPS).p99_first_ns("light", WARM) <= 4 * alone


def test_two_floods_share_by_weight() -> None:
    for weight in (1, 3):
        both = [flood("a"), flood("b", limits=TenantLimits("b", weight=weight))]
        traffic = Traffic(both).run(250)
        ratio = traffic.served("b", 80) / traffic.served("a", 80)
        assert 0.8 * weight <= ratio <= 1.25 * weight, (weight, ratio)


def test_a_flood_takes_all_of_the_rest_when_others_want_none() -> None:
    alone = Traffic([flood("a")]).run(300)
    left = Traffic([flood("a"), flood("b", waiting=30, ends=40)]).run(300)
    assert left.served("b", 230) == 0
    assert left.served("a", 230) >= 0.95 * alone.served("a", 230)


def share_of_who_stayed() -> float:
    """One flood for a while, then another beside it: the first one's part of what both get from then on."""
    traffic = Traffic([flood("stayed"), flood("came", begins=120)]).run(300)
    stayed, came = traffic.served("stayed", 180), traffic.served("came", 180)
    return stayed / (stayed + came)


def weight_is_kept() -> float:
    """Part of a flood of weight 1 beside one of weight 3, twice what it should be so that one half
    is fair.
    """
    traffic = Traffic([flood("light"), flood("heavy", limits=TenantLimits("heavy", weight=3))]).run(250)
    light, heavy = traffic.served("light", 80), traffic.served("heavy", 80)
    return 2 * light / (light + heavy)


def no_lift(patch: Patch) -> None:
    patch.setattr(TenantService, "_floor", lambda service: 0.0)


def lifted_to_the_most(patch: Patch) -> None:
    """Who comes back starts behind everybody."""
    patch.setattr(
        TenantService, "_floor", lambda service: float(service._virtual.max(initial=0.0)) + 100_000.0
    )


def weights_ignored(patch: Patch) -> None:
    real = TenantService.set_limits

    def set_limits(service: TenantService, tenants: Any) -> None:
        real(service, tenants)
        service._limits = {}

    patch.setattr(TenantService, "set_limits", set_limits)


def nothing_debited(patch: Patch) -> None:
    real = TenantService.debit

    def debit(service: TenantService, *columns: np.ndarray) -> Any:
        before = service._virtual.copy()
        rows = real(service, *columns)
        service._virtual[:] = before
        return rows

    patch.setattr(TenantService, "debit", debit)


FAIR = (0.4, 0.6)
SHARES: list[tuple[Callable[[], float], Callable[[Patch], None]]] = [
    (share_of_who_stayed, no_lift),
    (share_of_who_stayed, lifted_to_the_most),
    (weight_is_kept, weights_ignored),
    (weight_is_kept, nothing_debited),
]


@pytest.mark.parametrize("share", [share_of_who_stayed, weight_is_kept])
def test_a_share_is_kept(share: Callable[[], float]) -> None:
    assert FAIR[0] <= share() <= FAIR[1]


@pytest.mark.parametrize(("share", "broken"), SHARES, ids=lambda f: f.__name__)
def test_a_share_is_lost_where_its_rule_is_broken(
    share: Callable[[], float], broken: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    broken(monkeypatch)
    found = share()
    assert not FAIR[0] <= found <= FAIR[1], found
