"""The Triton adapter branch against float64, in Triton's interpreter on the CPU and as it is on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tests.ops.factor_lists import ModuleFactors, as_factors

torch = pytest.importorskip("torch")
GPU = torch.cuda.is_available()
if not GPU:
    assert os.environ["TRITON_INTERPRET"] == "1", "tests/conftest.py sets it before triton is imported"
pytest.importorskip("triton")

from loraplex.core.errors import InternalFault  # noqa: E402
from loraplex.ops import worklist  # noqa: E402
from loraplex.ops.factor_table import FactorTable  # noqa: E402
from loraplex.ops.triton_lora import LoraStep, Tuning, shrink_expand  # noqa: E402
from loraplex.ops.worklist import GROUPS, Phase  # noqa: E402

# The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

DEVICE = torch.device("cuda" if GPU else "cpu")
LAYERS = 2
D_IN = (64, 64, 64, 48, 64, 64, 96)
D_OUT = (48, 16, 16, 64, 96, 96, 64)
SMALL = Tuning(
    block_rows=16, splits=4, chunk_floor=16, max_bk=16, bn=32, shrink_warps=1, expand_warps=1, shrink_ctas=3,
    expand_ctas=3,
)  # fmt: skip
SINGLE = Tuning(
    block_rows=16, splits=2, chunk_floor=16, max_bk=64, bn=64, shrink_warps=1, expand_warps=1, shrink_ctas=2,
    expand_ctas=2,
)  # fmt: skip
PAGE = 1024


class World:
    """A poisoned pool with adapters in it, and the same factors in float64."""

    def __init__(
        self, ranks: dict[int, int], dtype=torch.float32, seed: int = 0, split: bool = False, vectors=False
    ):
        self.dtype = dtype
        self.rng = np.random.default_rng(seed)
        self.pool = torch.full((1 << 21,), 0xFF, dtype=torch.uint8)
        self.at = 64
        self.table = FactorTable(max(ranks) + 1, LAYERS, D_IN, D_OUT, dtype.itemsize, DEVICE)
        self.factors: dict[tuple[int, int, int], tuple] = {}
        entries: dict[int, list[ModuleFactors]] = {}
        for slot, rank in ranks.items():
            entries[slot] = [
                self._entry(slot, layer, module, rank, split, vectors)
                for layer in range(LAYERS)
                for module in range(7)
                if (slot + module + layer) % 5 != 4
            ]
        self.pool = self.pool.to(DEVICE)
        for slot, made in entries.items():
            self.table.write(slot, as_factors(made))

    def _put(self, values: torch.Tensor, rows_per_extent: int) -> list[tuple[int, int, int]]:
        extents = []
        for lo in range(0, values.shape[0], rows_per_extent):
            part = values[lo : lo + rows_per_extent].contiguous().view(torch.uint8).view(-1)
            self.pool[self.at : self.at + part.numel()] = part
            extents.append((self.at, lo, min(rows_per_extent, values.shape[0] - lo)))
            self.at += -(-part.numel() // 16) * 16 + 16
        return extents

    def _entry(self, slot, layer, module, rank, split, vectors) -> ModuleFactors:
        rank = max(0, rank - layer) if module == 1 else rank  # ranks may differ by layer
        a = torch.from_numpy(self.rng.standard_normal((rank, D_IN[module]))).to(self.dtype)
        b = torch.from_numpy(self.rng.standard_normal((rank, D_OUT[module]))).to(self.dtype)
        scale = float(np.float32(self.rng.uniform(0.25, 2)))
        g = torch.from_numpy(self.rng.standard_normal(D_OUT[module])).float()
        c = torch.from_numpy(self.rng.standard_normal(D_OUT[module])).float()
        per = 5 if split else 1 << 20
        has_g, has_c = vectors and (slot + module) % 3 != 0, vectors and (slot + module) % 2 == 0
        self.factors[slot, layer, module] = (
            a.double(), b.double(), scale, g.double() if has_g else None, c.double() if has_c else None,
        )  # fmt: skip
        return ModuleFactors(
            layer, module, rank, scale, self._put(a, per), self._put(b, per),
            g=self._put(g[None], 1)[0][0] if has_g else -1, c=self._put(c[None], 1)[0][0] if has_c else -1,
        )  # fmt: skip

    def work(self, owners: list[int], doff: int, step: LoraStep) -> worklist.WorkList:
        return make_work(owners, doff, self.table, step)

    def reference(self, y, x, owners, layer: int, group: int, rows) -> torch.Tensor:
        out = y.double().cpu().clone()
        for row in rows:
            column = 0
            for module in range(*GROUPS[group]):
                cut = slice(column, column + D_OUT[module])
                column += D_OUT[module]
                found = self.factors.get((owners[row], layer, module))
                if found is None:
                    continue
                a, b, scale, g, c = found
                z = (x[row].double().cpu() @ a.T).to(self.dtype).double()
                value = out[row, cut] + scale * (z @ b)
                value = value if g is None else value * g
                out[row, cut] = value if c is None else value + c
        return out


def make_work(owners: list[int], doff: int, table: FactorTable, step: LoraStep) -> worklist.WorkList:
    owner = np.array(owners, dtype=np.int32)
    rows = np.flatnonzero(owner).astype(np.int32)
    rows = rows[np.argsort(owner[rows], kind="stable")]
    slots, counts = np.unique(owner[rows], return_counts=True)
    offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    return worklist.build(rows, offsets, slots.astype(np.int32), doff, table.max_ranks, step.room)


def run(
    world: World,
    owners: list[int],
    phase: Phase,
    doff: int,
    tuning: Tuning,
    groups=range(4),
    layers=range(LAYERS),
):
    """Every (layer, group): (relative error, whether rows outside the phase kept their bits)."""
    step = LoraStep(
        world.table,
        world.pool,
        world.dtype,
        phase,
        rows=len(owners),
        runs=len(owners),
        max_rank=64,
        tuning=tuning,
    )
    step.prepare(world.work(owners, doff, step))
    mine = [r for r, o in enumerate(owners) if o and ((r >= doff) == (phase is Phase.DECODE))]
    others = [r for r in range(len(owners)) if r not in mine]
    gen = torch.Generator().manual_seed(len(owners))
    found = []
    for layer in layers:
        for group in groups:
            first, last = GROUPS[group]
            x = torch.randn(len(owners), D_IN[first], generator=gen).to(world.dtype).to(DEVICE)
            y = torch.randn(len(owners), sum(D_OUT[first:last]), generator=gen).to(world.dtype).to(DEVICE)
            before = y.clone()
            want = world.reference(y, x, owners, layer, group, mine)
            shrink_expand(y, x, step, layer, group)
            error = float((y.double().cpu() - want).norm() / want.norm())
            found.append((error, torch.equal(before[others], y[others])))
    return found


# The interpreter truncates to bfloat16 where a GPU rounds.
LIMIT = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3 if GPU else 1.2e-2}
OWNERS = [0, 1, 2, 1, 3, 0, 2, 2, 4, 1, 5, 3, 0, 1]


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
        world.table.write(1, as_factors([ModuleFactors(0, 0, 8, 1.0, [(0, 0, 7)], [(0, 0, 8)])]))
    with pytest.raises(InternalFault, match="16-byte"):
        world.table.write(1, as_factors([ModuleFactors(0, 0, 8, 1.0, [(4, 0, 8)], [(0, 0, 8)])]))
    with pytest.raises(InternalFault, match="rank must be"):
        world.table.write(1, as_factors([ModuleFactors(0, 0, 513, 1.0)]))
    step = LoraStep(world.table, world.pool, world.dtype, Phase.DECODE, rows=2, max_rank=16, tuning=SMALL)
    with pytest.raises(InternalFault, match="there is room for"):
        step.prepare(world.work([1] * 40, 0, step))
    with pytest.raises(InternalFault, match="columns"):
        step.shrink(torch.zeros(2, 5).to(DEVICE), 0, 0)
