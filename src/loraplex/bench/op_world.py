"""Resident random adapters and plans over them for operator measurements: bytes in pages, as the runtime lays
them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from loraplex.ops.interface import ModuleDims
from loraplex.ops.table import AdapterTable
from loraplex.schedule.packing import Work, build_plan

PAGE_BYTES: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class Slots:
    """Adapters in slots 1 to n. a, b: [n][layers] of [rank, d_in] and [rank, d_out], views into the pool;
    scales [n].
    """

    table: AdapterTable
    a: list[list[torch.Tensor]]
    b: list[list[torch.Tensor]]
    scales: list[float]


def random_image(
    rank: int, dims: tuple[int, int], layers: int, dtype: torch.dtype, seed: int
) -> AdapterImage:
    """One adapter of a rank on one projection of every layer."""
    shapes = [ModuleShape(layer, Module.O, rank, *dims) for layer in range(layers)]
    extents, count = place(
        PageGeometry(Geometry.RANK_ROWS, dtype.itemsize, row_page_bytes=PAGE_BYTES), shapes
    )
    pages = np.zeros((count, PAGE_BYTES), dtype=np.uint8)
    generator = torch.Generator().manual_seed(seed)
    for e in extents:
        spread = dims[0] ** -0.5 if e.factor is Factor.A else 1.0
        values = torch.randn((e.rank_n, e.col_n), generator=generator) * spread
        data = values.to(dtype).view(torch.uint8).numpy().reshape(-1)
        pages[e.page, e.offset : e.offset + data.size] = data
    columns = [
        (e.layer, e.module, e.factor, e.rank_lo, e.rank_n, e.col_lo, e.col_n, e.page, e.offset)
        for e in extents
    ]
    return AdapterImage(
        key="",
        kernel_digest="",
        itemsize=dtype.itemsize,
        modules=np.array([(s.layer, s.module, s.rank, 0, 0) for s in shapes], dtype=np.int32),
        extents=np.array(columns, dtype=np.int32),
        pages=pages,
        checksums=page_checksum(pages),
    )


def resident(
    ranks: Sequence[int], dims: tuple[int, int], layers: int, dtype: torch.dtype, device: torch.device
) -> Slots:
    """One adapter for each rank, pages scattered; adapters of one rank share their values and differ in
    scale.
    """
    images = {rank: random_image(rank, dims, layers, dtype, rank) for rank in set(ranks)}
    total = sum(len(images[rank].pages) for rank in ranks)
    order = (np.random.default_rng(0).permutation(total) + 1).astype(np.int32)
    pool = torch.zeros((total + 1, PAGE_BYTES), dtype=torch.uint8, device=device)
    table = AdapterTable(pool, dtype, len(ranks) + 1, ModuleDims(layers, {Module.O: dims}))
    at, scales = 0, []
    for slot, rank in enumerate(ranks, start=1):
        image = images[rank]
        pages = order[at : at + len(image.pages)]
        at += len(image.pages)
        pool[torch.from_numpy(pages.astype(np.int64)).to(device)] = torch.from_numpy(image.pages).to(device)
        scales.append(float(np.float32(0.5 + slot / len(ranks))))
        modules = image.modules.copy()
        modules[:, 3] = np.float32(scales[-1]).view(np.int32)
        table.install(slot, _with_modules(image, modules), pages)
        table.publish(slot, 1)
    views = [
        [table.adapter(slot).module(layer, Module.O) for layer in range(layers)]
        for slot in range(1, len(ranks) + 1)
    ]
    a = [[_whole(m.pieces(Factor.A)) for m in row if m is not None] for row in views]
    b = [[_whole(m.pieces(Factor.B)) for m in row if m is not None] for row in views]
    return Slots(table, a, b, scales)


def plan_of(slots: Sequence[int]) -> BatchPlan:
    """A decode step of one request for each slot."""
    n = len(slots)
    zeros = np.zeros(n, dtype=np.int32)
    work = Work(
        slot=np.arange(n, dtype=np.int32),
        incarnation=zeros,
        adapter_slot=np.array(slots, dtype=np.int32),
        adapter_generation=zeros + 1,
        kv_start=zeros,
        rows=zeros + 1,
        frontier=zeros,
        decode=np.ones(n, dtype=np.bool_),
        samples=np.ones(n, dtype=np.bool_),
        logprobs=zeros - 1,
        prompt_logprobs=zeros - 1,
        tokens=zeros,
        targets=zeros - 1,
    )
    return build_plan(work, generation=1)


def _with_modules(image: AdapterImage, modules: np.ndarray) -> AdapterImage:
    return AdapterImage(
        key=image.key,
        kernel_digest=image.kernel_digest,
        itemsize=image.itemsize,
        modules=modules,
        extents=image.extents,
        pages=image.pages,
        checksums=image.checksums,
    )


def _whole(pieces: Sequence[object]) -> torch.Tensor:
    views = [piece.view for piece in pieces]  # type: ignore[attr-defined]
    return views[0] if len(views) == 1 else torch.cat(views)
