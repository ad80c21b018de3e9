"""Checks an adapter image against the model and the pool before anything reads through it.

Owns the invariant that extents, ranks and dimensions agree (0x06E "validate rank table against factor/page
extents"). Vectorised: an image of thousands of extents costs well under a millisecond. Never touches factor bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.core.layout import (
    EXTENT_ALIGN_BYTES,
    EXTENT_COLUMNS,
    MODULE_COLUMNS,
    VECTOR_ITEMSIZE,
    AdapterImage,
    Factor,
    vector_mask,
)
from loraplex.core.limits import MAX_RANK
from loraplex.ops.interface import ModuleDims

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

MODULES = len(Module)
FACTORS = len(Factor)
VECTORS = (Factor.H, Factor.G, Factor.C)
ALL_VECTORS = vector_mask(VECTORS)
LAYER, MODULE, FACTOR, RANK_LO, RANK_N, COL_LO, COL_N, PAGE, OFFSET = range(EXTENT_COLUMNS)


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """The tables of an image that passed: sorted, widened, and cross-indexed.

    modules: int32 [n, 5] sorted by (layer, module). index: int32 [layers, modules] -> row of `modules`, or -1.
    extents: int64 [e, 9] sorted by (layer, module, factor, col_lo, rank_lo). spans: int64 [n, factors, 2]: first
    extent and number of extents of each factor.
    """

    modules: I32
    index: I32
    extents: I64
    spans: I64


def _refuse(message: str) -> InternalFault:
    return InternalFault(ErrorCode.OPERATOR_LAYOUT, f"adapter image refused: {message}")


def check_image(
    image: AdapterImage, dims: ModuleDims, itemsize: int, page_bytes: int, page_count: int
) -> CheckedImage:
    """The image's tables in canonical order; raises `operator_layout` or `operator_rank_unsupported`.

    itemsize: bytes of a factor element of the table. page_bytes: of a page, or of the block that the image lies in. page_count: pages that were set aside for the image.
    """
    if image.itemsize != itemsize:
        raise _refuse(f"its factors have {image.itemsize} bytes an element, the table {itemsize}")
    if image.pages.shape != (len(image.checksums), page_bytes):
        raise _refuse(
            f"its bytes have the shape {image.pages.shape}, its place {page_count} of {page_bytes} bytes"
        )
    if page_count != len(image.checksums):
        raise _refuse(f"it has {len(image.checksums)} pages, {page_count} were given")
    d_in, d_out = _dimension_tables(dims)
    modules = _check_modules(image.modules, dims, d_in)
    index = np.full((dims.layers, MODULES), -1, dtype=np.int32)
    index[modules[:, 0], modules[:, 1]] = np.arange(len(modules), dtype=np.int32)
    extents = _sorted_extents(image.extents)
    owner = _owners(extents, index, dims)
    rows, cols = _factor_shapes(modules, extents, owner, d_in, d_out)
    spans = _check_tiling(modules, extents, owner, rows, cols)
    _check_bytes(extents, itemsize, page_bytes, page_count)
    return CheckedImage(modules, index, extents, spans)


def _dimension_tables(dims: ModuleDims) -> tuple[I64, I64]:
    d_in, d_out = np.zeros(MODULES, dtype=np.int64), np.zeros(MODULES, dtype=np.int64)
    for module, (columns_in, columns_out) in dims.dims.items():
        d_in[module], d_out[module] = columns_in, columns_out
    return d_in, d_out


def _check_modules(raw: I32, dims: ModuleDims, d_in: I64) -> I32:
    if raw.ndim != 2 or raw.shape[1] != MODULE_COLUMNS or len(raw) == 0:
        raise _refuse(f"its module table has shape {raw.shape}, expected [n, {MODULE_COLUMNS}] with n >= 1")
    layer, module, rank = raw[:, 0], raw[:, 1], raw[:, 2]
    if module.min() < 0 or module.max() >= MODULES or not d_in[module].all():
        raise _refuse(f"it names a module outside {sorted(m.name for m in dims.dims)}")
    layers = np.where(module <= max(LAYER_MODULES), dims.layers, 1)
    if layer.min() < 0 or (layer >= layers).any():
        raise _refuse(f"it names layer {int(layer.max())} of a model of {dims.layers} layers")
    if rank.min() < 0 or rank.max() > MAX_RANK:
        raise InternalFault(
            ErrorCode.OPERATOR_RANK_UNSUPPORTED,
            f"ranks run from 0 (vectors only) to {MAX_RANK}, got {int(rank.min())} to {int(rank.max())}",
        )
    if raw[:, 4].min() < 0 or raw[:, 4].max() > ALL_VECTORS:
        raise _refuse(f"a module's vectors are a mask from 0 to {ALL_VECTORS}, got {raw[:, 4].tolist()}")
    scale = np.ascontiguousarray(raw[:, 3]).view(np.float32)
    if not np.isfinite(scale).all():
        raise _refuse("a scale is not finite")
    key = layer.astype(np.int64) * MODULES + module
    order = np.argsort(key, kind="stable")
    if (np.diff(key[order]) == 0).any():
        raise _refuse("a module appears twice")
    return np.ascontiguousarray(raw[order])


def _sorted_extents(raw: I32) -> I64:
    if raw.ndim != 2 or raw.shape[1] != EXTENT_COLUMNS:
        raise _refuse(f"its extent table has shape {raw.shape}, expected [n, {EXTENT_COLUMNS}]")
    wide = raw.astype(np.int64)
    order = np.lexsort((wide[:, RANK_LO], wide[:, COL_LO], wide[:, FACTOR], wide[:, MODULE], wide[:, LAYER]))
    return np.ascontiguousarray(wide[order])


def _owners(extents: I64, index: I32, dims: ModuleDims) -> I64:
    """Row of the module table that each extent belongs to."""
    layer, module, factor = extents[:, LAYER], extents[:, MODULE], extents[:, FACTOR]
    inside = (
        (layer >= 0)
        & (layer < dims.layers)
        & (module >= 0)
        & (module < MODULES)
        & (factor >= 0)
        & (factor < FACTORS)
    )
    if not inside.all():
        raise _refuse("an extent names a layer, module or factor that does not exist")
    owner = index[layer, module].astype(np.int64)
    if (owner < 0).any():
        raise _refuse("an extent belongs to a module that the image does not have")
    return owner


def _factor_shapes(modules: I32, extents: I64, owner: I64, d_in: I64, d_out: I64) -> tuple[I64, I64]:
    """Rows and columns of the factor that each extent is part of."""
    module, factor = extents[:, MODULE], extents[:, FACTOR]
    low_rank = factor <= Factor.B
    rows = np.where(low_rank, modules[owner, 2], 1).astype(np.int64)
    cols = np.where((factor == Factor.A) | (factor == Factor.H), d_in[module], d_out[module])
    return rows, cols


def _check_tiling(modules: I32, extents: I64, owner: I64, rows: I64, cols: I64) -> I64:
    """The extents of each factor tile it exactly: column tiles from 0, each with its rank runs from 0."""
    key = owner * FACTORS + extents[:, FACTOR]
    first = np.append(True, np.diff(key) != 0)[: len(key)]
    last = np.append(first[1:], True)[: len(key)]
    rank_lo, rank_end = extents[:, RANK_LO], extents[:, RANK_LO] + extents[:, RANK_N]
    col_lo, col_end = extents[:, COL_LO], extents[:, COL_LO] + extents[:, COL_N]
    if (extents[:, RANK_N] < 1).any() or (extents[:, COL_N] < 1).any():
        raise _refuse("an extent is empty")
    previous_rank = np.append(0, rank_end[:-1])[: len(key)]
    previous_lo, previous_col = np.append(0, col_lo[:-1])[: len(key)], np.append(0, col_end[:-1])[: len(key)]
    previous_rows = np.append(0, rows[:-1])[: len(key)]
    same_tile = (col_lo == previous_lo) & (col_end == previous_col) & (rank_lo == previous_rank)
    next_tile = (col_lo == previous_col) & (rank_lo == 0) & (previous_rank == previous_rows)
    starts = (rank_lo == 0) & (col_lo == 0)
    ends = ~last | ((rank_end == rows) & (col_end == cols))
    if not (
        np.where(first, starts, same_tile | next_tile) & ends & (rank_end <= rows) & (col_end <= cols)
    ).all():
        raise _refuse("the extents of a factor do not tile its rank rows and columns exactly once")
    spans = np.zeros((len(modules), FACTORS, 2), dtype=np.int64)
    spans[owner[first], extents[first, FACTOR], 0] = np.flatnonzero(first)
    np.add.at(spans[:, :, 1], (owner, extents[:, FACTOR]), 1)
    has_factors = (spans[:, Factor.A, 1] > 0) & (spans[:, Factor.B, 1] > 0)
    if (has_factors != (modules[:, 2] > 0)).any() or (spans[:, Factor.A, 1] > 0).sum() != has_factors.sum():
        raise _refuse("a module of rank 1 or more lacks a factor, or one of rank 0 has one")
    found = (spans[:, Factor.H :, 1] > 0) @ np.array([vector_mask([v]) for v in VECTORS])
    if (found != modules[:, 4]).any():
        row = int(np.flatnonzero(found != modules[:, 4])[0])
        raise _refuse(
            f"layer {int(modules[row, 0])} {Module(modules[row, 1]).name} declares the vectors {_names(modules[row, 4])} "
            f"and has {_names(found[row])}"
        )
    if not spans[:, :, 1].any(axis=1).all():
        raise _refuse("a module has neither factors nor vectors")
    return spans


def _names(mask: int) -> list[str]:
    return [v.name for v in VECTORS if int(mask) & vector_mask([v])]


def _check_bytes(extents: I64, itemsize: int, page_bytes: int, page_count: int) -> None:
    size = np.where(extents[:, FACTOR] <= Factor.B, itemsize, VECTOR_ITEMSIZE)
    page, start = extents[:, PAGE], extents[:, OFFSET]
    end = start + extents[:, RANK_N] * extents[:, COL_N] * size
    if (page < 0).any() or (page >= page_count).any() or (start < 0).any() or (end > page_bytes).any():
        raise _refuse(
            f"an extent leaves its page of {page_bytes} bytes or the {page_count} pages of the image"
        )
    if (start % EXTENT_ALIGN_BYTES).any():
        raise _refuse(f"an extent does not start at a multiple of {EXTENT_ALIGN_BYTES} bytes")
    order = np.lexsort((start, page))
    touches = (page[order][1:] == page[order][:-1]) & (start[order][1:] < end[order][:-1])
    if touches.any():
        raise _refuse("two extents overlap")
