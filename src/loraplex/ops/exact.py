"""The definition: every operator in exact rational arithmetic, over nested lists.

Slow on purpose and free of tensors; all other families are compared with it. It takes the same plan and
speaks the same interface, with lists of `Fraction` where the others have tensors. It never rounds.

Specification: 0x02E (shrink, expand, scatter), 0x06B (ledgers), 0x06C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import BASE_SLOT, Module
from loraplex.core.layout import Factor
from loraplex.core.plan import BatchPlan
from loraplex.ops.interface import ModuleDims, RowSet
from loraplex.ops.rows import row_groups
from loraplex.ops.table import FactorPiece, ResidentAdapter

Vector = list[Fraction]
Matrix = list[Vector]


@dataclass(frozen=True, slots=True)
class ExactModule:
    """One adapted module. a: [rank][d_in]; b: [d_out][rank], the logical orientation; h [d_in]; g, c
    [d_out].
    """

    a: Matrix
    b: Matrix
    scale: Fraction = Fraction(1)
    h: Vector | None = None
    g: Vector | None = None
    c: Vector | None = None

    @property
    def rank(self) -> int:
        """Logical rank."""
        return len(self.a)

    def padded(self, physical_rank: int) -> ExactModule:
        """The same operator at a physical rank, both tails zero (0x06A); raises
        `operator_rank_unsupported`.
        """
        extra = physical_rank - self.rank
        if extra < 0:
            raise InternalFault(
                ErrorCode.OPERATOR_RANK_UNSUPPORTED,
                f"rank {self.rank} exceeds the physical rank {physical_rank}",
            )
        d_in = len(self.a[0]) if self.a else 0
        return replace(
            self,
            a=self.a + [[Fraction(0)] * d_in for _ in range(extra)],
            b=[row + [Fraction(0)] * extra for row in self.b],
        )


ExactAdapter = Mapping[tuple[int, Module], ExactModule]


def dot(left: Sequence[Fraction], right: Sequence[Fraction]) -> Fraction:
    """Exact inner product."""
    return sum((a * b for a, b in zip(left, right, strict=True)), Fraction(0))


class ExactOps:
    """`AdapterOps` over lists of fractions. adapters: slot -> (layer, module) -> factors."""

    def __init__(self, plan: BatchPlan, adapters: Mapping[int, ExactAdapter], dims: ModuleDims) -> None:
        self._plan = plan
        self._adapters = adapters
        self._dims = dims
        self.active = bool(plan.group_rows.size)
        self.scales_input = any(m.h is not None for a in adapters.values() for m in a.values())

    def row_module(self, rows: RowSet, layer: int, module: Module) -> list[ExactModule | None]:
        """The module that each row of a row set runs, None for the base and for modules left alone."""
        slots = row_groups(self._plan, rows).adapters.tolist()
        return [None if s == BASE_SLOT else self._adapters[s].get((layer, module)) for s in slots]

    def shrink(self, x: Matrix, layer: int, module: Module, rows: RowSet = RowSet.ALL) -> Matrix:
        """Ragged Z: row i has as many values as its adapter's rank, none for base rows (0x06C)."""
        owners = self.row_module(rows, layer, module)
        return [[] if m is None else [dot(xi, ak) for ak in m.a] for xi, m in zip(x, owners, strict=True)]

    def delta(self, x: Matrix, layer: int, module: Module, rows: RowSet = RowSet.ALL) -> Matrix:
        """D: s Z B^T for each row, zero for base rows (0x02E)."""
        owners = self.row_module(rows, layer, module)
        d_out = self._dims.dims[module][1]
        return [
            [Fraction(0)] * d_out if m is None or not m.a else [m.scale * dot(zi, bj) for bj in m.b]
            for zi, m in zip(self.shrink(x, layer, module, rows), owners, strict=True)
        ]

    def scale_input(self, x: Matrix, layer: int, module: Module, rows: RowSet = RowSet.ALL) -> Matrix:
        """x * h for each row; x itself when no row has an h."""
        owners = self.row_module(rows, layer, module)
        if all(m is None or m.h is None for m in owners):
            return x
        return [
            xi if m is None or m.h is None else [v * h for v, h in zip(xi, m.h, strict=True)]
            for xi, m in zip(x, owners, strict=True)
        ]

    def apply(
        self, y: Matrix, x: Matrix, layer: int, modules: tuple[Module, ...], rows: RowSet = RowSet.ALL
    ) -> None:
        """See `AdapterOps.apply`; base rows of y stay the same objects."""
        lo = 0
        for module in modules:
            hi = lo + self._dims.dims[module][1]
            deltas = self.delta(x, layer, module, rows)
            for yi, di, m in zip(y, deltas, self.row_module(rows, layer, module), strict=True):
                if m is not None:
                    yi[lo:hi] = _finish(yi[lo:hi], di, m)
            lo = hi

    def embed(self, hidden: Matrix, tokens: Sequence[int]) -> None:
        """See `AdapterOps.embed`."""
        owners = self.row_module(RowSet.ALL, 0, Module.EMBED)
        for row, token, m in zip(hidden, tokens, owners, strict=True):
            if m is not None:
                z = [ak[token] for ak in m.a]
                d = [m.scale * dot(z, bj) for bj in m.b] if m.a else [Fraction(0)] * len(row)
                row[:] = _finish(row, d, m)


def _finish(y: Vector, delta: Vector, module: ExactModule) -> Vector:
    out = [a + b for a, b in zip(y, delta, strict=True)]
    if module.g is not None:
        out = [a * b for a, b in zip(out, module.g, strict=True)]
    if module.c is not None:
        out = [a + b for a, b in zip(out, module.c, strict=True)]
    return out


def read_adapter(adapter: ResidentAdapter, dims: ModuleDims) -> dict[tuple[int, Module], ExactModule]:
    """The exact value of every byte that a resident adapter owns: what the other families are measured
    against.
    """
    out: dict[tuple[int, Module], ExactModule] = {}
    for layer, module_id in np.argwhere(adapter.index >= 0).tolist():
        module = Module(module_id)
        resident = adapter.module(layer, module)
        if resident is None:
            continue
        d_in, d_out = dims.dims[module]
        shapes = {Factor.A: (resident.rank, d_in), Factor.B: (resident.rank, d_out), Factor.H: (1, d_in)}
        read = {f: _read(resident.pieces(f), shapes.get(f, (1, d_out))) for f in Factor}
        b = (
            [[row[j] for row in read[Factor.B]] for j in range(d_out)]
            if resident.rank
            else [[] for _ in range(d_out)]
        )
        vectors = {f: read[f][0] if resident.pieces(f) else None for f in (Factor.H, Factor.G, Factor.C)}
        out[layer, module] = ExactModule(
            read[Factor.A],
            b,
            Fraction(resident.scale),
            vectors[Factor.H],
            vectors[Factor.G],
            vectors[Factor.C],
        )
    return out


def _read(pieces: Sequence[FactorPiece], shape: tuple[int, int]) -> Matrix:
    out = [[Fraction(0)] * shape[1] for _ in range(shape[0])]
    for piece in pieces:
        values = piece.view.double().tolist()
        for r, row in enumerate(values):
            out[piece.rank_lo + r][piece.col_lo : piece.col_lo + piece.col_n] = [Fraction(v) for v in row]
    return out
