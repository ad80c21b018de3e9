"""Each invariant broken in turn, with the code's own checks switched off: a checker outside must see it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sim.mutants import MUTANTS, Mutant, blind

from loraplex.core.errors import InternalFault
from loraplex.memory.pages import PagePool
from loraplex.schedule.policy import DEFICIT
from loraplex.sim.faults import Fault, Setup, draw_setup
from loraplex.sim.simulation import simulate

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


def starving(seed: int, bound: int) -> Setup:
    """Ready requests for the base fill the pool; a few need an adapter that is cold."""
    drawn = draw_setup(seed, depth=1, faults=frozenset(), cached=False)
    limits = replace(
        drawn.limits, num_pages=25, max_requests=8, token_budget=16, host_bytes=None, adapter_floor=0
    )
    limits = replace(limits, kv=replace(limits.kv, page_tokens=2), policy=replace(DEFICIT, bound=bound))
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
        max_overtaken=10,
    )


def test_a_cold_request_is_not_starved_by_ready_ones() -> None:
    """With its turn bounded it runs; without the bound the checker sees it overtaken."""
    seeds = (5, 6, 9, 10)
    assert [simulate(seed, 500, setup=starving(seed, 8)).violation for seed in seeds] == [None] * len(seeds)
    seen = [simulate(seed, 500, setup=starving(seed, 1 << 30)).violation for seed in seeds]
    assert "starvation" in {violation.checker for violation in seen if violation is not None}


def test_the_codes_own_checks_would_have_spoken() -> None:
    """What `blind` switches off is on in shipping code."""
    pool = PagePool(4, 64)
    pages = pool.reserve(1, 1)
    with pytest.raises(InternalFault):
        pool.cancel(pages, 2, 0)
