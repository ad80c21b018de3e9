"""`loraplex bench load` on a tiny model: every tier and stage, and running requests beside loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.artifact.tiny import tiny_model

from loraplex import cli
from loraplex.bench.load import STAGES


def test_stages_and_latencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    model.config.max_position_embeddings = 2048
    model.save_pretrained(tmp_path / "base")
    out = tmp_path / "load.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "bench",
                "load",
                str(tmp_path / "base"),
                "--dtype",
                "float32",
                "--ranks",
                "2",
                "--repeats",
                "1",
                "--cold",
                "6",
                "--running",
                "2",
                "--burst",
                "5",
                "--pool-gb",
                "0.05",
                "--json",
                str(out),
            ]
        )
    assert ended.value.code == 0
    record = json.loads(out.read_text())
    assert [row["stage"] for row in record["stages"]] == list(STAGES) * 2
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in record["stages"])
    assert [row["case"] for row in record["time_between_tokens"]] == [
        "undisturbed",
        "while 6 cold adapters load",
    ]
    stages = {row["stage"]: row for row in record["stages"]}
    assert stages["convert"]["steps"] == 0
    assert stages["disk to published"]["steps"] >= stages["host to published"]["steps"] >= 1
    assert stages["host to published"]["step_cpu_ms"] > 0
    assert record["burst"]["adapters"] == 5
    assert record["burst"]["gb_per_s"] > 0
    assert record["swap"] == {"running": 2, "ms": record["swap"]["ms"], "finished": 4}
    assert record["swap"]["ms"] > 0
    assert "x undisturbed" in capsys.readouterr().out


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "load", "--repeats", "0"])
    assert ended.value.code == 2
    assert "config_invalid" in capsys.readouterr().err
