"""Adapter images, pools and plans for operator tests: random, exact in the model's dtype, poisoned everywhere
else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    vector_mask,
)
from loraplex.core.plan import BatchPlan
from loraplex.ops.interface import ModuleDims
from loraplex.ops.table import AdapterTable
from loraplex.schedule.packing import Work, build_plan

QKV = (Module.Q, Module.K, Module.V)
GATE_UP = (Module.GATE, Module.UP)


@dataclass
class Adapted:
    """One adapted module as float64 arrays. a [r, d_in], b [d_out, r]."""

    a: np.ndarray
    b: np.ndarray
    scale: float = 1.0
    vectors: Mapping[Factor, np.ndarray] = field(default_factory=dict)


Adapter = dict[tuple[int, Module], Adapted]


def to_bytes(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Bytes of `values` in a torch dtype, [rows, cols * itemsize]."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    return tensor.view(torch.uint8).numpy()


def make_image(adapter: Adapter, dtype: torch.dtype, page_bytes: int) -> AdapterImage:
    """The image of an adapter; bytes outside its extents are 0xFF."""
    shapes = [
        ModuleShape(layer, module, m.a.shape[0], m.a.shape[1], m.b.shape[0], tuple(m.vectors))
        for (layer, module), m in sorted(adapter.items())
    ]
    geometry = PageGeometry(Geometry.RANK_ROWS, dtype.itemsize, row_page_bytes=page_bytes)
    extents, count = place(geometry, shapes)
    pages = np.full((count, page_bytes), 0xFF, dtype=np.uint8)
    for e in extents:
        m = adapter[e.layer, e.module]
        whole = {Factor.A: m.a, Factor.B: m.b.T}.get(e.factor)
        rows = whole if whole is not None else m.vectors[e.factor][None, :]
        part = rows[e.rank_lo : e.rank_lo + e.rank_n, e.col_lo : e.col_lo + e.col_n]
        data = to_bytes(part, dtype if whole is not None else torch.float32).reshape(-1)
        pages[e.page, e.offset : e.offset + data.size] = data
    modules = np.array(
        [
            (
                s.layer,
                s.module,
                s.rank,
                np.float32(adapter[s.layer, s.module].scale).view(np.int32),
                vector_mask(s.vectors),
            )
            for s in shapes
        ],
        dtype=np.int32,
    )
    columns = [
        (e.layer, e.module, e.factor, e.rank_lo, e.rank_n, e.col_lo, e.col_n, e.page, e.offset)
        for e in extents
    ]
    return AdapterImage(
        key="a" * 64,
        kernel_digest="b" * 64,
        itemsize=dtype.itemsize,
        modules=modules,
        extents=np.array(columns, dtype=np.int32),
        pages=pages,
        checksums=page_checksum(pages),
    )


def round_to(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 values rounded to a dtype and widened again."""
    return torch.from_numpy(values).to(dtype).double().numpy()


def random_adapter(
    rng: np.random.Generator,
    dims: ModuleDims,
    dtype: torch.dtype,
    ranks: Sequence[int],
    modules: Sequence[Module],
    vectors: Sequence[Factor] = (),
) -> Adapter:
    """Random factors on `modules` of all layers, each with a rank drawn from `ranks`; 0 means
    vectors only.
    """
    out: Adapter = {}
    for layer in range(dims.layers):
        for module in modules:
            if module in (Module.LM_HEAD, Module.EMBED) and layer:
                continue
            d_in, d_out = dims.dims[module]
            rank = int(rng.choice(ranks))
            widths = {Factor.H: d_in, Factor.G: d_out, Factor.C: d_out}
            wanted = [f for f in vectors if module is not Module.EMBED or f is not Factor.H]
            if rank == 0 and not wanted:
                continue
            out[layer, module] = Adapted(
                round_to(rng.standard_normal((rank, d_in)) / np.sqrt(d_in), dtype),
                round_to(rng.standard_normal((d_out, rank)), dtype),
                float(np.float32(rng.uniform(0.25, 2.0))),
                {f: round_to(rng.standard_normal(widths[f]) + 1.0, torch.float32) for f in wanted},
            )
    return out


@dataclass
class World:
    """A poisoned pool, its table, and the adapters in its slots."""

    table: AdapterTable
    adapters: dict[int, Adapter]
    dims: ModuleDims


