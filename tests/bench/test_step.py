"""The step benchmark runs what it says, and its report has every part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.bench.commands import step
from loraplex.bench.step import PARTS, StepOptions, run_step
from loraplex.core.errors import CallerError


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step(running=8, waiting=20, adapters=3, steps=4, json=tmp_path / "step.json")
    report = json.loads((tmp_path / "step.json").read_text())
    assert (report["running"], report["waiting"], report["steps"]) == (8, 20, 4)
    assert set(report["us"]) == {*PARTS, "whole"}
    assert "whole" in capsys.readouterr().out


def test_without_adapters_and_without_a_queue() -> None:
    report = run_step(StepOptions(running=4, waiting=0, adapters=0, steps=2, depth=0))
    assert (report["running"], report["waiting"]) == (4, 0)


@pytest.mark.parametrize("wrong", [{"running": 0}, {"waiting": -1}, {"adapters": -1}, {"steps": 0}])
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(CallerError):
        step(**wrong)  # type: ignore[arg-type]
