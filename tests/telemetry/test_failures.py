"""The typed failures name what there is: detectors, owners, tests. Rows of the specification name tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.named_tests import NAMED, ROOT, missing, rows

from loraplex.core.errors import CODES, ErrorCode
from loraplex.server.metrics import Metrics
from loraplex.telemetry.failure_record import Capability, Failure
from loraplex.telemetry.failures import FAILURES, SPECIFIED

LIBRARY = ROOT / "src" / "loraplex"
CHAPTERS = ROOT / "docs" / "specification"
INDEXED = {
    "0x02H": ("02-operators.md", 3),
    "0x07K": ("07-swap.md", 2),
    "0x08L": ("08-kv-compatibility.md", 2),
    "0x09M": ("09-scheduling.md", 2),
    "0x09M policies": ("09-scheduling.md", 4),
    "0x0C": ("11-metrics-and-failures.md", 2),
    "0x0D": ("11-metrics-and-failures.md", 3),
}
"""Sections of which each failure names its tests: the chapter, and the column of the tests."""
COUNTS = {"0x02H": 8, "0x07K": 12, "0x08L": 14, "0x09M": 9, "0x09M policies": 8, "0x0C": 50, "0x0D": 54}
PACKAGES = {Capability.TENSOR_PARALLELISM: "parallel", Capability.COLLECTIONS: "collection"}


def place(path: str) -> Path | None:
    """A path of the library or of the repository."""
    return next((p for p in (LIBRARY / path, ROOT / path) if p.exists()), None)


def defined(path: Path, name: str) -> bool:
    """Whether a module defines a function, a class or a method, `Class.method`."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return True


def metrics() -> set[str]:
    return {
        metric.name + ("_total" if metric.type == "counter" else "")
        for collector in Metrics().registry._collector_to_names
        for metric in collector.describe()
    }


def faults(failure: Failure, scraped: set[str]) -> list[str]:
    """What a record names that is not there, and what it lacks."""
    found = [text for name in failure.tests if (text := missing(name))]
    for detector in failure.detectors:
        path, _, name = str(detector).partition("::")
        if isinstance(detector, ErrorCode):
            known = detector in CODES
        elif not name:
            known = detector in scraped
        else:
            known = (module := place(path)) is not None and defined(module, name)
        if not known:
            found.append(f"{detector}: no such detector")
    if failure.needs is not None:
        package = PACKAGES.get(failure.needs)
        if package is not None and (LIBRARY / package).exists():
            found.append(f"{failure.needs} is here")
        return found
    if place(failure.owner) is None:
        found.append(f"{failure.owner}: no such owner")
    if not failure.tests or not failure.detectors:
        found.append("neither marked as later nor detected by a test")
    return found


def test_the_records_are_those_of_the_specification_and_ours() -> None:
    text = (CHAPTERS / "11-metrics-and-failures.md").read_text(encoding="utf-8")
    specified = [(int(cells[0]), cells[1]) for cells in rows(text, "0x0DB")]
    assert [(failure.loop, failure.id) for failure in SPECIFIED] == specified
    assert len(specified) == 36
    ids = [failure.id for failure in FAILURES]
    assert len(set(ids)) == len(ids)
    print(f"typed failures: {len(ids)}, of which later: {sum(f.needs is not None for f in FAILURES)}")


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_a_record_names_only_what_there_is(failure: Failure) -> None:
    assert faults(failure, metrics()) == []


def test_a_record_that_names_nothing_real_is_seen() -> None:
    this = "tests/telemetry/test_failures.py::test_a_record_that_names_nothing_real_is_seen"
    good = Failure("x", 2, "", (ErrorCode.INTERNAL, "loraplex_ready"), "", "reject", "core/ids.py", (this,))  # type: ignore[arg-type]
    assert faults(good, metrics()) == []
    bad = Failure(
        "x",
        2,
        "",
        ("loraplex_moods", "core/ids.py::moods", "core/moods.py::f", "sim/checks.py::Checkers.moods"),
        "",
        "reject",  # type: ignore[arg-type]
        "core/moods.py",
        (f"{this}[moody]", "tests/test_moods.py::test_a", f"{this}s", "moods"),
    )
    assert [text.partition(": ")[2] for text in faults(bad, metrics())] == [
        "no such case",
        "no such file",
        "no such function",
        "no name of a test",
        *["no such detector"] * 4,
        "no such owner",
    ]
    assert faults(Failure("x", 2, "", (), "", "reject", "core/ids.py"), set()) != []  # type: ignore[arg-type]


@pytest.mark.parametrize("section", INDEXED)
def test_each_failure_of_the_specification_names_its_tests(section: str) -> None:
    """Or what brings the code that could fail so."""
    chapter, column = INDEXED[section]
    table = rows((CHAPTERS / chapter).read_text(encoding="utf-8"), section.split(maxsplit=1)[0])
    table = [cells for cells in table if len(cells) == column + 1]
    assert len(table) == COUNTS[section]
    for cells in table:
        later = re.fullmatch(r"\*(.*)\*", cells[-1])
        if later is not None:
            assert later[1] in set(Capability), cells
        else:
            names = NAMED.findall(cells[-1])
            assert names, cells
            assert "".join(NAMED.split(cells[-1])[::2]).strip(", ") == "", cells
