"""One captured launch pair serves every mix of adapters and ranks: bit for bit what eager launches give."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ops.factor_lists import ModuleFactors, write_slot

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from loraplex.ops import work_layout, worklist  # noqa: E402
from loraplex.ops.factor_table import FactorTable  # noqa: E402
from loraplex.ops.triton_lora import LoraStep, shrink_expand  # noqa: E402
from loraplex.ops.work_layout import GROUPS  # noqa: E402
from loraplex.ops.worklist import Phase  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ROWS, SLOTS, LAYERS, WIDTH = 32, 20, 2, 512
RANKS = [1, 4, 8, 15, 16, 17, 32, 40, 64]


def world() -> tuple[FactorTable, torch.Tensor]:
    """A poisoned pool of 20 adapters of mixed ranks on all seven modules, 512 by 512."""
    pool = torch.full((1 << 27,), 0xFF, dtype=torch.uint8, device=DEVICE)
    table = FactorTable(SLOTS + 1, LAYERS, [WIDTH] * 7, [WIDTH] * 7, 2, DEVICE)
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    at = 0
    for slot in range(1, SLOTS + 1):
        rank = RANKS[slot % len(RANKS)]
        entries = []
        for layer in range(LAYERS):
            for module in range(7):
                places = []
                for _ in range(2):
                    values = torch.randn(rank, WIDTH, device=DEVICE, generator=gen).to(torch.bfloat16)
                    pool[at : at + values.numel() * 2] = values.view(torch.uint8).view(-1)
                    places.append([(at, 0, rank)])
                    at += values.numel() * 2 + 64
                entries.append(ModuleFactors(layer, module, rank, 0.5, *places))
        write_slot(table, slot, entries)
    return table, pool


def lists(rng: np.random.Generator, table: FactorTable, step: LoraStep) -> worklist.WorkList:
    owners = rng.integers(0, SLOTS + 1, ROWS)
    owners[rng.random(ROWS) < rng.random()] = int(rng.integers(0, SLOTS + 1))
    rows = np.flatnonzero(owners).astype(np.int32)
    rows = rows[np.argsort(owners[rows], kind="stable")]
    slots, counts = np.unique(owners[rows], return_counts=True)
    offsets = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    return worklist.build(rows, offsets, slots.astype(np.int32), 0, table.max_ranks, step.room)


MIXES = 3000


def test_a_graph_replayed_over_thousands_of_mixes_equals_eager() -> None:
    """Every fused group of both layers in one graph; rows without adapter keep their bits."""
    table, pool = world()
    step, eager = (
        LoraStep(table, pool, torch.bfloat16, Phase.DECODE, rows=ROWS, max_rank=64) for _ in range(2)
    )
    x = torch.randn(ROWS, WIDTH, device=DEVICE).to(torch.bfloat16)
    widths = [(last - first) * WIDTH for first, last in GROUPS]
    before = [torch.randn(ROWS, width, device=DEVICE).to(torch.bfloat16) for width in widths]
    after = [y.clone() for y in before]
    rng = np.random.default_rng(1)
    step.prepare(lists(rng, table, step))

    def launches() -> None:
        step.fill()
        for group, (y, y0) in enumerate(zip(after, before, strict=True)):
            y.copy_(y0)
            for layer in range(LAYERS):
                shrink_expand(y, x, step, layer, group)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launches()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for _ in range(MIXES):
        work = lists(rng, table, step)
        step.send(torch.from_numpy(work.packed))
        step.z.fill_(float("nan"))
        graph.replay()
        eager.prepare(work)
        rows = rows_of(work)
        base = torch.tensor([row for row in range(ROWS) if row not in rows], dtype=torch.long, device=DEVICE)
        for group, (y, y0) in enumerate(zip(after, before, strict=True)):
            want = y0.clone()
            for layer in range(LAYERS):
                shrink_expand(want, x, eager, layer, group)
            assert torch.equal(y, want)
            assert not torch.isnan(y).any()
            assert torch.equal(y[base], y0[base])


def rows_of(work: worklist.WorkList) -> set[int]:
    """Rows that a decode work list names."""
    blocks = work.packed[work_layout.HEAD_WORDS :].reshape(-1, work_layout.BLOCK_WORDS)
    rows: set[int] = set()
    for block in blocks:
        listed = np.ascontiguousarray(block[work_layout.BLOCK_LISTED_AT :][: work_layout.LISTED_WORDS]).view(
            np.uint16
        )
        rows |= set(listed[: block[work_layout.BLOCK_COUNT_AT]].tolist())
    return rows
