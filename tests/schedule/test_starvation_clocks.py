"""Two detectors with clocks of their own: who could run and completes nothing, what is waited for and never
published.
"""

from __future__ import annotations

from loraplex.core.events import LoadStarved, TenantStarved
from loraplex.schedule.starvation import StarvationWatch

B = 1
"""Number of the cold adapter."""


def watch(limit: int = 5) -> StarvationWatch:
    return StarvationWatch(limit, limit)


def test_resident_greed_for_six_ticks_starves_a_load_and_no_tenant() -> None:
    """0x09I, first policy: hot runs each tick, B is never published."""
    clocks = watch()
    clocks.opened("cold", 0, B, "B", there=False)
    for tick in range(6):
        clocks.opened("hot", tick)
        clocks.completed(["hot"], tick)
        clocks.closed("hot", tick)
    assert clocks.due(4) == []
    assert clocks.due(5) == [LoadStarved(5, "B", 5, 1)]


def test_deficit_and_age_for_six_ticks_starve_nobody() -> None:
    """0x09I, second policy: B is published at tick 3 and its request completed there."""
    clocks = watch(3)
    clocks.opened("cold", 0, B, "B", there=False)
    clocks.opened("hot", 0)
    for tick in range(6):
        if tick == 2:
            clocks.moved(B, tick, there=True)
        clocks.completed(["cold" if tick == 3 else "hot"], tick)
        if tick == 3:
            clocks.closed("cold", tick, B)
        assert clocks.due(tick) == []


def test_a_tenant_whose_ready_request_is_never_selected_starves() -> None:
    clocks = watch()
    clocks.opened("hot", 0)
    clocks.opened("poor", 1)
    clocks.opened("poor", 1)
    for tick in range(2, 12):
        clocks.completed(["hot"], tick)
        assert clocks.due(tick) == ([TenantStarved(tick, "poor", tick - 1, 2)] if tick in (6, 11) else [])


def test_a_completion_starts_the_clock_again_and_the_last_end_stops_it() -> None:
    clocks = watch()
    clocks.opened("a", 0)
    clocks.completed(["a"], 4)
    assert clocks.due(8) == []
    assert clocks.due(9) == [TenantStarved(9, "a", 5, 1)]
    clocks.closed("a", 9)
    clocks.completed(["a"], 9)  # its last step
    assert clocks.due(99) == []


def test_a_cold_request_is_no_starved_tenant_until_its_adapter_is_there() -> None:
    clocks = watch()
    clocks.opened("a", 0, B, "B", there=False)
    clocks.opened("b", 2, B, "B", there=False)
    assert clocks.waits_since(B) == 0
    assert clocks.due(6) == [LoadStarved(6, "B", 6, 2)]
    clocks.moved(B, 7, there=True)
    assert clocks.waits_since(B) is None
    assert clocks.due(11) == []
    assert clocks.due(12) == [TenantStarved(12, "a", 5, 1), TenantStarved(12, "b", 5, 1)]


def test_an_adapter_that_leaves_is_waited_for_from_then_on() -> None:
    clocks = watch()
    clocks.opened("a", 0, B, "B", there=True)
    clocks.moved(B, 3, there=False)
    clocks.moved(B, 3, there=False)
    assert clocks.waits_since(B) == 3
    assert clocks.due(7) == []  # the tenant's clock stopped, the load's began
    assert clocks.due(8) == [LoadStarved(8, "B", 5, 1)]
    clocks.closed("a", 9, B)
    clocks.moved(B, 10, there=True)
    assert clocks.due(99) == []


def test_two_adapters_of_one_name_have_clocks_of_their_own() -> None:
    clocks = watch()
    clocks.opened("a", 0, 1, "B", there=False)
    clocks.opened("a", 3, 2, "B", there=False)
    clocks.moved(1, 4, there=True)
    clocks.closed("a", 4, 1)
    assert clocks.due(8) == [LoadStarved(8, "B", 5, 1)]
