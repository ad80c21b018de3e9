"""The specification's two worked adapter batches, as inputs for every operator family.

The specification gives, for 0x02E, factors, grouped inputs, Z, D and Y; W and the base-only inputs follow
from Y and are listed here as ours. For 0x06C it prints Z and D only; factors, scales and inputs here are ours
and give every printed value exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from loraplex.core.ids import Module
from loraplex.core.plan import BatchPlan
from loraplex.ops.exact import ExactAdapter, ExactModule, Matrix
from loraplex.schedule.packing import Work, build_plan, group_rows

HALF = Fraction(1, 2)


def fractions(rows: Sequence[Sequence[int | Fraction]]) -> Matrix:
    return [[Fraction(v) for v in row] for row in rows]


def module(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]], scale: Fraction) -> ExactModule:
    return ExactModule(fractions(a), fractions(b), scale)


# 0x02E: N = 8, d_in = 4, r = 2, d_out = 3.
ADAPTER_IDS_02 = np.array([1, 2, 1, 0, 2, 2, 1, 0], dtype=np.int32)
OWNERS_02 = ["req-a", "req-b", "req-a", "req-c", "req-b", "req-d", "req-e", "req-c"]
FACTORS_02 = {
    1: module([[1, 0, 1, 0], [0, 1, 0, 1]], [[1, 0], [0, 1], [1, 1]], HALF),
    2: module([[1, 1, 0, 0], [0, 0, 1, 1]], [[1, 1], [1, -1], [0, 1]], Fraction(2)),
}
X_02 = fractions(
    [
        [1, 0, 1, 0],
        [0, 1, 0, 1],
        [1, 1, 0, 0],
        [2, 0, 0, 1],
        [0, 1, 1, 0],
        [1, 0, 0, 1],
        [1, 1, 1, 1],
        [0, 0, 2, 1],
    ]
)  # rows 3 and 7 are ours
W_02 = fractions([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]])  # ours: the only W that gives the printed Y
Z_GROUPED_02 = fractions([[2, 0], [1, 1], [2, 2], [1, 1], [1, 1], [1, 1]])
D_GROUPED_02 = fractions([[1, 0, 1], [HALF, HALF, 1], [1, 1, 2], [4, 0, 2], [4, 0, 2], [4, 0, 2]])
DELTA_02 = fractions(
    [[1, 0, 1], [4, 0, 2], [HALF, HALF, 1], [0, 0, 0], [4, 0, 2], [4, 0, 2], [1, 1, 2], [0, 0, 0]]
)
Y_02 = fractions(
    [[2, 1, 2], [5, 1, 3], [3 * HALF, 3 * HALF, 3], [3, 0, 2], [4, 2, 3], [6, 0, 3], [3, 3, 4], [1, 2, 0]]
)

# 0x06C over the packed rows of 0x03B: d_in = 3, d_out = 2; slots a = 1, b = 2, c = 3 with ranks 2, 3, 1.
A, B, C = 1, 2, 3
FACTORS_06 = {
    A: module([[1, 0, 1], [0, 1, -1]], [[1, 2], [-1, 1]], HALF),
    B: module([[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 0, 1], [0, 1, -1]], Fraction(1)),
    C: module([[1, 1, -1]], [[2], [1]], Fraction(2)),
}
X_06 = {
    "p1": fractions([[1, 2, -1], [2, 1, 1]]),
    "p0": fractions([[1, 0, 1], [0, 2, 1], [2, 1, 0]]),
    "d0": fractions([[1, -1, 2]]),
    "d1": fractions([[5, 6, 7]]),
    "d2": fractions([[1, 1, 1]]),
}
Z_06 = [[1, 2, -1], [2, 1, 1], [2, -1], [1, 1], [2, 1], [3, -3], [], [1]]
D_06 = fractions([[0, 3], [3, 0], [0, -3 * HALF], [3 * HALF, 0], [2, -HALF], [-3 * HALF, -3], [0, 0], [4, 2]])
REQUESTS_06 = {
    "p0": (A, 3, False),
    "p1": (B, 2, False),
    "d0": (A, 1, True),
    "d1": (0, 1, True),
    "d2": (C, 1, True),
}


def one_module(factors: dict[int, ExactModule]) -> dict[int, ExactAdapter]:
    """The factors as adapters of the output projection of layer 0."""
    return {slot: {(0, Module.O): m} for slot, m in factors.items()}


def plan_of(requests: Sequence[tuple[int, int, bool]]) -> BatchPlan:
    """The shipping planner over (adapter slot, rows, is decode) in scheduler order."""
    slots = np.array([r[0] for r in requests], dtype=np.int32)
    rows = np.array([r[1] for r in requests], dtype=np.int32)
    n, total = len(requests), int(rows.sum())
    zeros = np.zeros(n, dtype=np.int32)
    return build_plan(
        Work(
            slot=np.arange(n, dtype=np.int32),
            incarnation=zeros + 1,
            adapter_slot=slots,
            adapter_generation=(slots > 0).astype(np.int32),
            kv_start=zeros,
            rows=rows,
            frontier=zeros,
            decode=np.array([r[2] for r in requests]),
            samples=np.ones(n, dtype=np.bool_),
            logprobs=zeros - 1,
            prompt_logprobs=zeros - 1,
            tokens=np.arange(total, dtype=np.int32),
            targets=np.full(total, -1, dtype=np.int32),
        ),
        generation=1,
    )


def matmul(x: Matrix, w: Matrix) -> Matrix:
    """x W^T."""
    return [[sum((a * b for a, b in zip(row, out, strict=True)), Fraction(0)) for out in w] for row in x]


def with_sentinel(row_adapters: np.ndarray) -> tuple[list[int], list[int], list[int], list[int]]:
    """0x02D's second encoding of the shipped grouping: base rows lead as a group with id -1. Rows, ids,
    counts, starts.
    """
    rows, offsets, adapters = group_rows(row_adapters)
    base = np.flatnonzero(row_adapters == 0)
    starts = np.concatenate([[0], offsets + base.size])
    return (
        [*base.tolist(), *rows.tolist()],
        [-1, *adapters.tolist()],
        np.diff(starts).tolist(),
        starts.tolist(),
    )


def scale_in_a(module: ExactModule) -> ExactModule:
    """0x02F: the same operator with its scale folded into A."""
    return replace(module, a=[[module.scale * v for v in row] for row in module.a], scale=Fraction(1))


def scale_in_b(module: ExactModule) -> ExactModule:
    """0x02F: the same operator with its scale folded into B."""
    return replace(module, b=[[module.scale * v for v in row] for row in module.b], scale=Fraction(1))
