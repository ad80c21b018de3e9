"""Each invariant broken in turn, with the code's own checks switched off: a checker outside must see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.mutants import MUTANTS, Mutant, blind, nothing

from loraplex.core.errors import InternalFault
from loraplex.engine import admission
from loraplex.engine.request_state import RequestRecord
from loraplex.memory.pages import PagePool
from loraplex.schedule.deadlines import Deadlines
from loraplex.schedule.policy import POLICIES, Policy
from loraplex.sim.faults import Fault, Setup, draw_setup
from loraplex.sim.simulation import Simulation, simulate

TICKS = 300
SEEDS = range(12)


def busy_setup(seed: int, mutant: Mutant) -> Setup:
    """A drawn setup with work enough to meet every path: small pool, swaps, pins, many arrivals."""
    kinds = frozenset(Fault(kind) for kind in mutant.kinds)
    drawn = draw_setup(seed, depth=1, faults=kinds, cached=mutant.cached)
    limits = replace(drawn.limits, copies_on_compute_stream=not mutant.copy_stream, scrub=False)
    if mutant.small:
        limits = replace(limits, kv=replace(limits.kv, page_tokens=4), max_adapter_slots=16)
    if mutant.cached:
        limits = replace(
            limits, kv=replace(limits.kv, page_tokens=1 + seed % 2), num_pages=61, host_bytes=None
        )
        limits = replace(limits, shared_tenants=frozenset(), prefix_floor=0)
        drawn = replace(drawn, tenants=3, alike=0.9, activated=0.5, prompt_tokens=12, output_tokens=10)
    return replace(
        drawn,
        limits=limits,
        arrivals=0.4,
        cap=12,
        swaps=0.02,
        base_share=0.2,
        aliases=8 if mutant.small else max(drawn.aliases, 4),
        small_share=0.9 if mutant.small else 0.0,
    )


def what_happens(mutant: Mutant) -> list[str]:
    seen: list[str] = []
    for seed in SEEDS:
        report = simulate(seed, TICKS, setup=busy_setup(seed, mutant))
        if report.violation is not None:
            seen.append(report.violation.checker)
            if report.violation.checker in mutant.expected:
                break
    return seen


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_checker_sees_it(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    blind(monkeypatch)
    mutant.apply(monkeypatch)
    seen = what_happens(mutant)
    assert mutant.expected & set(seen), f"{mutant.name} was seen by {seen or 'nobody'}"


@pytest.mark.parametrize(("small", "cached"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("copy_stream", [False, True])
def test_nothing_is_seen_where_nothing_is_broken(
    copy_stream: bool, small: bool, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind(monkeypatch)
    kinds = frozenset({"torn_copy", "duplicate_completion", "late_kv_write"})
    sane = Mutant("none", lambda patch: None, frozenset(), kinds, copy_stream, small, cached)
    for seed in range(3):
        assert simulate(seed, TICKS, setup=busy_setup(seed, sane)).violation is None


def starving(seed: int, policy: Policy) -> Setup:
    """Ready requests for the base fill the pool; a few need an adapter that is cold."""
    drawn = draw_setup(seed, depth=1, faults=frozenset(), cached=False)
    limits = replace(
        drawn.limits, num_pages=25, max_requests=8, token_budget=16, host_bytes=None, adapter_floor=0
    )
    limits = replace(limits, kv=replace(limits.kv, page_tokens=2), policy=policy)
    return replace(
        drawn,
        limits=limits,
        arrivals=1.0,
        cap=16,
        swaps=0.0,
        base_share=0.95,
        aliases=3,
        adapter_pages=12,
        operations=frozenset(),
        prompt_tokens=12,
        output_tokens=10,
    )


SEEDS_OF_STARVING = (5, 6, 9, 10)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
def test_every_policy_keeps_its_bound(policy: Policy) -> None:
    for seed in SEEDS_OF_STARVING:
        assert simulate(seed, 400, setup=starving(seed, replace(policy, bound=8))).violation is None


@pytest.mark.parametrize("broken", ["_owe", "_count_overtaken"])
def test_a_bound_that_is_not_kept_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is owed a turn, or nobody counts who was overtaken."""
    if broken == "_owe":
        monkeypatch.setattr(admission, "_owe", nothing)
    else:
        monkeypatch.setattr(admission, "_count_overtaken", lambda *_: True)
        monkeypatch.setattr(RequestRecord, "skipped", property(lambda _: 0, nothing))
    greedy = replace(POLICIES["resident-greedy"], bound=8)
    seen = [simulate(seed, 500, setup=starving(seed, greedy)).violation for seed in SEEDS_OF_STARVING]
    assert "starvation" in {violation.checker for violation in seen if violation is not None}


@pytest.mark.parametrize("place", ["waiting", "parked", "loading"])
def test_a_deadline_that_nobody_looks_at_is_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each place where a request may stand; those of the other places are looked at."""
    real = Deadlines.due

    def due(moments: Deadlines, now: int) -> list[str]:
        state = replica.state
        out = []
        for request_id in real(moments, now):
            record = state.records[request_id]
            stands = "parked" if state.queue.parked_for(request_id) else record.stage.value
            if stands != place:
                out.append(request_id)
        return out

    monkeypatch.setattr(Deadlines, "due", due)
    seen = set()
    for seed in range(40):
        setup = starving(seed, POLICIES["deficit"])
        setup = replace(
            setup, urgent=0.8, base_share=0.2, fetch_ns=2_000_000, costs=replace(setup.costs, copy_ns=900_000)
        )
        world = Simulation(setup)
        replica = world.replica.engine
        violation = world.run(300).violation
        seen.add(violation.checker if violation is not None else "")
        if "deadline" in seen:
            break
    assert "deadline" in seen


def test_the_codes_own_checks_would_have_spoken() -> None:
    """What `blind` switches off is on in shipping code."""
    pool = PagePool(4, 64)
    pages = pool.reserve(1, 1)
    with pytest.raises(InternalFault):
        pool.cancel(pages, 2, 0)
