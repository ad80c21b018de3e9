"""How objects are laid out in pages: page geometries, one demand function, factor placement, the adapter
image.

One pool holds KV pages and adapter pages of the same size. A KV page holds `page_tokens` positions of all
layers, `[layers, 2, page_tokens, kv_heads, head_dim]`. An adapter page holds rank rows: a row of A is one
rank's `d_in` vector, a row of B-transposed one rank's `d_out` vector. The rows of one factor lie in
contiguous extents; a factor that fits into a page is never split, a vector larger than a page is cut into
column tiles. True rank: nothing is padded beyond alignment of an extent's start and a page's tail.

An adapter that fits into half a page takes a *block* instead: one of the 2^k equal parts, k its size class,
into which a slab page is cut. Its image is that wide and not a page.

Specification: 0x04D (demand from tensors), 0x05 (one pool), 0x06A (logical against physical rank);
rulings "One page pool".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module

EXTENT_ALIGN_BYTES: Final = 16
MAX_SIZE_CLASS: Final = 6
"""Blocks are 1/2 to 1/64 of a page. Size class 0 stands for whole pages."""


class Factor(IntEnum):
    """The tensors of one adapted module: low-rank factors, then float32 vectors of the general operator."""

    A = 0
    B = 1
    H = 2
    G = 3
    C = 4


class Geometry(StrEnum):
    """The page geometries that demand can be derived for."""

    VECTOR = "vector"
    PAIRED_SLOT = "paired_slot"
    RANK_ROWS = "rank_rows"


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of the KV history of one position.

    layers, kv_heads, head_dim: of this shard. itemsize: bytes of an element. page_tokens: positions in a
    page, >= 1.
    """

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    page_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one position over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_tokens * self.token_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """What one page can hold of an adapter.

    vector: `width` elements of `itemsize` bytes (0x04D's H). paired_slot: one hidden-width row in both
    buffers of every layer (the archived S-LoRA layout): 2 * layers * width * itemsize bytes. rank_rows:
    `page_bytes` bytes.
    """

    kind: Geometry
    itemsize: int
    width: int = 0
    layers: int = 1
    row_page_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page under this geometry."""
        match self.kind:
            case Geometry.VECTOR:
                return self.width * self.itemsize
            case Geometry.PAIRED_SLOT:
                return 2 * self.layers * self.width * self.itemsize
            case Geometry.RANK_ROWS:
                return self.row_page_bytes


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """One adapted module: where it is, its rank and dimensions, and the vectors it carries beside A and B."""

    layer: int
    module: Module
    rank: int
    d_in: int
    d_out: int
    vectors: tuple[Factor, ...] = ()

    def factor_shape(self, factor: Factor) -> tuple[int, int]:
        """(rows, columns) of a stored factor."""
        match factor:
            case Factor.A:
                return self.rank, self.d_in
            case Factor.B:
                return self.rank, self.d_out
            case Factor.H:
                return 1, self.d_in
            case Factor.G | Factor.C:
                return 1, self.d_out


@dataclass(frozen=True, slots=True)
class Extent:
    """A rectangle of one factor that lies contiguously, row after row, in one page.

    rank_lo, rank_n: rows of the factor. col_lo, col_n: its columns. page: index into the adapter's own page
    list. offset: bytes from the page's start.
    """

    layer: int
    module: Module
    factor: Factor
    rank_lo: int
    rank_n: int
    col_lo: int
    col_n: int
    page: int
    offset: int


EXTENT_COLUMNS: Final = 9
CHECKSUM_BLOCK: Final = 1 << 14
"""Words of a page that are multiplied by their weights one by one; a longer page is summed by rows and
columns.
"""
CHECKSUM_ROW: Final = 1 << 10
CHECKSUM_ITEMSIZE: Final = 8
"""Bytes of a word of a checksum; a page holds whole ones."""
MODULE_COLUMNS: Final = 5
VECTOR_ITEMSIZE: Final = 4


def vector_mask(vectors: Sequence[Factor]) -> int:
    """Which vectors a module carries, one bit each: 1 for H, 2 for G, 4 for C."""
    return sum(1 << (factor - Factor.H) for factor in set(vectors))


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def _stored_factors(shape: ModuleShape) -> tuple[Factor, ...]:
    low_rank = (Factor.A, Factor.B) if shape.rank > 0 else ()
    return low_rank + shape.vectors


def block_bytes(page_bytes: int, size_class: int) -> int:
    """Bytes of a block: an aligned 2^-size_class of a page; the whole page for class 0."""
    if size_class == 0:
        return page_bytes
    return (page_bytes >> size_class) // EXTENT_ALIGN_BYTES * EXTENT_ALIGN_BYTES


def size_class_for(page_bytes: int, nbytes: int) -> int:
    """Class of the smallest block that holds `nbytes`; 0 when only whole pages do. nbytes: at least 1."""
    return max(k for k in range(MAX_SIZE_CLASS + 1) if k == 0 or block_bytes(page_bytes, k) >= nbytes)


@dataclass(frozen=True, slots=True)
class ObjectDemand:
    """What an adapter takes of the pool. pages: where it has no slab page to share. size_class: 0 for whole
    pages.

    nbytes: of its image: whole pages, or one block.
    """

    pages: int
    size_class: int
    nbytes: int


def object_demand(geometry: PageGeometry, extents: npt.NDArray[np.int32]) -> ObjectDemand:
    """Demand of a placed adapter (0x04D), small objects included. extents: int32 [n, 9], see
    `AdapterImage`.
    """
    page, offset, factor = extents[:, 7], extents[:, 8], extents[:, 2]
    pages, size_class = int(page.max(initial=-1)) + 1, 0
    if pages == 1:
        itemsize = np.where(factor <= Factor.B, geometry.itemsize, VECTOR_ITEMSIZE)
        ends = offset.astype(np.int64) + extents[:, 4].astype(np.int64) * extents[:, 6] * itemsize
        size_class = size_class_for(geometry.page_bytes, int(ends.max()))
    return ObjectDemand(pages, size_class, pages * block_bytes(geometry.page_bytes, size_class))


def page_demand(geometry: PageGeometry, modules: Sequence[ModuleShape]) -> int:
    """Pages that an adapter needs under `geometry` (0x04D). The one place where page demand is derived.

    modules: every adapted module of every layer. For `paired_slot`, one slot spans all layers, so the demand
    is that of the layer with the most rows; dimensions must equal the slot's width.
    """
    match geometry.kind:
        case Geometry.VECTOR:
            return sum(
                _ceil_div(rows * cols, geometry.width)
                for shape in modules
                for rows, cols in (shape.factor_shape(f) for f in _stored_factors(shape))
            )
        case Geometry.PAIRED_SLOT:
            per_layer: dict[int, int] = {}
            for shape in modules:
                if shape.d_in != geometry.width or shape.d_out != geometry.width or shape.vectors:
                    raise InternalFault(
                        ErrorCode.OPERATOR_LAYOUT,
                        f"a paired slot of width {geometry.width} cannot hold module {shape.module.name} of "
                        f"{shape.d_in} -> {shape.d_out}",
                    )
                per_layer[shape.layer] = per_layer.get(shape.layer, 0) + shape.rank
            return max(per_layer.values(), default=0)
        case Geometry.RANK_ROWS:
            return place(geometry, modules)[1]


def place(geometry: PageGeometry, modules: Sequence[ModuleShape]) -> tuple[tuple[Extent, ...], int]:
    """Extents of all factors under the rank-row geometry, and the number of pages they fill.

    Pieces are placed first-fit in decreasing size, ties in canonical order, so that equal adapters have equal
    layouts.
    """
    if geometry.kind is not Geometry.RANK_ROWS:
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT, f"extents are placed in rank-row pages, not {geometry.kind}"
        )
    pieces: list[tuple[int, Extent]] = []
    for shape in modules:
        for factor in _stored_factors(shape):
            pieces.extend(_pieces(geometry, shape, factor))
    pieces.sort(key=lambda piece: (-piece[0], _canonical(piece[1])))
    free: list[int] = []
    extents: list[Extent] = []
    last_size = -1
    start = 0
    for size, piece in pieces:
        if size != last_size:  # a page that could not hold this size before cannot hold it now
            last_size, start = size, 0
        page = start = _first_fit(free, size, start)
        if page == len(free):
            free.append(geometry.page_bytes)
        extents.append(replace(piece, page=page, offset=geometry.page_bytes - free[page]))
        free[page] -= min(_aligned(size), free[page])
    extents.sort(key=_canonical)
    return tuple(extents), len(free)


def _canonical(extent: Extent) -> tuple[int, ...]:
    return extent.layer, extent.module, extent.factor, extent.col_lo, extent.rank_lo


def _aligned(size: int) -> int:
    return _ceil_div(size, EXTENT_ALIGN_BYTES) * EXTENT_ALIGN_BYTES


def _first_fit(free: list[int], size: int, start: int) -> int:
    for page in range(start, len(free)):
        if free[page] >= size:
            return page
    return len(free)


def _pieces(geometry: PageGeometry, shape: ModuleShape, factor: Factor) -> list[tuple[int, Extent]]:
    itemsize = geometry.itemsize if factor in (Factor.A, Factor.B) else VECTOR_ITEMSIZE
    rows, cols = shape.factor_shape(factor)
    tile = min(cols, geometry.page_bytes // itemsize)
    if tile == 0:
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT, f"a page of {geometry.page_bytes} bytes holds no element"
        )
    out: list[tuple[int, Extent]] = []
    for col_lo in range(0, cols, tile):
        col_n = min(tile, cols - col_lo)
        per_page = geometry.page_bytes // (col_n * itemsize)
        for rank_lo in range(0, rows, per_page):
            rank_n = min(per_page, rows - rank_lo)
            piece = Extent(shape.layer, shape.module, factor, rank_lo, rank_n, col_lo, col_n, 0, 0)
            out.append((rank_n * col_n * itemsize, piece))
    return out


class PageReader(Protocol):
    """The file that the mapping `pages` is of."""

    pages: npt.NDArray[np.uint8]

    def read(self, index: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill `into`, uint8 [n, page_bytes] and contiguous, with pages from `index` on; raises
        `adapter_load_failed` where the file ends before they do.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdapterImage:
    """An adapter's factors in kernel layout, ready to be copied page by page.

    key: semantic digest. kernel_digest: digest of the local kernel ABI, 64 hexadecimal characters; names the
    image. itemsize: bytes of a factor element. modules: int32 [modules, 5] of (layer, module, rank, float32
    scale bits, `vector_mask`): what the module must have, so that a vector that is missing as a whole is
    seen. extents: int32 [extents, 9] in the field order of `Extent`. pages: uint8 [pages, page_bytes], or [1,
    block bytes] where the adapter takes a block. checksums: int64 [pages] by `page_checksum`. reader: where
    `pages` is a mapping, the way to its bytes that takes no fault for every few of them. locked: `pages` lie
    in page-locked memory, which a device reads in place.
    """

    key: str
    kernel_digest: str
    itemsize: int
    modules: npt.NDArray[np.int32]
    extents: npt.NDArray[np.int32]
    pages: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.int64]
    reader: PageReader | None = field(default=None, repr=False, compare=False)
    locked: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (
            self.reader is not None and self.reader.pages is not self.pages
        ):  # a copy that was given other pages
            object.__setattr__(self, "reader", None)

    def read_page(self, index: int, into: npt.NDArray[np.uint8]) -> None:
        """`read_pages` of one page; into: uint8 [page_bytes]."""
        self.read_pages(index, into[np.newaxis])

    def read_pages(self, first: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy consecutive pages into `into`, uint8 [n, page_bytes] and contiguous, without the interpreter's
        lock.

        What lies in a file is read in one call, not mapped. Raises `adapter_load_failed` where the file ends
        before they do, `operator_layout` where `into` does not hold whole pages of the image.
        """
        if into.ndim != 2 or into.shape[1:] != self.pages.shape[1:] or first + len(into) > len(self.pages):
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"pages {first} on of an image of shape {self.pages.shape} are not read into {into.shape}",
            )
        if self.reader is None:
            np.copyto(into, self.pages[first : first + len(into)])
        else:
            self.reader.read(first, into)


