"""The device's view of resident adapters: which bytes of the page pool are which factor of which slot.

Owns the row-table directory: slot -> extents, ranks, scales and published generation. Copies no factor,
chooses no page and no slot: it is told. Only bytes inside the extents of a published adapter are ever read by
an operator.

A slot's life: empty -> installed (pages named, tables checked) -> published (usable, with a generation) ->
empty.

Specification: 0x04E (publish after validation), 0x05E, 0x06E (launch snapshot); rulings "One page pool".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import BASE_SLOT, Module
from loraplex.core.layout import (
    CHECKSUM_ITEMSIZE,
    MAX_SIZE_CLASS,
    AdapterImage,
    Factor,
    block_bytes,
    page_checksum,
)
from loraplex.core.plan import BatchPlan
from loraplex.ops.image_check import (
    COL_N,
    OFFSET,
    PAGE,
    RANK_LO,
    CheckedImage,
    check_image,
)
from loraplex.ops.interface import ModuleDims

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

EXTENT_WORDS = 5
"""Columns of `ResidentAdapter.extents`: byte offset in the pool, rank_lo, rank_n, col_lo, col_n."""
CHECKSUM_CHUNK: Final = 32 << 20
"""Bytes that are summed at once on a device."""
MAX_LAYOUTS: Final = 64
"""Checked tables that are kept, those of the oldest layout leaving first."""


@dataclass(frozen=True, slots=True)
class FactorPiece:
    """A rectangle of a factor and its zero-copy view [rank_n, col_n] into the pool."""

    rank_lo: int
    rank_n: int
    col_lo: int
    col_n: int
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class ResidentModule:
    """One adapted module as views: rank (0: vectors only), scale, pieces of A [r, d_in], B^T [r, d_out], h,
    g, c.
    """

    rank: int
    scale: float
    factors: tuple[tuple[FactorPiece, ...], ...]

    def pieces(self, factor: Factor) -> tuple[FactorPiece, ...]:
        """Pieces of one factor, by column tile, then rank; empty where the module has none."""
        return self.factors[factor]


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """The tables of one installed slot, for kernels that address the pool themselves, and views on demand.

    index: int32 [layers, 9] -> row of the other tables, -1 where the module is not adapted. ranks: int32 [n].
    scales: float32 [n]. spans: int64 [n, 5, 2]: first extent and count of A, B, h, g, c. extents: int64 [e,
    5], see `EXTENT_WORDS`.
    """

    pages: I64
    index: I32
    ranks: I32
    scales: npt.NDArray[np.float32]
    spans: I64
    extents: I64
    pool: torch.Tensor
    dtype: torch.dtype
    views: dict[int, ResidentModule] = field(default_factory=dict)
    words: tuple[int, ...] = field(init=False)
    """Addresses of index, ranks, scales, spans and extents, in this order: the compiled kernel's view."""

    def __post_init__(self) -> None:
        tables = (self.index, self.ranks, self.scales, self.spans, self.extents)
        object.__setattr__(self, "words", tuple(table.ctypes.data for table in tables))

    def has(self, factor: Factor) -> bool:
        """Whether any module carries this factor or vector."""
        return bool(self.spans[:, factor, 1].any())

    def module(self, layer: int, module: Module) -> ResidentModule | None:
        """Views of one module, made on first use; None where the adapter leaves it alone."""
        row = int(self.index[layer, module])
        if row < 0:
            return None
        found = self.views.get(row)
        if found is None:
            factors = tuple(self._pieces(row, factor) for factor in Factor)
            found = ResidentModule(int(self.ranks[row]), float(self.scales[row]), factors)
            self.views[row] = found
        return found

    def _pieces(self, row: int, factor: Factor) -> tuple[FactorPiece, ...]:
        first, count = (int(v) for v in self.spans[row, factor])
        dtype = self.dtype if factor in (Factor.A, Factor.B) else torch.float32
        flat = self.pool.view(-1).view(dtype)
        base = flat.storage_offset()
        out = []
        for offset, rank_lo, rank_n, col_lo, col_n in self.extents[first : first + count].tolist():
            view = torch.as_strided(flat, (rank_n, col_n), (col_n, 1), base + offset // dtype.itemsize)
            out.append(FactorPiece(rank_lo, rank_n, col_lo, col_n, view))
        return tuple(out)


def _repeats(pages: I64) -> bool:
    ordered = np.sort(pages)
    return bool((ordered[1:] == ordered[:-1]).any())


class Mirror(Protocol):
    """What follows a table for kernels that do not read it themselves."""

    def installed(self, slot: int, resident: ResidentAdapter) -> None:
        """A slot is about to be installed; raises what makes that impossible, with nothing changed."""
        ...

    def emptied(self, slot: int) -> None:
        """A slot is empty."""
        ...


class AdapterTable:
    """Slots 1 to max_slots - 1 over one page pool; slot 0 is the base and stays empty.

    pool: uint8 [pages, page_bytes], contiguous, page_bytes divisible by 8; never reallocated. dtype: of the
    factors, the model's. modules: which modules exist and their dimensions on this shard. Raises
    `operator_layout`.
    """

    def __init__(self, pool: torch.Tensor, dtype: torch.dtype, max_slots: int, modules: ModuleDims) -> None:
        if pool.dtype is not torch.uint8 or pool.dim() != 2 or not pool.is_contiguous():
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"the pool must be a contiguous uint8 matrix, got {pool.dtype} of shape {tuple(pool.shape)}",
            )
        if pool.shape[1] % CHECKSUM_ITEMSIZE:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT, f"a page of {pool.shape[1]} bytes does not hold whole elements"
            )
        self.pool = pool
        self._host = pool.numpy() if pool.device.type == "cpu" else None
        self.dtype = dtype
        self.modules = modules
        self.max_slots = max_slots
        self.published = np.zeros(max_slots, dtype=np.int64)
        """Published generation of each slot, 0 where none is."""
        self.revision = 0
        """Advances whenever a slot changes, for kernels that mirror the table."""
        self.kernel_state: object | None = None
        """What a kernel family keeps for this table from step to step."""
        self._mirror: Mirror | None = None
        self._last = np.zeros(max_slots, dtype=np.int64)
        self._adapters: list[ResidentAdapter | None] = [None] * max_slots
        # Bytes of each page by the slot that holds them.
        self._held: dict[int, dict[int, tuple[int, int]]] = {}
        self._weights: torch.Tensor | None = None
        self._layouts: dict[tuple[object, ...], CheckedImage] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return int(self.pool.shape[1])

    def install(
        self,
        slot: int,
        image: AdapterImage,
        page_ids: Sequence[int] | I32,
        size_class: int = 0,
        block: int = 0,
    ) -> None:
        """Bind `slot` to pages that hold the image, in its page order. Reads no factor; nothing can use it
        yet.

        size_class, block: above class 0, the image is this block of its one page, and of that page nothing
        else is its. Raises `operator_layout` (also where a mirror has no room), `operator_rank_unsupported`,
        `plan_page_table` (a page that is null, outside the pool or named twice, bytes that another slot
        holds), `stale_slot_generation` (the slot is still published).
        """
        self._check_slot(slot)
        if self.published[slot]:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"adapter slot {slot} is published with generation {int(self.published[slot])}; retire it "
                "first",
            )
        pages = self._check_pages(page_ids)
        offset, width = self.block_span(size_class, block)
        tables = self._checked(image, width, pages.size)
        self._check_unheld(slot, pages, offset, offset + width)
        resident = self._resident(tables, pages, offset)
        if self._mirror is not None:
            self._mirror.installed(slot, resident)
        self._leave(slot)
        self._adapters[slot] = resident
        for page in pages.tolist():
            self._held.setdefault(page, {})[slot] = (offset, offset + width)
        self.revision += 1

    def _checked(self, image: AdapterImage, width: int, pages: int) -> CheckedImage:
        """`check_image`, whose answer is kept for images with the very same tables: adapters of one rank on
        the same modules mostly have them, and looking them up costs a fraction.
        """
        tables = (image.modules.tobytes(), image.extents.tobytes())
        shape = (
            image.itemsize,
            image.modules.shape,
            image.extents.shape,
            image.pages.shape,
            image.checksums.shape,
        )
        key = (tables, shape, width, pages)
        found = self._layouts.get(key)
        if found is None:
            found = check_image(image, self.modules, self.dtype.itemsize, width, pages)
            while len(self._layouts) >= MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = found
        return found

    def watch(self, mirror: Mirror) -> None:
        """Tell a mirror of what is installed and emptied from now on, instead of an earlier one; raises as
        `installed` does.
        """
        for slot, adapter in enumerate(self._adapters):
            if adapter is not None:
                mirror.installed(slot, adapter)
        self._mirror = mirror

    def publish(self, slot: int, generation: int) -> None:
        """Make an installed slot usable under a generation later than any it had; raises
        `stale_slot_generation`.
        """
        self._check_slot(slot)
        if self._adapters[slot] is None or self.published[slot] or generation <= self._last[slot]:
            state = "is empty" if self._adapters[slot] is None else f"had generation {int(self._last[slot])}"
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"adapter slot {slot} {state} and cannot be published with generation {generation}",
            )
        self.published[slot] = self._last[slot] = generation
        self.revision += 1

    def retire(self, slot: int, generation: int) -> None:
        """Empty a slot; its pages may be reused. generation: the one it was published with, or is waiting to
        be.

        Raises `stale_slot_generation` where another generation is published or the slot is empty.
        """
        self._check_slot(slot)
        published = int(self.published[slot])
        if self._adapters[slot] is None or published not in (0, generation):
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"adapter slot {slot} holds generation {published}, not {generation}, and cannot be retired "
                "as that",
            )
        self._leave(slot)
        if self._mirror is not None:
            self._mirror.emptied(slot)
        self.published[slot] = 0
        self.revision += 1

    def generation(self, slot: int) -> int:
        """Published generation of a slot; 0 for the base. Raises `stale_slot_generation` before
        publication.
        """
        if slot == BASE_SLOT:
            return 0
        self.adapter(slot)
        return int(self.published[slot])

    def adapter(self, slot: int) -> ResidentAdapter:
        """Tables of a published slot; raises `stale_slot_generation`."""
        self._check_slot(slot)
        adapter = self._adapters[slot]
        if adapter is None or not self.published[slot]:
            state = "is empty" if adapter is None else "is installed but not published"
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION, f"adapter slot {slot} {state} and cannot be used"
            )
        return adapter

    def check_plan(self, plan: BatchPlan) -> None:
        """Every request names a published slot with its generation; raises `stale_slot_generation`."""
        slots, generations = plan.requests.adapter_slot, plan.requests.adapter_generation
        if slots.size == 0:
            return
        if slots.min() < 0 or slots.max() >= self.max_slots:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"the plan names adapter slot {int(slots.max())} of {self.max_slots}",
            )
        wrong = np.flatnonzero((self.published[slots] != generations) | ((slots > 0) & (generations == 0)))
        if wrong.size:
            slot, generation = int(slots[wrong[0]]), int(generations[wrong[0]])
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"the plan expects generation {generation} in adapter slot {slot}, published is "
                f"{int(self.published[slot])}",
            )

    def block_span(self, size_class: int, block: int) -> tuple[int, int]:
        """(offset, bytes) of a block in its page; the whole page for class 0. Raises `plan_page_table`."""
        if not 0 <= size_class <= MAX_SIZE_CLASS or not 0 <= block < 1 << size_class:
            raise InternalFault(
                ErrorCode.PLAN_PAGE_TABLE, f"a page has no block {block} of size class {size_class}"
            )
        width = block_bytes(self.page_bytes, size_class)
        return block * width, width

    def copy_page(self, page_id: int, image: AdapterImage, index: int, offset: int = 0) -> None:
        """Copy a page of an image into a page from `offset` on; asynchronous on a device's stream.

        Raises `adapter_load_failed` where the image's file has lost it.
        """
        self._check_pages([page_id])
        width = image.pages.shape[1]
        if self._host is not None:
            image.read_page(index, self._host[page_id, offset : offset + width])
            return
        staged = torch.empty(width, dtype=torch.uint8, pin_memory=True)
        image.read_page(index, staged.numpy())
        self.pool[page_id, offset : offset + width].copy_(staged, non_blocking=True)

    def checksums(self, page_ids: Sequence[int] | I32, size_class: int = 0, block: int = 0) -> torch.Tensor:
        """Checksums of pages, or of one block of each, as they lie on the device, int64 [n].

        Equal to `layout.page_checksum` of those bytes; no byte beside them is read.
        """
        pages = self._check_pages(page_ids)
        offset, width = self.block_span(size_class, block)
        if self._host is not None:
            sums = np.empty(len(pages), dtype=np.int64)
            for row, page in enumerate(pages.tolist()):
                sums[row : row + 1] = page_checksum(self._host[page : page + 1, offset : offset + width])
            return torch.from_numpy(sums)
        if self._weights is None:
            words = self.page_bytes // CHECKSUM_ITEMSIZE
            self._weights = torch.arange(words, dtype=torch.int64, device=self.pool.device).mul_(2).add_(1)
        weights = self._weights[: width // CHECKSUM_ITEMSIZE]
        # A few pages at a time: fewer launches than page by page, and little memory for what is in between.
        at = torch.from_numpy(pages).pin_memory().to(self.pool.device, non_blocking=True)
        lines = self.pool[:, offset : offset + width].view(torch.int64)
        parts = [
            lines.index_select(0, own).mul_(weights).sum(dim=1)
            for own in at.split(max(1, CHECKSUM_CHUNK // width))
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self.pool.device)

    def _resident(self, tables: CheckedImage, pages: I64, offset: int) -> ResidentAdapter:
        extents = np.empty((len(tables.extents), EXTENT_WORDS), dtype=np.int64)
        extents[:, 0] = pages[tables.extents[:, PAGE]] * self.page_bytes + offset + tables.extents[:, OFFSET]
        extents[:, 1:] = tables.extents[:, RANK_LO : COL_N + 1]
        return ResidentAdapter(
            pages=pages,
            index=tables.index,
            ranks=np.ascontiguousarray(tables.modules[:, 2]),
            scales=np.ascontiguousarray(tables.modules[:, 3]).view(np.float32),
            spans=tables.spans,
            extents=extents,
            pool=self.pool,
            dtype=self.dtype,
        )

    def _check_unheld(self, slot: int, pages: I64, start: int, end: int) -> None:
        for page in pages.tolist():
            for other, (low, high) in self._held.get(page, {}).items():
                if other != slot and start < high and low < end:
                    raise InternalFault(
                        ErrorCode.PLAN_PAGE_TABLE,
                        f"bytes {start} to {end} of page {page} are given to adapter slot {slot}, slot "
                        f"{other} holds "
                        f"{low} to {high}",
                    )

    def _leave(self, slot: int) -> None:
        adapter, self._adapters[slot] = self._adapters[slot], None
        for page in adapter.pages.tolist() if adapter is not None else ():
            del self._held[page][slot]
            if not self._held[page]:
                del self._held[page]

    def _check_slot(self, slot: int) -> None:
        if not BASE_SLOT < slot < self.max_slots:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION,
                f"adapter slots run from 1 to {self.max_slots - 1}, got {slot}",
            )

    def _check_pages(self, page_ids: Sequence[int] | I32) -> I64:
        pages = np.ascontiguousarray(page_ids, dtype=np.int64)
        count = int(self.pool.shape[0])
        least, most = pages.min(initial=count), pages.max(initial=0)
        if pages.size and (least < 1 or most >= count or (pages.size > 1 and _repeats(pages))):
            raise InternalFault(
                ErrorCode.PLAN_PAGE_TABLE,
                f"pages must be distinct and between 1 and {count - 1}, got {pages.tolist()}",
            )
        return pages
