"""The repository's small scripts: evidence of benchmark pages, generated pages, pins."""

import datetime
import json
import random
import sys
import tomllib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tools import device_check, evidence, gen_docs, setup_venv

from loraplex.core.errors import ErrorCode
from loraplex.telemetry.failure_record import Capability, Failure, Outcome

ROOT = Path(__file__).resolve().parent.parent
TODAY = datetime.date(2026, 11, 30)
GOOD = """# Benchmarks
## Decode
Command: `loraplex bench decode`
Hardware: one H200
- **Date:** 2026-11-30

| rows | tokens/s |
|---|---|
| 64 | 1 |
"""


def test_a_section_with_its_origin_passes() -> None:
    assert evidence.faults(GOOD, TODAY) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Command: `loraplex bench decode`\n", "", "'Command:'"),
        ("Hardware: one H200", "Hardware:", "'Hardware:'"),
        ("- **Date:** 2026-11-30\n", "", "'Date:'"),
        ("2026-11-30", "2026-11-31", "expected YYYY-MM-DD"),
        ("2026-11-30", "2026-12-01", "future"),
        ("## Decode\nCommand", "Command: x\n## Decode\n", "'Command:'"),
    ],
)
def test_a_section_without_its_origin_is_refused(old: str, new: str, words: str) -> None:
    assert old in GOOD
    found = evidence.faults(GOOD.replace(old, new, 1), TODAY)
    assert len(found) == 1
    assert words in found[0]


def test_fenced_code_neither_gives_nor_needs_evidence() -> None:
    assert evidence.faults("## A\n```\n| a |\n|---|\n```\n", TODAY) == []
    hidden = GOOD.replace("Hardware: one H200", "```\nHardware: one H200\n```")
    assert len(evidence.faults(hidden, TODAY)) == 1


def test_the_benchmark_page_says_where_its_numbers_come_from() -> None:
    assert evidence.main() == 0


class Root(Enum):
    CALLER = "caller"
    OURS = "ours"


@dataclass(frozen=True)
class Info:
    root: Root
    status: int
    invariant: str


def test_the_error_page_has_one_row_a_code_under_its_root() -> None:
    page = gen_docs.errors_page(
        {
            "a_b": Info(Root.CALLER, 400, "x | y"),
            "c": Info(Root.OURS, 500, "z"),
            "d": Info(Root.CALLER, 404, "w"),
        }
    )
    assert "| `a_b` | 400 | x \\| y |\n| `d` | 404 | w |" in page
    assert page.index("## caller") < page.index("`d`") < page.index("## ours") < page.index("`c`")


def test_the_metric_page_has_a_row_for_each_metric_by_its_scraped_name() -> None:
    registry = CollectorRegistry()
    Counter("a_b", "x | y", ["code", "phase"], registry=registry).labels("c", "d").inc()
    Gauge("c", "z.", registry=registry)
    Histogram("d_seconds", "w.", registry=registry)
    rows = gen_docs.metrics_page(registry).split("|---|---|---|---|\n")[1]
    assert rows == (
        "| `a_b_total` | counter | `code`, `phase` | x \\| y |\n"
        "| `c` | gauge |  | z. |\n"
        "| `d_seconds` | histogram |  | w. |\n"
    )
    scraped = generate_latest(registry).decode()
    assert all(f"\n{name}" in scraped for name in ("a_b_total{", "c ", "d_seconds_count "))


def test_the_failure_page_has_a_row_a_record_under_its_category() -> None:
    code, test = ErrorCode.INTERNAL, "tests/d.py::e"
    made = Failure("a_b", 3, "x | y", (code, "c.py::f"), "z", Outcome.QUEUE, "c.py", (test,))
    later = Failure("c", 6, "w", (), "v", Outcome.REJECT, "parallel", needs=Capability.TENSOR_PARALLELISM)
    page = gen_docs.failures_page([made, later, Failure("d", 2, "u", (), "t", Outcome.EVICT, "d.py")])
    with_it = "*with tensor parallelism*"
    tensor, identity = page.split("## ")[1:]
    assert tensor.splitlines()[4:] == [
        f"| `a_b` | 3 | x \\| y | `internal`, `c.py::f` | z | queue | `c.py` | `{test}` | `make test` |",
        f"| `c` | 6 | w | {with_it} | v | reject | `parallel` | {with_it} | `make test` |",
        "",
    ]
    assert identity.startswith("Identity and state\n")
    assert "| `d` | 2 |" in identity


