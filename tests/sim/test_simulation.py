"""Seeds of the simulator: nothing wrong while faults strike, everything finished after them, one seed one
timeline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from loraplex.sim.faults import Fault, draw_setup
from loraplex.sim.simulation import simulate

LONG_SEEDS, LONG_TICKS = 5, 2_000
"""Each long case runs so many seeds for so many ticks; a hundred cases make a million ticks."""

FOUND = {
    2: "requests parked behind a fetch that failed were never looked at again",
    16: "images of adapters that were leaving kept the host tier full for the requests before theirs",
    18: "young rows took the whole budget, got no page, and starved the older request that could have "
    "preempted them",
    45: "a copy that had ended was copied again when a failed plan gave its deltas back",
    62: "a removed adapter kept its pins and could not be evicted",
    71: "requests waited for ever for an adapter slot that pins held",
    89: "a publication was carried again behind its retirement",
    1014: "a copy began while the plan that scrubs its pages was in flight",
    1056: "pages that a failed plan's copy had filled were scrubbed again",
}
"""Seeds that once showed a fault, and which one."""


def assert_clean(seed: int, ticks: int, depth: int | None = None, cached: bool | None = None) -> int:
    report = simulate(seed, ticks, setup=draw_setup(seed, depth=depth, cached=cached))
    replay = f"loraplex sim --seed {seed} --ticks {ticks}" + ("" if depth is None else f" --depth {depth}")
    assert report.violation is None, f"{report.violation}; replay: {replay}"
    assert report.safety_ticks == ticks
    return report.ticks


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_a_few_seeds(seed: int, depth: int) -> None:
    assert_clean(seed, 250, depth)


@pytest.mark.long
@pytest.mark.parametrize("case", range(100))
def test_a_million_ticks(case: int) -> None:
    for seed in range(1_000 + case * LONG_SEEDS, 1_000 + (case + 1) * LONG_SEEDS):
        assert_clean(seed, LONG_TICKS)


@pytest.mark.long
@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_once_showed_a_fault(seed: int) -> None:
    """They did before anything was cached; their timelines are those of that time."""
    assert_clean(seed, 1_500, cached=False)


@pytest.mark.long
def test_every_fault_kind_strikes_somewhere() -> None:
    """Alone, so that a kind that no longer does anything is noticed."""
    for kind in Fault:
        struck = 0
        for seed in range(3):
            setup = draw_setup(seed, faults=frozenset({kind}))
            report = simulate(seed, 400 if kind is Fault.REPLICA_RESTART else 120, setup=setup)
            assert report.violation is None, (kind, seed, report.violation)
            struck += report.faults[kind.value]
            if struck:
                break
        assert struck or kind in (Fault.REPLICA_RESTART, Fault.SWAP_STORM, Fault.POOL_EXHAUSTION), kind


def run_cli(*words: str, hash_seed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loraplex.cli", "sim", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def test_one_seed_is_one_timeline_under_two_hash_seeds() -> None:
    runs = [run_cli("--seed", "11", "--ticks", "200", "--json", hash_seed=value) for value in ("1", "2")]
    first, second = (json.loads(run.stdout) for run in runs)
    assert first == second
    assert first["timeline"] != simulate(12, 200).timeline
    assert first["timeline"] == simulate(11, 200).timeline


def test_the_command_prints_its_seed_first_and_its_replay_last() -> None:
    run = run_cli("--seed", "3", "--ticks", "60", "--depth", "1", hash_seed="0")
    lines = run.stdout.splitlines()
    assert run.returncode == 0
    assert lines[0] == "seed 3"
    assert lines[-1] == "replay: loraplex sim --seed 3 --ticks 60 --depth 1"
    assert any(line.startswith("timeline ") for line in lines)


def test_a_run_without_ticks_is_refused() -> None:
    run = run_cli("--ticks", "0", hash_seed="0")
    assert run.returncode == 2
    assert "config_invalid" in run.stderr
