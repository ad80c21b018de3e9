"""What the adapter branch adds to the dense projections of a model on CPU, family by family.

`python -m loraplex.bench.cpu_operators [--dtype bfloat16] [--ranks 8] [--families cpu_kernel,segmented] [--json F]`
runs every projection of SmolLM2-135M's shapes (30 layers) with random weights, then the operators over the same inputs,
in turn; it prints medians of one step in milliseconds and as ratios to the projections. The byte ratio of the last line
is what moving all factors at the projections' speed would cost. Owns no operator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from loraplex.core.ids import Module
from loraplex.core.layout import (
    AdapterImage,
    Factor,
    Geometry,
    ModuleShape,
    PageGeometry,
    page_checksum,
    place,
)
from loraplex.core.plan import BatchPlan
from loraplex.ops.dispatch import make_operator, warm_up
from loraplex.ops.interface import ModuleDims
from loraplex.ops.table import AdapterTable
from loraplex.schedule.packing import Work, build_plan

HIDDEN, KV, INNER, LAYERS = 576, 192, 1536, 30
DIMS: Final = ModuleDims(
    LAYERS,
    {
        Module.Q: (HIDDEN, HIDDEN), Module.K: (HIDDEN, KV), Module.V: (HIDDEN, KV), Module.O: (HIDDEN, HIDDEN),
        Module.GATE: (HIDDEN, INNER), Module.UP: (HIDDEN, INNER), Module.DOWN: (INNER, HIDDEN),
    },
)  # fmt: skip
CALLS: Final = ((Module.Q, Module.K, Module.V), (Module.O,), (Module.GATE, Module.UP), (Module.DOWN,))
PAGE_BYTES: Final = 184_320
ADAPTERS: Final = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: medians in milliseconds of a step's projections and of its adapter branch."""

    batch: str
    family: str
    projections_ms: float
    adapters_ms: float

    @property
    def ratio(self) -> float:
        """Adapter branch over projections."""
        return self.adapters_ms / self.projections_ms


def random_image(rng: np.random.Generator, rank: int, dtype: torch.dtype) -> AdapterImage:
    """An adapter of one rank on all linears of all layers, with random factors."""
    shapes = [ModuleShape(layer, m, rank, *DIMS.dims[m]) for layer in range(LAYERS) for m in DIMS.dims]
    extents, count = place(
        PageGeometry(Geometry.RANK_ROWS, dtype.itemsize, row_page_bytes=PAGE_BYTES), shapes
    )
    pages = np.zeros((count, PAGE_BYTES), dtype=np.uint8)
    for e in extents:
        values = rng.standard_normal((e.rank_n, e.col_n)) / (24.0 if e.factor is Factor.A else 1.0)
        data = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy().reshape(-1)
        pages[e.page, e.offset : e.offset + data.size] = data
    columns = [
        (e.layer, e.module, e.factor, e.rank_lo, e.rank_n, e.col_lo, e.col_n, e.page, e.offset)
        for e in extents
    ]
    scale = int(np.float32(1.0).view(np.int32))
    return AdapterImage(
        key="",
        kernel_digest="",
        itemsize=dtype.itemsize,
        modules=np.array([(s.layer, s.module, s.rank, scale, 0) for s in shapes], dtype=np.int32),
        extents=np.array(columns, dtype=np.int32),
        pages=pages,
        checksums=page_checksum(pages),
    )


def resident_table(ranks: Sequence[int], dtype: torch.dtype) -> AdapterTable:
    """Eight resident adapters in slots 1 to 8, ranks in turn."""
    rng = np.random.default_rng(0)
    images = [random_image(rng, ranks[i % len(ranks)], dtype) for i in range(ADAPTERS)]
    pool = torch.zeros((1 + sum(len(i.pages) for i in images), PAGE_BYTES), dtype=torch.uint8)
    table = AdapterTable(pool, dtype, ADAPTERS + 1, DIMS)
    page = 1
    for slot, image in enumerate(images, start=1):
        ids = np.arange(page, page + len(image.pages), dtype=np.int32)
        page += len(image.pages)
        for own, source in zip(ids.tolist(), image.pages, strict=True):
            table.copy_page(own, source)
        table.install(slot, image, ids)
        table.publish(slot, 1)
    return table


