"""What the device mirror holds for one adapter: addresses, ranks, scales and vectors of its decoder-layer
modules.

Worked out from the adapter's extents in a few passes over whole arrays, because it happens on the step's own
thread while requests run: an adapter of 224 modules takes a fraction of a millisecond. Reads no factor byte.

Specification: 0x06E (ranks against extents); rulings "One page pool".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.layout import EXTENT_ALIGN_BYTES, VECTOR_ITEMSIZE, Factor
from loraplex.core.limits import MAX_RANK
from loraplex.ops.table import ResidentAdapter
from loraplex.ops.work_layout import HAS_C, HAS_G, HAS_H, MODULES

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

SIDES: Final = (Factor.A, Factor.B)
VECTORS: Final = (Factor.G, Factor.C, Factor.H)
AT, RANK_LO, RANK_N = range(3)


@dataclass(frozen=True, slots=True)
class Factors:
    """Adapted modules of decoder layers, n of them, and where their bytes are.

    layers, modules (0 to 6), ranks: int64 [n]. scales: float32 [n]. counts: int64 [n, 2], extents of A and of
    B. extents: int64 [counts.sum(), 3], byte offset in the pool, first rank, ranks; module after module, A
    before B, in order of rank. vectors: int64 [n, 3], byte offsets of g, c and h, -1 where there is none.
    """

    layers: I64
    modules: I64
    ranks: I64
    scales: npt.NDArray[np.float32]
    counts: I64
    extents: I64
    vectors: I64


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """One slot's part of the mirror, by [layer, module].

    addresses: int64 [layers, 7, 2] in elements, those of a split factor -(1 + first) into `listed`. vectors:
    int64 [layers, 7, 2], g and c in float32 elements. ranks, flags: int32, scales: float32, all [layers, 7].
    listed: int64, element addresses of the rank rows of split factors.
    """

    addresses: I64
    vectors: I64
    ranks: I32
    flags: I32
    scales: npt.NDArray[np.float32]
    listed: I64


def read_factors(resident: ResidentAdapter) -> Factors:
    """The decoder-layer modules of an installed adapter; head and embedding are left out.

    Raises `operator_layout` where a factor or a vector is cut into column tiles: kernels read whole rows.
    """
    layers, modules = np.nonzero(resident.index[:, :MODULES] >= 0)
    rows = resident.index[layers, modules]
    spans = resident.spans[rows]
    of_sides = _spread(spans[:, SIDES, 0].reshape(-1), spans[:, SIDES, 1].reshape(-1))
    has_vector = spans[:, VECTORS, 1] > 0
    if resident.extents[:, 3].any() and (tiled := _first_tiled(resident, spans)):
        index, factor = tiled
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT,
            f"layer {int(layers[index])} {Module(modules[index]).name} {factor.name}: a row is cut over "
            f"{int(spans[index, factor, 1])} pages, kernels need pages that hold one row",
        )
    starts = np.where(has_vector, spans[:, VECTORS, 0], 0)
    vectors = np.where(has_vector, resident.extents[starts, 0], -1)
    return Factors(
        layers,
        modules,
        resident.ranks[rows].astype(np.int64),
        resident.scales[rows],
        spans[:, SIDES, 1],
        resident.extents[of_sides, :3],
        vectors,
    )


def make_entry(factors: Factors, layers: int, itemsize: int, widths: I64) -> SlotEntry:
    """The mirror's part for these modules. itemsize: bytes of a factor element. widths: int64 [7, 2], d_in
    and d_out.

    Raises `operator_layout` (a module out of range or named twice, extents that do not cover the rank in
    order or start off 16 bytes) and `operator_rank_unsupported`.
    """
    _check_modules(factors, layers)
    _check_extents(factors)
    at, counts = (factors.layers, factors.modules), factors.counts.reshape(-1)
    width = widths[factors.modules].reshape(-1)
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(counts.size), counts)
    offset, rows = factors.extents[:, AT], factors.extents[:, RANK_N]
    joined = (owner[1:] == owner[:-1]) & (
        offset[:-1] + rows[:-1] * width[owner[:-1]] * itemsize != offset[1:]
    )
    split = np.zeros(counts.size, dtype=bool)
    split[owner[1:][joined]] = True
    starts = np.append(offset, 0)[first] // itemsize
    covered = np.where(split, np.repeat(factors.ranks, len(SIDES)), 0)
    sides = np.where(counts == 0, 0, np.where(split, -1 - (np.cumsum(covered) - covered), starts))
    of_split = split[owner]
    listed = _spread(
        offset[of_split] // itemsize, rows[of_split], np.repeat(width[owner[of_split]], rows[of_split])
    )
    addresses, vectors = (np.zeros((layers, MODULES, 2), dtype=np.int64) for _ in range(2))
    ranks, flags = (np.zeros((layers, MODULES), dtype=np.int32) for _ in range(2))
    scales = np.zeros((layers, MODULES), dtype=np.float32)
    addresses[at] = sides.reshape(-1, len(SIDES))
    vectors[at] = np.maximum(factors.vectors[:, :2], 0) // VECTOR_ITEMSIZE
    ranks[at], scales[at] = factors.ranks, factors.scales
    flags[at] = (factors.vectors >= 0) @ np.array([HAS_G, HAS_C, HAS_H])
    return SlotEntry(addresses, vectors, ranks, flags, scales, listed)


def _spread(starts: I64, counts: I64, step: I64 | int = 1) -> I64:
    """start, start + step, ... for each pair, one after the other; int64 [counts.sum()]."""
    before = np.cumsum(counts) - counts
    nth = np.arange(int(counts.sum())) - np.repeat(before, counts)
    return np.asarray(np.repeat(starts, counts) + nth * step, dtype=np.int64)


def _first_tiled(resident: ResidentAdapter, spans: I64) -> tuple[int, Factor] | None:
    """The first module, and its factor, that has a column tile beside the first."""
    for index, row in enumerate(spans.tolist()):
        for factor in Factor:
            first, count = row[factor]
            if resident.extents[first : first + count, 3].any():
                return index, factor
    return None


def _check_modules(factors: Factors, layers: int) -> None:
    layer, module = factors.layers, factors.modules
    outside = (layer < 0) | (layer >= layers) | (module < 0) | (module >= MODULES)
    if outside.any():
        raise _refuse(factors, np.flatnonzero(outside), f"there are {layers} layers and {MODULES} modules")
    key = layer * MODULES + module
    if np.bincount(key, minlength=1).max() > 1:
        twice = np.flatnonzero(np.bincount(key)[key] > 1)
        raise _refuse(factors, twice, "named twice")
    unsupported = np.flatnonzero((factors.ranks < 0) | (factors.ranks > MAX_RANK))
    if unsupported.size:
        raise InternalFault(
            ErrorCode.OPERATOR_RANK_UNSUPPORTED,
            f"rank must be 0 to {MAX_RANK}, got {int(factors.ranks[unsupported[0]])}",
        )
    crooked = ((factors.vectors >= 0) & (factors.vectors % EXTENT_ALIGN_BYTES != 0)).any(axis=1)
    if crooked.any():
        raise _refuse(factors, np.flatnonzero(crooked), "a vector does not start at a multiple of 16 bytes")


def _check_extents(factors: Factors) -> None:
    counts = factors.counts.reshape(-1)
    owner = np.repeat(np.arange(counts.size), counts)
    offset, rank_lo, rank_n = factors.extents.T
    so_far = np.cumsum(rank_n) - rank_n
    first = np.cumsum(counts) - counts
    expected = so_far - np.append(so_far, 0)[first][owner]
    wrong = (rank_lo != expected) | (rank_n < 1) | (offset % EXTENT_ALIGN_BYTES != 0) | (offset < 0)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise _refuse(
            factors,
            owner[at : at + 1] // len(SIDES),
            f"extent at byte {int(offset[at])} with ranks {int(rank_lo[at])}+{int(rank_n[at])}: expected "
            "rank "
            f"{int(expected[at])}, 16-byte start",
        )
    covered = np.bincount(owner, weights=rank_n, minlength=counts.size).astype(np.int64)
    short = np.flatnonzero(covered != np.repeat(factors.ranks, len(SIDES)))
    if short.size:
        index = short[:1] // len(SIDES)
        raise _refuse(
            factors,
            index,
            f"its extents cover {int(covered[short[0]])} of {int(factors.ranks[index[0]])} ranks",
        )


def _refuse(factors: Factors, where: npt.NDArray[np.intp] | I64, why: str) -> InternalFault:
    layer, module = int(factors.layers[where[0]]), int(factors.modules[where[0]])
    return InternalFault(
        ErrorCode.OPERATOR_LAYOUT, f"factor table refused layer {layer} module {module}: {why}"
    )
