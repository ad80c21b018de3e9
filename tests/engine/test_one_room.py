"""Each decision about residency has one place: read from the source, because a second place would work until
they differ.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import loraplex

ROOT = Path(loraplex.__file__).parent
CONTROL = sorted(path for name in ("engine", "memory", "schedule") for path in (ROOT / name).rglob("*.py"))


def places(dotted: str, *, stored: bool = False) -> set[str]:
    """Modules of the control tower that name an attribute chain that ends in `dotted`. stored: that assign to
    it.
    """
    found = set()
    for path in CONTROL:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or (stored and not isinstance(node.ctx, ast.Store)):
                continue
            if f".{ast.unparse(node)}".endswith(f".{dotted}"):
                found.add(path.relative_to(ROOT).as_posix())
    return found


def test_an_adapters_state_changes_in_one_module_and_in_the_lease_that_it_counts() -> None:
    assert places("move") == {"engine/residency/transitions.py", "memory/leases.py"}
    assert "memory/residency.py" in places("state", stored=True)
    assert not {name for name in places("state", stored=True) if name.startswith("engine/residency/")}


def test_who_may_go_is_asked_in_one_module() -> None:
    for asked in ("eviction.evictable", "eviction.cover", "eviction.ranked"):
        assert places(asked) == {"engine/residency/victims.py"}


def test_whether_there_is_room_is_answered_by_one_property() -> None:
    """Beside it only the ledger's own modules and the figure that each step reports name free pages."""
    assert places("pool.free") == {"engine/state.py", "engine/commit.py", "memory/transaction.py"}


def test_pages_are_taken_in_one_module() -> None:
    """`memory/transaction.py` is what it takes them with."""
    for taken in ("Transaction.reserve", "pool.reserve"):
        assert places(taken) == {"engine/residency/room.py", "memory/transaction.py"}


@pytest.mark.parametrize("word", ["choose", "eligible"])
def test_a_decisions_word_names_one_function(word: str) -> None:
    defined = [
        path
        for path in CONTROL
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == word
    ]
    assert len(defined) == 1
