"""The repository's small scripts: evidence of benchmark pages, generated pages, pins."""

import datetime
import tomllib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from tools import evidence, gen_docs, setup_venv

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


def test_every_direct_dependency_has_an_exact_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for requirement in wanted:
        name = requirement.split(">")[0].split("[")[0]  # extras have pins of their own
        assert setup_venv.pin(name).startswith(name + "==")
    with pytest.raises(SystemExit, match="no pin for nothing-of-this-name"):
        setup_venv.pin("nothing-of-this-name")
