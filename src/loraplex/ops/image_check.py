"""Checks an adapter image against the model and the pool before anything reads through it.

Owns the invariant that extents, ranks and dimensions agree (0x06E "validate rank table against factor/page
extents"). It runs between two steps, so tables are taken by columns in a few passes, and are sorted only
where a writer did not leave them in canonical order. Never touches factor bytes.
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
Bounds = tuple[list[int], list[int]]
"""Least and greatest value of each column of a table."""

MODULES = len(Module)
FACTORS = len(Factor)
VECTORS = (Factor.H, Factor.G, Factor.C)
ALL_VECTORS = vector_mask(VECTORS)
_NOTHING = int(np.iinfo(np.int32).max), int(np.iinfo(np.int32).min)
"""Bounds of no rows, which pass every check of a range."""
_EXPONENT = 0x7F800000
"""Bits of a float32 that are all set where it is not finite."""
_LOW_RANK = 1 << Factor.A | 1 << Factor.B
_LAYERED = max(LAYER_MODULES)
LAYER, MODULE, FACTOR, RANK_LO, RANK_N, COL_LO, COL_N, PAGE, OFFSET = range(EXTENT_COLUMNS)


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """The tables of an image that passed: sorted, widened, and cross-indexed.

    modules: int32 [n, 5] sorted by (layer, module). index: int32 [layers, modules] -> row of `modules`, or
    -1. extents: int64 [e, 9], its columns contiguous, sorted by (layer, module, factor, col_lo, rank_lo).
    spans: int64 [n, factors, 2]: first extent and number of extents of each factor.
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

    itemsize: bytes of a factor element of the table. page_bytes: of a page, or of the block that the image
    lies in. page_count: pages that were set aside for the image.
    """
    if image.itemsize != itemsize:
        raise _refuse(f"its factors have {image.itemsize} bytes an element, the table {itemsize}")
    if image.pages.shape != (len(image.checksums), page_bytes):
        raise _refuse(
            f"its bytes have the shape {image.pages.shape}, its place {page_count} of {page_bytes} bytes"
        )
    if page_count != len(image.checksums):
        raise _refuse(f"it has {len(image.checksums)} pages, {page_count} were given")
    widths = _widths(dims)
    modules = _check_modules(image.modules, dims, widths)
    index = np.full((dims.layers, MODULES), -1, dtype=np.int32)
    index[modules[:, 0], modules[:, 1]] = np.arange(len(modules), dtype=np.int32)
    extents, key, bounds = _by_factor(image.extents, index, dims)
    spans = _check_tiling(modules, extents, key, bounds, widths)
    _check_bytes(extents, bounds, itemsize, page_bytes, page_count)
    return CheckedImage(modules, index, extents.T, spans)


def _widths(dims: ModuleDims) -> I64:
    """Columns of each factor of each module, int64 [modules, factors]; 0 where the model does not have the
    module.
    """
    widths = np.zeros((MODULES, FACTORS), dtype=np.int64)
    for module, (d_in, d_out) in dims.dims.items():
        widths[module] = d_in, d_out, d_in, d_out, d_out  # A, B, h, g, c
    return widths


def _bounds(columns: I64) -> Bounds:
    least, greatest = _NOTHING
    return columns.min(axis=1, initial=least).tolist(), columns.max(axis=1, initial=greatest).tolist()


def _check_modules(raw: I32, dims: ModuleDims, widths: I64) -> I32:
    if raw.ndim != 2 or raw.shape[1] != MODULE_COLUMNS or len(raw) == 0:
        raise _refuse(f"its module table has shape {raw.shape}, expected [n, {MODULE_COLUMNS}] with n >= 1")
    columns = raw.T.astype(np.int64, order="C")
    layer, module = columns[0], columns[1]
    low, high = _bounds(columns)
    if low[1] < 0 or high[1] >= MODULES or not widths[module, Factor.A].all():
        raise _refuse(f"it names a module outside {sorted(m.name for m in dims.dims)}")
    if low[0] < 0 or high[0] >= dims.layers or layer[module > _LAYERED].any():
        raise _refuse(f"it names layer {high[0]} of a model of {dims.layers} layers")
    if low[2] < 0 or high[2] > MAX_RANK:
        raise InternalFault(
            ErrorCode.OPERATOR_RANK_UNSUPPORTED,
            f"ranks run from 0 (vectors only) to {MAX_RANK}, got {low[2]} to {high[2]}",
        )
    if low[4] < 0 or high[4] > ALL_VECTORS:
        raise _refuse(f"a module's vectors are a mask from 0 to {ALL_VECTORS}, got {raw[:, 4].tolist()}")
    if (columns[3] & _EXPONENT == _EXPONENT).any():
        raise _refuse("a scale is not finite")
    key = layer * MODULES + module
    if (key[1:] > key[:-1]).all():
        return raw.copy()
    order = np.argsort(key, kind="stable")
    key = key[order]
    if (key[1:] == key[:-1]).any():
        raise _refuse("a module appears twice")
    return np.ascontiguousarray(raw[order])


def _by_factor(raw: I32, index: I32, dims: ModuleDims) -> tuple[I64, I64, Bounds]:
    """The extents as columns, int64 [9, e], in canonical order; row of the module table * factors + factor of
    each; and the columns' bounds.
    """
    if raw.ndim != 2 or raw.shape[1] != EXTENT_COLUMNS:
        raise _refuse(f"its extent table has shape {raw.shape}, expected [n, {EXTENT_COLUMNS}]")
    columns: I64 = raw.T.astype(np.int64, order="C")
    low, high = bounds = _bounds(columns)
    ends = (LAYER, dims.layers), (MODULE, MODULES), (FACTOR, FACTORS)
    if any(low[column] < 0 or high[column] >= end for column, end in ends):
        raise _refuse("an extent names a layer, module or factor that does not exist")
    owner = index.reshape(-1)[columns[LAYER] * MODULES + columns[MODULE]]
    if (owner < 0).any():
        raise _refuse("an extent belongs to a module that the image does not have")
    key = owner * np.int64(FACTORS) + columns[FACTOR]
    if (key[1:] > key[:-1]).all():  # no factor is cut
        return columns, key, bounds
    order = np.lexsort((columns[RANK_LO], columns[COL_LO], key))
    return columns[:, order], key[order], bounds


def _check_tiling(modules: I32, extents: I64, key: I64, bounds: Bounds, widths: I64) -> I64:
    """The extents of each factor tile it exactly, and each module has what its rank and its vectors say; the
    spans.
    """
    low, _ = bounds
    if low[RANK_N] < 1 or low[COL_N] < 1:
        raise _refuse("an extent is empty")
    height = np.ones((len(modules), FACTORS), dtype=np.int64)
    height[:, : Factor.H] = modules[:, 2:3]
    rows, cols = height.reshape(-1)[key], widths[modules[:, 1]].reshape(-1)[key]
    first = np.ones(len(key), dtype=np.bool_)
    np.not_equal(key[1:], key[:-1], out=first[1:])
    if not _tiles(extents, first, rows, cols):
        raise _refuse("the extents of a factor do not tile its rank rows and columns exactly once")
    counts = np.bincount(key, minlength=len(modules) * FACTORS)
    spans = np.zeros((len(modules), FACTORS, 2), dtype=np.int64)
    spans.reshape(-1, 2)[key[first], 0] = np.flatnonzero(first)
    spans[:, :, 1] = counts.reshape(-1, FACTORS)
    present = np.packbits(counts.reshape(-1, FACTORS) > 0, axis=1, bitorder="little")[:, 0]
    ranks, vectors = modules[:, 2], modules[:, 4]
    wanted = (ranks > 0) * np.int32(_LOW_RANK) | vectors << Factor.H
    if (present != wanted).any() or not present.all():
        raise _incomplete(modules, present)
    return spans


def _incomplete(modules: I32, present: npt.NDArray[np.uint8]) -> InternalFault:
    """What a module lacks. present: a bit for each factor that there is."""
    low_rank, vectors = present & _LOW_RANK, present >> Factor.H
    if ((low_rank == _LOW_RANK) != (modules[:, 2] > 0)).any():
        return _refuse("a module of rank 1 or more lacks a factor, or one of rank 0 has one")
    if (vectors != modules[:, 4]).any():
        row = int(np.flatnonzero(vectors != modules[:, 4])[0])
        return _refuse(
            f"layer {int(modules[row, 0])} {Module(modules[row, 1]).name} declares the vectors "
            f"{_names(modules[row, 4])} "
            f"and has {_names(vectors[row])}"
        )
    return _refuse("a module has neither factors nor vectors")


def _tiles(extents: I64, first: npt.NDArray[np.bool_], rows: I64, cols: I64) -> bool:
    """Whether each factor's extents are column tiles from 0, each with its rank runs from 0, up to the
    factor's end.

    first: which extents begin a factor. rows, cols: of the factor that each extent is part of.
    """
    rank_lo, rank_n, col_lo, col_n = extents[RANK_LO : COL_N + 1]
    if first.all():
        return not (rank_lo.any() or col_lo.any() or (rank_n != rows).any() or (col_n != cols).any())
    rank_end, col_end = rank_lo + rank_n, col_lo + col_n
    starts = (rank_lo == 0) & (col_lo == 0)
    follows = np.zeros_like(first)
    same_tile = (col_lo[1:] == col_lo[:-1]) & (col_end[1:] == col_end[:-1]) & (rank_lo[1:] == rank_end[:-1])
    next_tile = (col_lo[1:] == col_end[:-1]) & (rank_lo[1:] == 0) & (rank_end[:-1] == rows[:-1])
    follows[1:] = same_tile | next_tile
    last = np.append(first[1:], True)
    ends = ~last | ((rank_end == rows) & (col_end == cols))
    return bool((np.where(first, starts, follows) & ends & (rank_end <= rows) & (col_end <= cols)).all())


def _names(mask: int) -> list[str]:
    return [v.name for v in VECTORS if int(mask) & vector_mask([v])]


def _check_bytes(extents: I64, bounds: Bounds, itemsize: int, page_bytes: int, page_count: int) -> None:
    (low, high), start = bounds, extents[OFFSET]
    size = np.where(extents[FACTOR] <= Factor.B, itemsize, VECTOR_ITEMSIZE)
    nbytes = extents[RANK_N] * extents[COL_N] * size
    if low[PAGE] < 0 or high[PAGE] >= page_count or low[OFFSET] < 0 or (start + nbytes > page_bytes).any():
        raise _refuse(
            f"an extent leaves its page of {page_bytes} bytes or the {page_count} pages of the image"
        )
    if (start & (EXTENT_ALIGN_BYTES - 1)).any():
        raise _refuse(f"an extent does not start at a multiple of {EXTENT_ALIGN_BYTES} bytes")
    # None is empty and none leaves its page, so they are apart if and only if, counted from the image's
    # beginning, as many of them have ended before the n-th begins as have begun.
    begins = extents[PAGE] * page_bytes + start
    ends = np.sort(begins + nbytes)
    begins.sort()
    if (begins[1:] < ends[:-1]).any():
        raise _refuse("two extents overlap")
