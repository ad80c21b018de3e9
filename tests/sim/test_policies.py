"""Policies over 2,000 adapters near saturation: who starves, and what not starving costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from loraplex.core.events import Event, IterationCompleted, RequestAdmitted
from loraplex.schedule.policy import POLICIES, Policy
from loraplex.sim.device import Costs
from loraplex.sim.faults import Setup, draw_setup
from loraplex.sim.simulation import Simulation

ADAPTERS = 2_000
WARM, TICKS = 500, 2_500
STARVED_NS = 40_000_000
"""A request that was not let in for so long starved: some 290 steps, twenty answers."""


def crowded(policy: Policy) -> Setup:
    """Zipf 1.0 over all adapters, a sixth of them resident, for six places; 98 of 100 arrivals are served."""
    drawn = draw_setup(1, depth=1, faults=frozenset(), cached=False)
    limits = replace(
        drawn.limits,
        kv=replace(drawn.limits.kv, page_tokens=4),
        num_pages=700,
        max_requests=6,
        token_budget=64,
        max_adapter_slots=420,
        growth_horizon=2,
        host_bytes=None,
        adapter_floor=0,
        copies_on_compute_stream=False,
        scrub=False,
        policy=policy,
    )
    return replace(
        drawn,
        limits=limits,
        costs=Costs(100_000, 2_000, 50_000, 20_000),
        aliases=ADAPTERS,
        adapter_pages=3,
        base_share=0.0,
        small_share=0.0,
        arrivals=0.7,
        cap=60,
        swaps=0.0,
        prompt_tokens=12,
        output_tokens=10,
        fetch_ns=0,
        operations=frozenset(),
        tenants=4,
        zipf=1.0,
    )


@dataclass
class Outcome:
    tokens_per_ms: float
    starved: int
    longest_wait_ns: int
    most_overtaken: int


def outcome(policy: Policy) -> Outcome:
    world = Simulation(crowded(policy))
    waits: list[int] = []
    sampled = 0
    checkers = world.replica.checkers
    real = checkers.on_event

    def on_event(event: Event) -> None:
        nonlocal sampled
        real(event)
        if isinstance(event, RequestAdmitted) and not event.again:
            waits.append(event.wait_ns)
        elif isinstance(event, IterationCompleted):
            sampled += event.sampled

    checkers.on_event = on_event  # type: ignore[method-assign]
    for _ in range(WARM):
        world.step(quiet=False)
    waits.clear()
    sampled, began = 0, world.clock.now
    for _ in range(TICKS):
        world.step(quiet=False)
    asks = [*world.clients.live.values(), *world.clients.recent.values()]
    return Outcome(
        sampled / (world.clock.now - began) * 1e6,
        sum(wait > STARVED_NS for wait in waits),
        max(waits),
        max(ask.overtaken for ask in asks),
    )


@pytest.mark.long
def test_the_default_starves_nobody_and_costs_next_to_nothing() -> None:
    default = outcome(POLICIES["deficit"])
    greedy = outcome(POLICIES["resident-greedy"])
    assert default.starved == 0, default
    assert greedy.starved > 0, greedy
    assert default.most_overtaken < greedy.most_overtaken
    assert default.tokens_per_ms >= 0.97 * greedy.tokens_per_ms, (default, greedy)
