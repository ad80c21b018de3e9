"""`loraplex bench ops` on tiny batches: workloads, errors against float64, JSON, chart, and what it
refuses.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from loraplex import cli
from loraplex.bench import operators
from loraplex.bench.operators import OpOptions, popularity, run_ops
from loraplex.ops.cpu import compiled
from loraplex.ops.dispatch import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's advice


def test_workloads_are_punicas() -> None:
    assert popularity("skewed", 32) == [11, 7, 5, 3, 2, 2, 1, 1]
    assert popularity("uniform", 16) == [4, 4, 4, 4]
    assert popularity("uniform", 10) == [3, 3, 2, 2]
    assert popularity("distinct", 3) == [1, 1, 1]
    assert popularity("identical", 5) == [5]
    for name in ("distinct", "uniform", "skewed", "identical"):
        assert all(sum(popularity(name, batch)) == batch for batch in range(1, 65))


def test_every_family_and_peer_is_measured_and_right() -> None:
    options = OpOptions(
        dtype="float32",
        batches=(5,),
        ranks=((3,), (2, 5)),
        workloads=("skewed",),
        shapes=((24, 40),),
        repeats=1,
    )
    rows, rate = run_ops(options, lambda _: None)
    families = set(FAMILIES) - (set() if compiled.library() else {"cpu_kernel"})
    assert {row.family for row in rows} == families | {"peft"}
    assert rate > 0
    assert all(row.error is not None and row.error < 1e-5 for row in rows)
    assert all(row.us > 0 and row.floor_us > 0 and row.rotated_bytes > 0 for row in rows)
    assert {row.adapters for row in rows} == {4}


def test_the_command_writes_rows_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, chart = tmp_path / "ops.json", tmp_path / "ops.svg"
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "bench",
                "ops",
                "--batch",
                "2",
                "--rank",
                "4",
                "--family",
                "segmented",
                "--repeats",
                "1",
                "--json",
                str(out),
                "--plot",
                str(chart),
            ]
        )
    assert ended.value.code == 0
    record = json.loads(out.read_text())
    assert [row["workload"] for row in record["rows"]] == ["distinct", "uniform", "skewed", "identical"]
    assert ET.fromstring(chart.read_text()).tag.endswith("svg")
    assert "x floor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--family", "magic"], ["--rank", "0"], ["--rank", "x"], ["--batch", "0"], ["--repeats", "0"]]
)
def test_what_cannot_be_measured_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "ops", *words])
    assert ended.value.code == 2
    assert "config_invalid" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loraplex.bench.op_peers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "ops", "--family", "vllm", "--batch", "1", "--rank", "2"])
    assert ended.value.code == 2
    assert "the peer vllm is not installed here" in capsys.readouterr().err


def test_operands_are_walked_through_before_they_come_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors, inputs and outputs of many layers, and as many weights as a cache does not hold."""
    monkeypatch.setattr(operators, "CACHE_BYTES", {"cpu": 8_000})
    options = OpOptions(
        dtype="float32",
        batches=(2,),
        ranks=((2,),),
        workloads=("identical",),
        shapes=((24, 40),),
        repeats=1,
        families=("segmented",),
    )
    walked: list[operators.Problem] = []
    problem = operators._problem
    monkeypatch.setattr(operators, "_problem", lambda *args: walked.append(problem(*args)) or walked[-1])
    [row] = run_ops(options, lambda _: None)[0]
    assert row.rotated_bytes >= 2 * 8_000 - row.rotated_bytes / len(walked[0].x)
    weights = {weight.data_ptr(): weight.nbytes for weight in walked[0].weights}
    assert sum(weights.values()) >= min(2 * 8_000, 24 * 40 * 4 * len(walked[0].x))