def plan_of(slots: Sequence[int], rows: int) -> BatchPlan:
    """Requests with these adapters, `rows` rows each: a decode step where that is 1."""
    n = len(slots)
    zeros = np.zeros(n, dtype=np.int32)
    work = Work(
        slot=np.arange(n, dtype=np.int32), incarnation=zeros, adapter_slot=np.array(slots, dtype=np.int32),
        adapter_generation=zeros + 1, kv_start=zeros, rows=zeros + rows, frontier=zeros,
        decode=np.full(n, rows == 1), samples=np.ones(n, dtype=np.bool_), logprobs=zeros - 1,
        prompt_logprobs=zeros - 1, tokens=np.zeros(n * rows, dtype=np.int32),
        targets=np.full(n * rows, -1, dtype=np.int32),
    )  # fmt: skip
    return build_plan(work, generation=1)


def median_ms(step: Callable[[], None], repeats: int) -> float:
    """Median time of a step after one that warms up."""
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def measure(dtype: torch.dtype, ranks: Sequence[int], families: Sequence[str], repeats: int) -> list[Row]:
    """All batches and families, projections measured anew beside each."""
    table = resident_table(ranks, dtype)
    weights = [
        [(torch.randn(sum(DIMS.dims[m][1] for m in c), DIMS.dims[c[0]][0]) * 0.02).to(dtype) for c in CALLS]
        for _ in range(LAYERS)
    ]
    everyone = list(range(1, ADAPTERS + 1))
    plans = {
        "decode, 8 requests, 8 adapters": plan_of(everyone, 1),
        "decode, 8 requests, 1 adapter": plan_of([1] * 8, 1),
        "decode, 1 request": plan_of([1], 1),
        "prefill, 512 rows, 8 adapters": plan_of(everyone, 64),
        "prefill, 512 rows, 1 adapter": plan_of([1], 512),
    }
    out = []
    for batch, plan in plans.items():
        x = {d: torch.randn(plan.rows, d).to(dtype) for d in (HIDDEN, INNER)}
        y = [torch.zeros(plan.rows, w.shape[0], dtype=dtype) for w in weights[0]]

        def project(x: dict[int, torch.Tensor] = x) -> None:
            for layer in weights:
                for w in layer:
                    torch.nn.functional.linear(x[w.shape[1]], w)

        for family in families:

            def adapt(
                plan: BatchPlan = plan,
                x: dict[int, torch.Tensor] = x,
                y: list[torch.Tensor] = y,
                family: str = family,
            ) -> None:
                ops = make_operator(plan, table, family)
                for layer in range(LAYERS):
                    for call, out_ in zip(CALLS, y, strict=True):
                        ops.apply(out_, x[DIMS.dims[call[0]][0]], layer, call)

            out.append(Row(batch, family, median_ms(project, repeats), median_ms(adapt, repeats)))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """The command of the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--ranks", default="8")
    parser.add_argument(
        "--families", default="cpu_kernel,segmented,indexed,gather_bmm,bgmv,stacked,torch_loop"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    dtype, ranks = getattr(torch, args.dtype), [int(r) for r in args.ranks.split(",")]
    print(f"{warm_up(torch.device('cpu'))}; {torch.get_num_threads()} threads, {args.dtype}, ranks {ranks}")
    with torch.inference_mode():
        rows = measure(dtype, ranks, args.families.split(","), args.repeats)
    for row in rows:
        print(f"{row.batch:32s} {row.family:11s} {row.adapters_ms:8.2f} ms  {row.ratio:6.3f} x projections")
    linear = sum(a * b for a, b in DIMS.dims.values())
    factors = sum(sum(DIMS.dims[m]) for m in DIMS.dims) * sum(ranks[i % len(ranks)] for i in range(ADAPTERS))
    print(f"bytes of 8 adapters over bytes of the projections: {factors / linear:.3f}")
    if args.json:
        args.json.write_text(
            json.dumps([{**asdict(r), "ratio": r.ratio} for r in rows], indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
