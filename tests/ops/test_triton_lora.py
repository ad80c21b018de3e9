"""The Triton adapter branch against float64, in Triton's interpreter on the CPU and as it is on a GPU."""

from __future__ import annotations

import os

import pytest
from tests.ops.factor_lists import ModuleFactors, write_slot

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    assert os.environ["TRITON_INTERPRET"] == "1", "tests/conftest.py sets it before triton is imported"
pytest.importorskip("triton")

from tests.ops.lora_world import D_IN, D_OUT, DEVICE, LIMIT, OWNERS, SINGLE, SMALL, World, run  # noqa: E402

from loraplex.core.errors import InternalFault  # noqa: E402
from loraplex.ops.triton_lora import LoraStep, shrink_expand  # noqa: E402
from loraplex.ops.worklist import Phase  # noqa: E402

# The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

PAGE = 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tuning", [SMALL, SINGLE], ids=["loop", "single"])
def test_decode_rows_equal_float64(dtype, tuning) -> None:
    world = World({1: 8, 2: 16, 3: 1, 4: 33, 5: 17}, dtype)
    for error, kept in run(world, OWNERS, Phase.DECODE, 0, tuning, layers=(1,)):
        assert error < LIMIT[dtype]
        assert kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_rows_equal_float64(dtype) -> None:
    world = World({1: 8, 2: 16, 3: 1, 4: 33, 5: 17}, dtype, seed=1)
    owners = [1] * 21 + [0] * 3 + [2] * 16 + [1] * 2 + [4] * 5 + [3, 5, 1, 0]
    for error, kept in run(world, owners, Phase.PREFILL, 47, SMALL, groups=(0, 3)):
        assert error < LIMIT[dtype]
        assert kept


def test_phases_together_cover_a_mixed_batch() -> None:
    world = World({1: 8, 2: 16}, seed=2)
    owners = [1, 1, 2, 2, 2, 1, 0, 2]
    x, y = torch.randn(8, D_IN[0]).to(DEVICE), torch.randn(8, sum(D_OUT[:3])).to(DEVICE)
    want = world.reference(y, x, owners, 0, 0, range(8))
    for phase in Phase:
        step = LoraStep(
            world.table, world.pool, world.dtype, phase, rows=8, runs=8, max_rank=16, tuning=SMALL
        )
        step.prepare(world.work(owners, 5, step))
        shrink_expand(y, x, step, 0, 0)
    assert float((y.double().cpu() - want).norm() / want.norm()) < 1e-6


def test_factors_split_over_pages_are_read_in_place() -> None:
    world = World({1: 8, 2: 21, 3: 40}, seed=3, split=True)
    for error, kept in run(world, [1, 2, 3, 0, 3, 2], Phase.DECODE, 0, SMALL, layers=(1,)):
        assert error < 1e-6
        assert kept


def test_output_scale_and_bias_vectors() -> None:
    world = World({1: 8, 2: 0, 3: 20}, seed=4, vectors=True)
    for error, kept in run(world, [1, 2, 3, 0, 3, 2], Phase.DECODE, 0, SMALL, layers=(0,)):
        assert error < 1e-6
        assert kept


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    """Bitwise: alone, among the rows of its own adapter, among others, in another order."""
    world = World({1: 8, 2: 16, 3: 40}, torch.float16, seed=5)
    x = torch.randn(40, D_IN[0]).half().to(DEVICE)
    y = torch.randn(40, sum(D_OUT[:3])).half().to(DEVICE)

    def of(rows: list[int], owners: list[int]) -> torch.Tensor:
        step = LoraStep(
            world.table, world.pool, world.dtype, Phase.DECODE, rows=40, max_rank=64, tuning=SMALL
        )
        step.prepare(world.work(owners, 0, step))
        out = y[rows].clone()
        shrink_expand(out, x[rows].contiguous(), step, 1, 0)
        return out[0]

    alone = of([7], [3])
    assert torch.equal(alone, of([7, *range(8, 38)], [3] * 31))
    assert torch.equal(alone, of([7, 3, 2, 1], [3, 1, 2, 0]))
    assert not torch.equal(alone, of([7], [2]))


def test_one_pair_of_launches_serves_another_mix_without_new_buffers() -> None:
    """Stale records of the larger batch before it are never followed."""
    world = World({1: 40, 2: 16, 3: 8}, seed=6)
    step = LoraStep(world.table, world.pool, world.dtype, Phase.DECODE, rows=8, max_rank=64, tuning=SMALL)
    for owners in ([1, 2, 3, 1, 2, 3, 1, 2], [0, 0, 3, 0, 0, 0, 0, 0], [2, 2, 2, 2, 0, 0, 0, 1], [0] * 8):
        step.prepare(world.work(owners, 0, step))
        x, y = torch.randn(8, D_IN[4]).to(DEVICE), torch.randn(8, sum(D_OUT[4:6])).to(DEVICE)
        want = world.reference(y, x, owners, 1, 2, range(8))
        shrink_expand(y, x, step, 1, 2)
        assert float((y.double().cpu() - want).norm() / want.norm()) < 1e-6


def test_refusals() -> None:
    world = World({1: 8})
    with pytest.raises(InternalFault, match="extents cover"):
        write_slot(world.table, 1, [ModuleFactors(0, 0, 8, 1.0, [(0, 0, 7)], [(0, 0, 8)])])
    with pytest.raises(InternalFault, match="16-byte"):
        write_slot(world.table, 1, [ModuleFactors(0, 0, 8, 1.0, [(4, 0, 8)], [(0, 0, 8)])])
    with pytest.raises(InternalFault, match="rank must be"):
        write_slot(world.table, 1, [ModuleFactors(0, 0, 513, 1.0)])
    step = LoraStep(world.table, world.pool, world.dtype, Phase.DECODE, rows=2, max_rank=16, tuning=SMALL)
    with pytest.raises(InternalFault, match="there is room for"):
        step.prepare(world.work([1] * 40, 0, step))
    with pytest.raises(InternalFault, match="columns"):
        step.shrink(torch.zeros(2, 5).to(DEVICE), 0, 0)