_WEIGHTS: Final = 2 * np.arange(CHECKSUM_BLOCK, dtype=np.int64) + 1


def page_checksum(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Position-dependent checksum of each page, modulo 2^64; the device computes the same over its own bytes.

    pages: uint8 [n, page_bytes], page_bytes divisible by 8. Returns int64 [n]: the sum over int64 words w_i
    of (2i + 1) * w_i. Every weight is odd, so no change of one word is missed.
    """
    words = pages.view(np.int64)
    count, length = words.shape
    if length <= CHECKSUM_BLOCK:
        sums: npt.NDArray[np.int64] = np.einsum("pw,w->p", words, _WEIGHTS[:length])
        return sums
    # As rows of CHECKSUM_ROW words, i = row * CHECKSUM_ROW + column: sums of rows and of columns take
    # additions only, which run as fast as memory, and what is left to multiply is short.
    rows = length // CHECKSUM_ROW
    lines = words[:, : rows * CHECKSUM_ROW].reshape(count, rows, CHECKSUM_ROW)
    rest = words[:, rows * CHECKSUM_ROW :]
    first = 2 * CHECKSUM_ROW * np.arange(rows + 1, dtype=np.int64)
    sums = lines.sum(axis=1) @ _WEIGHTS[:CHECKSUM_ROW] + lines.sum(axis=2) @ first[:-1]
    if rest.shape[1]:
        sums += rest @ _WEIGHTS[: rest.shape[1]] + first[-1] * rest.sum(axis=1)
    return sums
