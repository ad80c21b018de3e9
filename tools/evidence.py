"""Checks that the numbers in docs/benchmarks.md say where they come from.

Each section of the page that holds a table must hold lines `Command:`, `Hardware:` and `Date:` of its own,
none of them empty, the date a real one and not in the future. It does not rerun anything, and so cannot tell
whether a number is right; it only refuses numbers that nobody could check.
"""

import datetime
import re
import sys
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
FIELDS = ("Command", "Hardware", "Date")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_RULE = re.compile(r"^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$")
_FENCE = re.compile(r"^\s*(```|~~~)")


def sections(text: str) -> list[tuple[str, list[str]]]:
    """(title, lines) of each section in order; a section ends at the next heading of any level. Fenced code
    is left out.
    """
    found: list[tuple[str, list[str]]] = [("(before the first heading)", [])]
    fenced = False
    for line in text.splitlines():
        if _FENCE.match(line):
            fenced = not fenced
            continue
        if fenced:
            continue
        heading = _HEADING.match(line)
        if heading:
            found.append((heading.group(1), []))
        else:
            found[-1][1].append(line)
    return found


def has_table(lines: list[str]) -> bool:
    """Whether the lines hold a Markdown table: a row followed by its rule of dashes."""
    return any("|" in above and "|" in below and _RULE.match(below) for above, below in pairwise(lines))


def field(lines: list[str], name: str) -> str | None:
    """The text after `Name:` at the start of a line (bold and list marks allowed), or None."""
    pattern = re.compile(rf"^\s*(?:[-*]\s+)?\**{name}:\**\s*(.*?)\s*$")
    for line in lines:
        match = pattern.match(line)
        if match:
            return match.group(1)
    return None


def faults(text: str, today: datetime.date) -> list[str]:
    """One sentence for each thing that a section with a table lacks; empty when all is well."""
    found = []
    for title, lines in sections(text):
        if not has_table(lines):
            continue
        for name in FIELDS:
            value = field(lines, name)
            if not value:
                found.append(f"section '{title}' has a table but no '{name}:' line with text")
            elif name == "Date":
                found.extend(_date_faults(title, value, today))
    return found


def _date_faults(title: str, value: str, today: datetime.date) -> list[str]:
    try:
        day = datetime.date.fromisoformat(value)
    except ValueError:
        return [f"section '{title}' has the date '{value}', expected YYYY-MM-DD"]
    if day > today:
        return [f"section '{title}' has the date {value}, which lies in the future"]
    return []


def main() -> int:
    """Prints each fault and returns 1 when there is one."""
    text = PAGE.read_text(encoding="utf-8")
    # A day of slack: the page may have been dated east of this machine's time zone.
    found = faults(text, datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=1))
    for sentence in found:
        print(f"docs/benchmarks.md: {sentence}", file=sys.stderr)
    if not found:
        tables = sum(has_table(lines) for _, lines in sections(text))
        print(f"docs/benchmarks.md: {tables} sections with numbers, each with command, hardware and date")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