def test_every_direct_dependency_has_an_exact_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for requirement in wanted:
        name = requirement.split(">")[0].split("[")[0]  # extras have pins of their own
        assert setup_venv.pin(name).startswith(name + "==")
    with pytest.raises(SystemExit, match="no pin for nothing-of-this-name"):
        setup_venv.pin("nothing-of-this-name")


PROGRAM = """
import json, sys, time
if 'fail' in sys.argv: sys.exit(3)
if 'hang' in sys.argv: time.sleep(600)
json.dump({'rows': []}, open(sys.argv[1], 'w'))
"""


def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(name: str, *words: str, cuda: bool = False, limit_s: int = 100) -> device_check.Stage:
        return device_check.Stage(name, name, limit_s, (sys.executable, "-c", PROGRAM, *words), cuda)

    made = (
        stage("fails", "fail"),
        stage("hangs", "hang", limit_s=1),
        stage("writes", device_check.JSON),
        stage("device", cuda=True),
        device_check.Stage("absent", "a program that is not there", 5, ("no-such-program",), cuda=False),
    )
    monkeypatch.setattr(device_check, "STAGES", made)
    monkeypatch.setattr(device_check, "has_cuda", lambda: False)


def test_a_device_check_goes_on_after_a_stage_that_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_stages(monkeypatch)
    assert device_check.main(["--out", str(tmp_path), "all"]) == 1
    found = {row["stage"]: row["result"] for row in json.loads((tmp_path / "summary.json").read_text())}
    assert found == {
        "fails": "failed (3)",
        "hangs": "timed out",
        "writes": "passed",
        "device": "skipped",
        "absent": "skipped",
    }
    assert json.loads((tmp_path / "writes.json").read_text()) == {"rows": []}
    assert (tmp_path / "hangs.log").exists()
    table = capsys.readouterr().out.splitlines()[-5:]
    assert [line.split()[0] for line in table] == list(found)
    assert device_check.main(["--out", str(tmp_path), "writes"]) == 0


def test_the_stages_of_a_device_check_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for stage in device_check.STAGES:
        assert stage.name in listed
        assert stage.limit_s < 600
        for word in stage.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word
    tested = {word for stage in device_check.STAGES for word in stage.command}
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files <= tested, "a device test that no stage runs"
    with pytest.raises(SystemExit, match="no stage 'magic'"):
        device_check.main(["magic"])


def test_compile_caches_come_back_from_their_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "PIECE_BYTES", 500)
    caches = [tmp_path / "first", tmp_path / "second", tmp_path / "absent"]
    (caches[0] / "a" / "b").mkdir(parents=True)
    (caches[0] / "a" / "b" / "module.so").write_bytes(random.Random(1).randbytes(3000))
    caches[1].mkdir()
    (caches[1] / "kernel").write_text("ptx")
    kept = tmp_path / "kept"
    assert not device_check.unpack(kept, caches)
    count = device_check.pack(caches, kept)
    assert count == len(list(kept.iterdir())) >= 6
    assert all(path.stat().st_size <= 500 for path in kept.iterdir())
    there = [tmp_path / "there" / str(index) for index in range(3)]
    assert device_check.unpack(kept, there)
    assert (there[0] / "a" / "b" / "module.so").read_bytes() == (
        caches[0] / "a" / "b" / "module.so"
    ).read_bytes()
    assert (there[1] / "kernel").read_text() == "ptx"
    assert not there[2].exists()