def holds_image(table: AdapterTable, image: AdapterImage, page_ids: Sequence[int] | np.ndarray) -> bool:
    """Whether the device's bytes of all pages equal the image's; waits for the device."""
    return bool(np.array_equal(table.checksums(page_ids).cpu().numpy(), image.checksums))


def make_world(
    rng: np.random.Generator,
    adapters: Sequence[Adapter],
    dims: ModuleDims,
    dtype: torch.dtype,
    page_bytes: int,
    device: str = "cpu",
) -> World:
    """Adapter i in slot i + 1 with generation 10 + i, pages scattered over a pool of 0xFF bytes."""
    images = [make_image(a, dtype, page_bytes) for a in adapters]
    total = sum(len(image.pages) for image in images)
    ids = rng.permutation(total + 3)[:total].astype(np.int32) + 1
    pool = torch.full((total + 5, page_bytes), 0xFF, dtype=torch.uint8, device=device)
    table = AdapterTable(pool, dtype, len(adapters) + 2, dims)
    taken = 0
    for slot, image in enumerate(images, start=1):
        pages = ids[taken : taken + len(image.pages)]
        taken += len(image.pages)
        for index, page in enumerate(pages.tolist()):
            table.copy_page(page, image, index)
        table.install(slot, image, pages)
        assert holds_image(table, image, pages)
        table.publish(slot, 9 + slot)
    return World(table, dict(enumerate(adapters, start=1)), dims)


def make_plan(
    prefills: Sequence[tuple[int, int]], decodes: Sequence[int], all_logits: bool = False
) -> BatchPlan:
    """A plan from the shipping planner. prefills: (adapter slot, rows); decodes: adapter slots."""
    slots = np.array([s for s, _ in prefills] + list(decodes), dtype=np.int32)
    rows = np.array([n for _, n in prefills] + [1] * len(decodes), dtype=np.int32)
    n, total = slots.size, int(rows.sum())
    decode = np.arange(n) >= len(prefills)
    zeros = np.zeros(n, dtype=np.int32)
    return build_plan(
        Work(
            slot=np.arange(n, dtype=np.int32),
            incarnation=zeros + 1,
            adapter_slot=slots,
            adapter_generation=np.where(slots > 0, slots + 9, 0).astype(np.int32),
            kv_start=np.where(decode, 7, 0).astype(np.int32),
            rows=rows,
            frontier=zeros,
            decode=decode,
            samples=np.ones(n, dtype=np.bool_),
            logprobs=zeros - 1,
            prompt_logprobs=zeros - 1 + all_logits,
            tokens=np.arange(total, dtype=np.int32) % 11,
            targets=np.full(total, 1 if all_logits else -1, dtype=np.int32),
        ),
        generation=1,
    )


def reference(
    world: World, slots: np.ndarray, y: np.ndarray, x: np.ndarray, layer: int, modules: Sequence[Module]
) -> tuple[np.ndarray, np.ndarray]:
    """The operator in float64, and for each element the error that one rounding of Z and of y allows.

    slots [n]; y [n, sum d_out]; x [n, d_in], all float64.
    """
    dtype = world.table.dtype
    eps = torch.finfo(dtype).eps / 2
    out, bound = y.copy(), np.zeros_like(y)
    lo = 0
    for module in modules:
        hi = lo + world.dims.dims[module][1]
        for row, slot in enumerate(slots.tolist()):
            m = world.adapters.get(slot, {}).get((layer, module))
            if m is None:
                continue
            z = m.a @ x[row]
            spread = np.abs(m.a) @ np.abs(x[row])
            value = y[row, lo:hi] + m.scale * (m.b @ z)
            g = np.asarray(m.vectors.get(Factor.G, 1.0))
            value = g * value + m.vectors.get(Factor.C, 0.0)
            z_error = eps * np.abs(z) + 1e-6 * spread
            scale = abs(m.scale)
            rounding = np.abs(g) * scale * (np.abs(m.b) @ z_error)
            sums = 1e-6 * np.abs(g) * (np.abs(y[row, lo:hi]) + scale * (np.abs(m.b) @ spread))
            out[row, lo:hi] = value
            bound[row, lo:hi] = 1.02 * (eps * np.abs(value) + rounding + sums) + 1e-6
        lo = hi
    return out, bound
