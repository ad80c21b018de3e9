"""0x02C to 0x02F, 0x06A to 0x06C: the specification's exact traces through the shipping planner and every
operator family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.exact import worked
from tests.ops.build import Adapted, make_image

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.plan import BatchPlan
from loraplex.ops.dispatch import FAMILIES
from loraplex.ops.exact import ExactModule, ExactOps, Matrix
from loraplex.ops.interface import ModuleDims
from loraplex.ops.ledger import branch_bytes, factor_bytes, iteration_ledger, rank_ledger
from loraplex.ops.stacked import StackedOps
from loraplex.ops.table import AdapterTable
from loraplex.schedule.packing import group_rows, run_boundaries

O = Module.O  # noqa: E741 - the module of both fixtures
DIMS_02 = ModuleDims(1, {O: (4, 3)})
DIMS_06 = ModuleDims(1, {O: (3, 2)})


def zeros(rows: int, columns: int) -> Matrix:
    return [[Fraction(0)] * columns for _ in range(rows)]


def decode_plan_02() -> BatchPlan:
    """The eight rows as decode requests: the planner makes adapters contiguous and records the inverse."""
    return worked.plan_of([(int(a), 1, True) for a in worked.ADAPTER_IDS_02])


def scheduler_order_plan_02() -> BatchPlan:
    """The same rows left in scheduler order: interleaved adapters, repeated pointers, indexed groups."""
    plan = decode_plan_02()
    requests = plan.requests[np.argsort(plan.requests.scheduler_index)]
    rows, offsets, slots = group_rows(worked.ADAPTER_IDS_02)
    segment_offsets, segment_adapters = run_boundaries(worked.ADAPTER_IDS_02)
    return dataclasses.replace(
        plan,
        requests=requests,
        group_rows=rows,
        group_offsets=offsets,
        group_adapters=slots,
        segment_offsets=segment_offsets,
        segment_adapters=segment_adapters,
    )


def table_of(factors: dict[int, ExactModule], dims: ModuleDims) -> AdapterTable:
    """The factors as float32 in a pool of 64-byte pages; every value of both fixtures is exact there."""
    table = AdapterTable(torch.full((20, 64), 0xFF, dtype=torch.uint8), torch.float32, 6, dims)
    page = 1
    for slot, m in factors.items():
        a, b = np.array(m.a, dtype=np.float64), np.array(m.b, dtype=np.float64)
        image = make_image({(0, O): Adapted(a, b, float(m.scale))}, torch.float32, 64)
        pages = list(range(page, page + len(image.pages)))
        page += len(image.pages)
        for index, own in enumerate(pages):
            table.copy_page(own, image, index)
        table.install(slot, image, pages)
        table.publish(slot, 1)
    return table


def tensor(rows: Matrix) -> torch.Tensor:
    return torch.tensor([[float(v) for v in row] for row in rows], dtype=torch.float32)


def exact(values: torch.Tensor) -> Matrix:
    return [[Fraction(v) for v in row] for row in values.double().tolist()]


def take(rows: Matrix, order: np.ndarray) -> Matrix:
    return [list(rows[i]) for i in order.tolist()]


def test_five_coordinates_and_both_encodings() -> None:
    plan = scheduler_order_plan_02()
    assert plan.group_rows.tolist() == [0, 2, 6, 1, 4, 5]
    assert plan.group_offsets.tolist() == [0, 3, 6]
    assert plan.group_adapters.tolist() == [1, 2]
    rows, ids, counts, starts = worked.with_sentinel(worked.ADAPTER_IDS_02)
    assert rows == [3, 7, 0, 2, 6, 1, 4, 5]
    assert (ids, counts, starts) == ([-1, 1, 2], [2, 3, 3], [0, 2, 5, 8])
    # Dropping the sentinel group of the second encoding gives the first.
    assert rows[counts[0] :] == plan.group_rows.tolist()
    # Rows 0, 2 and 6 share adapter 1, yet row 6 belongs to another request.
    assert [worked.OWNERS_02[r] for r in plan.group_rows[:3].tolist()] == ["req-a", "req-a", "req-e"]


def test_shrink_expand_and_scatter_in_fractions() -> None:
    plan = scheduler_order_plan_02()
    ops = ExactOps(plan, worked.one_module(worked.FACTORS_02), DIMS_02)
    g = plan.group_rows
    z, d = ops.shrink(worked.X_02, 0, O), ops.delta(worked.X_02, 0, O)
    assert take(z, g) == worked.Z_GROUPED_02
    assert take(d, g) == worked.D_GROUPED_02
    assert d == worked.DELTA_02
    assert z[3] == z[7] == []
    y = worked.matmul(worked.X_02, worked.W_02)
    ops.apply(y, worked.X_02, 0, (O,))
    assert y == worked.Y_02


@pytest.mark.parametrize("family", [*sorted(FAMILIES), "exact"])
@pytest.mark.parametrize("make_plan", [decode_plan_02, scheduler_order_plan_02])
def test_every_family_gives_the_printed_output_in_both_realizations(family: str, make_plan) -> None:  # type: ignore[no-untyped-def]
    plan = make_plan()
    order = plan.requests.scheduler_index
    x, y = take(worked.X_02, order), take(worked.matmul(worked.X_02, worked.W_02), order)
    if family == "exact":
        ExactOps(plan, worked.one_module(worked.FACTORS_02), DIMS_02).apply(y, x, 0, (O,))
    else:
        out = tensor(y)
        FAMILIES[family](plan, table_of(worked.FACTORS_02, DIMS_02)).apply(out, tensor(x), 0, (O,))
        y = exact(out)
    scattered = zeros(8, 3)
    for packed, scheduler in enumerate(order.tolist()):
        scattered[scheduler] = y[packed]
    assert scattered == worked.Y_02


@pytest.mark.parametrize("place", [lambda module: module, worked.scale_in_a, worked.scale_in_b])
def test_scale_placement_does_not_change_the_function(place: Callable[[ExactModule], ExactModule]) -> None:
    placed = {slot: place(m) for slot, m in worked.FACTORS_02.items()}
    plan = scheduler_order_plan_02()
    assert ExactOps(plan, worked.one_module(placed), DIMS_02).delta(worked.X_02, 0, O) == worked.DELTA_02
    assert (placed[2].scale == 1) == (place in (worked.scale_in_a, worked.scale_in_b))
    folded = [placed[2].a != worked.FACTORS_02[2].a, placed[2].b != worked.FACTORS_02[2].b]
    assert folded == [place is worked.scale_in_a, place is worked.scale_in_b]
    y = tensor(zeros(8, 3))
    FAMILIES["indexed"](plan, table_of(placed, DIMS_02)).apply(y, tensor(worked.X_02), 0, (O,))
    assert exact(y) == worked.DELTA_02


def plan_06(names: list[str]) -> tuple[BatchPlan, Matrix, list[str]]:
    """Plan, packed inputs, and the request of each packed row, for requests in this scheduler order."""
    plan = worked.plan_of([worked.REQUESTS_06[n] for n in names])
    packed = [names[i] for i in plan.requests.scheduler_index.tolist()]
    return plan, [row for n in packed for row in worked.X_06[n]], [n for n in packed for _ in worked.X_06[n]]


NAMES_06 = ["p0", "p1", "d0", "d1", "d2"]


def test_ragged_shrink_and_delta_in_fractions() -> None:
    plan, x, _ = plan_06(NAMES_06)
    assert plan.requests.scheduler_index.tolist() == [1, 0, 2, 3, 4]
    ops = ExactOps(plan, worked.one_module(worked.FACTORS_06), DIMS_06)
    assert ops.shrink(x, 0, O) == worked.fractions(worked.Z_06)
    assert ops.delta(x, 0, O) == worked.D_06


PATHS_06 = {
    "per-row exact rank": FAMILIES["bgmv"],
    "phase split": FAMILIES["torch_loop"],
    "rank buckets": FAMILIES["gather_bmm"],
    "maximum rank, zero padded": lambda plan, table: StackedOps(plan, table, physical_rank=3),
    "contiguous segments across doff": FAMILIES["segmented"],
    "indexed groups": FAMILIES["indexed"],
    "stacked at true rank": FAMILIES["stacked"],
}


@pytest.mark.parametrize("path", list(PATHS_06))
def test_all_four_paths_and_ours_give_the_printed_delta(path: str) -> None:
    plan, x, _ = plan_06(NAMES_06)
    y = tensor(zeros(8, 2))
    PATHS_06[path](plan, table_of(worked.FACTORS_06, DIMS_06)).apply(y, tensor(x), 0, (O,))
    assert exact(y) == worked.D_06


@pytest.mark.parametrize("path", list(PATHS_06))
@pytest.mark.parametrize("names", [["p1", "p0", "d0", "d1", "d2"], ["d2", "p0", "d1", "p1", "d0"]], ids=str)
def test_reordered_requests_keep_their_rows(path: str, names: list[str]) -> None:
    plan, x, owners = plan_06(names)
    y = tensor(zeros(8, 2))
    PATHS_06[path](plan, table_of(worked.FACTORS_06, DIMS_06)).apply(y, tensor(x), 0, (O,))
    by_request: dict[str, Matrix] = {}
    for owner, row in zip(owners, exact(y), strict=True):
        by_request.setdefault(owner, []).append(row)
    assert by_request == {
        "p1": worked.D_06[:2],
        "p0": worked.D_06[2:5],
        "d0": worked.D_06[5:6],
        "d1": worked.D_06[6:7],
        "d2": worked.D_06[7:],
    }


def test_padding_is_exact_and_refuses_a_rank_that_does_not_fit() -> None:
    plan, x, _ = plan_06(NAMES_06)
    padded = {slot: m.padded(3) for slot, m in worked.FACTORS_06.items()}
    assert ExactOps(plan, worked.one_module(padded), DIMS_06).delta(x, 0, O) == worked.D_06
    for refused in (
        lambda: worked.FACTORS_06[worked.B].padded(2),
        lambda: StackedOps(plan, table_of(worked.FACTORS_06, DIMS_06), physical_rank=2),
    ):
        with pytest.raises(InternalFault) as caught:
            refused()
        assert caught.value.code is ErrorCode.OPERATOR_RANK_UNSUPPORTED


def test_true_and_padded_ledgers() -> None:
    plan, _, _ = plan_06(NAMES_06)
    ranks = np.array([0, *(worked.FACTORS_06[s].rank for s in (1, 2, 3))], dtype=np.int32)[plan.row_adapters]
    assert ranks.tolist() == [3, 3, 2, 2, 2, 2, 0, 1]
    padded = rank_ledger(ranks, 3, 2, physical_rank=3)
    assert (padded.active_rows, padded.true_rank_rows, padded.executed_rank_rows) == (7, 15, 21)
    assert (padded.true_flops, padded.executed_flops) == (150, 210)
    assert padded.padding_ratio == Fraction(7, 5)
    assert padded.wasted_rank_rows == 6
    true = rank_ledger(ranks, 3, 2)
    assert (true.executed_flops, true.padding_ratio, true.wasted_rank_rows) == (150, 1, 0)


def test_fragmentation_is_conditional_on_the_phase() -> None:
    plan, _, _ = plan_06(NAMES_06)
    ledger = iteration_ledger(
        plan, np.array([0, *(worked.FACTORS_06[s].rank for s in (1, 2, 3))], dtype=np.int32)
    )
    assert (ledger.prefill.rows, ledger.prefill.requests, ledger.prefill.adapters) == (5, 2, 2)
    assert (ledger.decode.rows, ledger.decode.requests, ledger.decode.adapters) == (2, 2, 2)
    assert ledger.all.concentration == Fraction(4, 7)
    assert (ledger.prefill.concentration, ledger.decode.concentration) == (Fraction(3, 5), Fraction(1, 2))
    assert (ledger.runs_before, ledger.runs_after) == (5, 4)
    a, b, c = worked.A, worked.B, worked.C
    assert ledger.prefill.by_adapter == {a: (3, 1), b: (2, 1)}
    assert ledger.decode.by_adapter == {a: (1, 1), c: (1, 1)}
    assert ledger.all.by_adapter == {a: (4, 2), b: (2, 1), c: (1, 1)}
    assert (ledger.prefill.ranks, ledger.decode.ranks) == ({2: 3, 3: 2}, {2: 1, 1: 1})
    assert sum(rank * rows for rank, rows in ledger.all.ranks.items()) == 15


def test_bytes_of_the_branch_are_each_factor_once_and_each_row() -> None:
    ranks = {slot: m.rank for slot, m in worked.FACTORS_06.items()}
    assert factor_bytes(ranks, 3, 2, 4) == (2 + 3 + 1) * 5 * 4
    assert branch_bytes(ranks, 7, 3, 2, 4) == 120 + 7 * (3 + 2 * 2) * 4
