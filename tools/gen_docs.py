"""Makes docs/errors.md, docs/metrics.md and docs/failures.md from the code, and docs/decisions.md from its
chapters; `--check` only compares.

Owns the pages' form. Never owns a fact: codes, roots, statuses, invariants, metrics and failures come from
the code, headings from the chapters.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
ERRORS_PAGE = DOCS / "errors.md"
METRICS_PAGE = DOCS / "metrics.md"
FAILURES_PAGE = DOCS / "failures.md"
DECISIONS_PAGE = DOCS / "decisions.md"
CHAPTERS = ("engine", "residency", "images", "adapters", "model", "server", "catalog", "tests")
"""Of the decisions, in the order in which they are read."""

HEAD = """# Errors

Generated from `src/loraplex/core/errors.py` by `tools/gen_docs.py`; do not edit (`make fix` renews it).
A code is stable: it names one violated invariant. Its root says whose fault it is.
"""


def _text(value: object) -> str:
    """An enum member's value, or the thing itself, as text that cannot break a table cell."""
    plain = value.value if isinstance(value, Enum) else value
    return " ".join(str(plain).split()).replace("|", "\\|")


def errors_page(codes: Mapping[Any, Any]) -> str:
    """The page for `{code: info}` where info has `root`, `status` and `invariant`; roots in order of
    appearance.
    """
    roots: dict[str, list[tuple[str, str, str]]] = {}
    for code, info in codes.items():
        row = (_text(code), _text(info.status), _text(info.invariant))
        roots.setdefault(_text(info.root), []).append(row)
    parts = [HEAD]
    for root, rows in roots.items():
        lines = [f"| `{code}` | {status} | {invariant} |" for code, status, invariant in rows]
        parts.append(
            "\n".join([f"## {root}", "", "| code | status | invariant |", "|---|---|---|", *lines, ""])
        )
    return "\n".join(parts)


METRICS_HEAD = """# Metrics

Generated from `src/loraplex/server/metrics.py` and `src/loraplex/telemetry/engine_metrics.py` by
`tools/gen_docs.py`; do not edit (`make fix` renews it). `GET /metrics` serves them as Prometheus text. Labels
are from fixed sets: never an alias, a tenant or anything that a caller chose. A histogram has the series
`_bucket`, `_sum` and `_count`.
"""


def metrics_page(registry: Any) -> str:
    """The page for a registry of `prometheus_client`: its metrics by scraped name, as they are defined."""
    lines = []
    for collector in registry._collector_to_names:
        for metric in collector.describe():
            name = f"`{metric.name}{'_total' if metric.type == 'counter' else ''}`"
            labels = ", ".join(f"`{label}`" for label in collector._labelnames)
            lines.append(f"| {name} | {metric.type} | {labels} | {_text(metric.documentation)} |")
    return "\n".join([METRICS_HEAD, "| name | type | labels | meaning |", "|---|---|---|---|", *lines, ""])


FAILURES_HEAD = """# Failures

Generated from `src/loraplex/telemetry/failures.py` by `tools/gen_docs.py`; do not edit (`make fix` renews
it). The 36 typed failures of 0x0DB and ours, by category. *In*: the mechanism, as 0x0DB numbers it.
Detectors are error codes, metrics and checks; each test injects the failure and sees one of them speak. The
owner restores the invariant; the gate blocks a release while it does not hold. A capability in italics brings
the code that can fail so. Paths are inside `src/loraplex`, or the repository's.
"""
FAILURES_COLUMNS = (
    "failure", "in", "invariant", "detectors", "consequence", "outcome", "owner", "tests", "gate",
)  # fmt: skip


def failures_page(failures: Any) -> str:
    """The page for records of failures: a table for each category, in order of appearance."""
    categories: dict[str, list[str]] = {}
    for failure in failures:
        detectors = ", ".join(f"`{_text(detector)}`" for detector in failure.detectors)
        tests = ", ".join(f"`{test}`" for test in failure.tests)
        later = f"*with {_text(failure.needs)}*" if failure.needs is not None else ""
        cells = (
            f"`{failure.id}`",
            str(failure.loop),
            _text(failure.invariant),
            detectors or later,
            _text(failure.consequence),
            _text(failure.outcome),
            f"`{failure.owner}`",
            ", ".join(part for part in (tests, later) if part),
            f"`{_text(failure.gate)}`",
        )
        categories.setdefault(_text(failure.category), []).append(f"| {' | '.join(cells)} |")
    head = [f"| {' | '.join(FAILURES_COLUMNS)} |", "|---" * len(FAILURES_COLUMNS) + "|"]
    parts = [FAILURES_HEAD]
    for category, lines in categories.items():
        parts.append("\n".join([f"## {category[0].upper()}{category[1:]}", "", *head, *lines, ""]))
    return "\n".join(parts)


DECISIONS_HEAD = """# Decisions

Generated from the chapters in `docs/decisions/` by `tools/gen_docs.py`; do not edit (`make fix` renews it).
What was decided, what was rejected, and why. Each figure names its origin; where there is none, the reason is
an argument. Paths are inside `src/loraplex`, except those that begin with `tests` or `docs`. What the
specification leaves open is ruled in [rulings](rulings.md).
"""


def anchor(heading: str) -> str:
    """A heading's anchor, as the usual renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def decisions_page() -> str:
    """The index: each chapter by its title, each decision by its heading."""
    parts = [DECISIONS_HEAD]
    for name in CHAPTERS:
        text = (DOCS / "decisions" / f"{name}.md").read_text(encoding="utf-8")
        title = re.findall(r"^# Decisions: (.*)$", text, re.MULTILINE)[0]
        link = f"decisions/{name}.md"
        found = re.findall(r"^## (.*)$", text, re.MULTILINE)
        lines = [f"- [{heading}]({link}#{anchor(heading)})" for heading in found]
        parts.append("\n".join([f"## [{title[0].upper()}{title[1:]}]({link})", "", *lines, ""]))
    return "\n".join(parts)


def main() -> int:
    """Writes the pages, or with `--check` says whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when a page is stale")
    check = parser.parse_args().check

    from loraplex.core.errors import CODES
    from loraplex.server.metrics import Metrics
    from loraplex.telemetry.failures import FAILURES

    pages = (
        (ERRORS_PAGE, errors_page(CODES)),
        (METRICS_PAGE, metrics_page(Metrics().registry)),
        (FAILURES_PAGE, failures_page(FAILURES)),
        (DECISIONS_PAGE, decisions_page()),
    )
    stale = []
    for page, wanted in pages:
        if page.exists() and page.read_text(encoding="utf-8") == wanted:
            continue
        stale.append(page.name)
        if not check:
            page.write_text(wanted, encoding="utf-8")
    if check and stale:
        print(f"stale: {', '.join(f'docs/{name}' for name in stale)}; run `make fix`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
