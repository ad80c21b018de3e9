"""Tests that tables name, `tests/....py::test[case]`, looked up in the sources with `ast`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"`(tests/[\w./-]+::\w+(?:\[[^\]`]+\])?)`")
"""A test in back quotes."""
_PARTS = re.compile(r"(tests/[\w./-]+\.py)::(test_\w+)(?:\[([^\]]+)\])?")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(tree: ast.Module, root: Path) -> list[Path]:
    """Modules of the tests that a module imports."""
    names = [
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests.")
    ]
    return [path for name in names if (path := root / (name.replace(".", "/") + ".py")).is_file()]


def _words(tree: ast.Module) -> set[str]:
    """What may be a case's id: strings, names of functions and of members."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                found.add(text)
            case ast.FunctionDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name):
                found.add(name.lower())
    return found


def _cases(path: Path, root: Path) -> set[str]:
    """Ids that cases of a file's tests may have: its own words, and those of helpers that it imports."""
    seen, left, found = set[Path](), [path], set[str]()
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        found |= _words(_tree(one))
        left += _imported(_tree(one), root)
    return found


def missing(name: str, root: Path = ROOT) -> str | None:
    """Why there is no such test, or None where there is."""
    parts = _PARTS.fullmatch(name)
    if parts is None:
        return f"{name}: no name of a test"
    path = root / parts[1]
    if not path.is_file():
        return f"{name}: no such file"
    functions = {
        node.name for node in _tree(path).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    if parts[2] not in functions:
        return f"{name}: no such function"
    if parts[3] is not None and parts[3] not in _cases(path, root):
        return f"{name}: no such case"
    return None


def rows(text: str, section: str) -> list[list[str]]:
    """Cells of every table row under a heading that begins with `section`, heads and rules left out."""
    found = re.search(rf"^#+ {section}\b[^\n]*\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, section
    lines = found[1].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for index, line in enumerate(lines)
        if line.startswith("| ") and not (index + 1 < len(lines) and lines[index + 1].startswith("|---"))
    ]
