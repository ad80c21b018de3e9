"""Makes docs/errors.md from the table in `loraplex.core.errors`; `--check` only compares.

Owns the page's form. Never owns a fact: codes, roots, statuses and invariants come from the code.
"""

import argparse
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ERRORS_PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"

HEAD = """# Errors

Generated from `src/loraplex/core/errors.py` by `tools/gen_docs.py`; do not edit (`make fix` renews it).
A code is stable: it names one violated invariant. Its root says whose fault it is.
"""


def _text(value: object) -> str:
    """An enum member's value, or the thing itself, as text that cannot break a table cell."""
    plain = value.value if isinstance(value, Enum) else value
    return " ".join(str(plain).split()).replace("|", "\\|")


def errors_page(codes: Mapping[Any, Any]) -> str:
    """The page for `{code: info}` where info has `root`, `status` and `invariant`; roots in order of appearance."""
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


def main() -> int:
    """Writes the page, or with `--check` says whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when the page is stale")
    check = parser.parse_args().check

    from loraplex.core.errors import CODES

    wanted = errors_page(CODES)
    if not check:
        ERRORS_PAGE.write_text(wanted, encoding="utf-8")
        return 0
    if ERRORS_PAGE.exists() and ERRORS_PAGE.read_text(encoding="utf-8") == wanted:
        return 0
    print("docs/errors.md does not match src/loraplex/core/errors.py; run `make fix`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
