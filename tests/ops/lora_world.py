"""Adapters in a poisoned pool for the Triton kernels, and their results in float64."""

from __future__ import annotations

import numpy as np
import torch
from tests.ops.factor_lists import ModuleFactors, write_slot

from loraplex.ops import worklist
from loraplex.ops.factor_table import FactorTable
from loraplex.ops.triton_lora import LoraStep, Tuning, shrink_expand
from loraplex.ops.work_layout import GROUPS
from loraplex.ops.worklist import Phase

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LAYERS = 2
D_IN = (64, 64, 64, 48, 64, 64, 96)
D_OUT = (48, 16, 16, 64, 96, 96, 64)
SMALL = Tuning(
    block_rows=16,
    splits=4,
    chunk_floor=16,
    max_bk=16,
    bn=32,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=3,
    expand_ctas=3,
)
SINGLE = Tuning(
    block_rows=16,
    splits=2,
    chunk_floor=16,
    max_bk=64,
    bn=64,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=2,
    expand_ctas=2,
)


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
            write_slot(self.table, slot, made)

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
            a.double(),
            b.double(),
            scale,
            g.double() if has_g else None,
            c.double() if has_c else None,
        )
        return ModuleFactors(
            layer,
            module,
            rank,
            scale,
            self._put(a, per),
            self._put(b, per),
            g=self._put(g[None], 1)[0][0] if has_g else -1,
            c=self._put(c[None], 1)[0][0] if has_c else -1,
        )

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
