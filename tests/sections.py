"""Sections of plans for tests: one cell changed, or made of a few numbers."""

from __future__ import annotations

from typing import Any, TypeVar

from loraplex.core.packed import Columns
from loraplex.core.plan import AdapterColumns

Section = TypeVar("Section", bound=Columns)


def changed(section: Section, row: Any, **columns: Any) -> Section:
    """A copy whose `row` has these values in these columns (or value(old))."""
    made = type(section)(section.array.copy())
    for name, value in columns.items():
        column = getattr(made, name)
        column[row] = value(column[row]) if callable(value) else value
    return made


def adapters(*pairs: tuple[int, int]) -> AdapterColumns:
    """(adapter slot, generation) of each row."""
    slots, generations = zip(*pairs, strict=True)
    return AdapterColumns.filled(len(pairs), adapter_slot=slots, adapter_generation=generations)
