"""Adapted modules written one by one, for tests that place factors by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.ops.factor_entry import Factors
from loraplex.ops.factor_table import FactorTable


@dataclass(frozen=True, slots=True)
class ModuleFactors:
    """One module: extents (byte offset, first rank, ranks) of A and B, byte offsets of vectors or -1."""

    layer: int
    module: int
    rank: int
    scale: float
    a: Sequence[tuple[int, int, int]] = ()
    b: Sequence[tuple[int, int, int]] = ()
    g: int = -1
    c: int = -1
    h: int = -1


def as_factors(entries: Sequence[ModuleFactors]) -> Factors:
    """The same as arrays."""
    extents = [extent for e in entries for side in (e.a, e.b) for extent in side]
    return Factors(
        layers=np.array([e.layer for e in entries], dtype=np.int64),
        modules=np.array([e.module for e in entries], dtype=np.int64),
        ranks=np.array([e.rank for e in entries], dtype=np.int64),
        scales=np.array([e.scale for e in entries], dtype=np.float32),
        counts=np.array([(len(e.a), len(e.b)) for e in entries], dtype=np.int64).reshape(-1, 2),
        extents=np.array(extents, dtype=np.int64).reshape(-1, 3),
        vectors=np.array([(e.g, e.c, e.h) for e in entries], dtype=np.int64).reshape(-1, 3),
    )


def write_slot(table: FactorTable, slot: int, entries: Sequence[ModuleFactors]) -> None:
    """Fill an empty slot at once, as an install and the next step do one after the other."""
    entry = table._entry(as_factors(entries))
    table._settle(slot, entry)
    table._send_entry(slot, entry)
