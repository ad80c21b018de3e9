"""Several engines behind one placer: everybody is answered as if alone, load lies on few, and the newest
moves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loraplex.cli import main
from loraplex.core.errors import CallerError
from loraplex.sim import fleet
from loraplex.sim.fleet import Fleet, FleetReport, simulate_fleet

SHORT = (1, 5, 6, 8)
"""Seeds whose workers run short of pages where many ask."""
MANY = 0.7


def clean(report: FleetReport) -> FleetReport:
    assert report.violation is None, f"seed {report.seed}: {report.violation}"
    return report


@pytest.mark.parametrize("seed", SHORT)
def test_everybody_is_answered_as_if_alone_while_requests_move(seed: int) -> None:
    report = clean(simulate_fleet(seed, 150, 3, MANY))
    assert report.answered > 80
    assert report.moved > 0
    assert report.recomputed > report.moved  # a prompt at least, and mostly some of an answer


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_what_one_worker_can_do_leaves_the_others_idle(seed: int) -> None:
    report = clean(simulate_fleet(seed, 300, 3, arrivals=0.02))
    assert report.busy["gpu-0"] == report.busy["gpu-1"] == 0
    assert report.placed["gpu-2"] == report.answered > 0


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_a_busy_worker_fills_up_before_the_next_one(seed: int) -> None:
    report = clean(simulate_fleet(seed, 150, 4))
    busy = [report.busy[f"gpu-{index}"] for index in range(4)]
    assert busy == sorted(busy)
    assert busy[0] == 0 < busy[3]


def test_one_seed_is_one_timeline() -> None:
    assert simulate_fleet(5, 100, 3, MANY).record() == simulate_fleet(5, 100, 3, MANY).record()


def moved_without(change: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(*change)
    seen = (simulate_fleet(seed, 100, 3, MANY).violation for seed in (5, 8))
    return {violation.checker for violation in seen if violation is not None}


def test_a_move_that_forgets_what_was_answered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = property(lambda asked: np.array(asked.prompt))
    assert moved_without((fleet._Asked, "known", broken), monkeypatch) == {"equal_output"}


def test_a_move_that_is_not_withdrawn_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(world: Fleet, plan: Any) -> None:
        asked = world.live[plan.request_id]
        world._send(asked, plan.destination)  # the same attempt on two workers

    assert moved_without((Fleet, "_move", move), monkeypatch) >= {"equal_output"}


def test_the_command_prints_the_seed_and_refuses_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--seed", "3", "--ticks", "60", "--workers", "2"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("seed 3: 2 workers")
    with pytest.raises(CallerError, match="workers must be at least 2"):
        simulate_fleet(0, 10, 0)
