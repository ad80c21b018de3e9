"""Where each factor of each resident adapter lies, as kernels read it: the device mirror of the adapter table.

int64 addresses [slots, layers, 7, (A, B)] in elements from the pool's start, ranks int32 and scales float32
[slots, layers, 7]. A factor that lies in one extent has its address; one that is split over pages has
-(1 + first) instead, and one address for each rank row in `row_list[first:]`. Vectors g and c have float32 element
addresses in `vectors`. Reads no factor, owns no page: it is told by whoever publishes. A slot is written before any
launch may name it and cleared after the last one (0x04E, 0x05E). Room for the addresses of split factors is taken when a
slot is installed: where there is none, or a factor is cut in a way that kernels do not read, the load fails and no step.

Specification: 0x06E (ranks against extents), DESIGN 4 "One page pool".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.core.layout import EXTENT_ALIGN_BYTES, VECTOR_ITEMSIZE, Factor
from loraplex.core.limits import MAX_RANK
from loraplex.ops.table import AdapterTable, ResidentAdapter

MODULES: Final = len(LAYER_MODULES)
HAS_G: Final = 1
HAS_C: Final = 2
HAS_H: Final = 4


@dataclass(frozen=True, slots=True)
class ModuleFactors:
    """One adapted module of one layer: where its bytes are.

    module: 0 to 6. a, b: extents (byte offset in the pool, first rank, ranks) that cover the rank in order; empty for
    rank 0. g, c, h: byte offsets of float32 vectors, or -1.
    """

    layer: int
    module: int
    rank: int
    scale: float
    a: Sequence[tuple[int, int, int]] = ()
    b: Sequence[tuple[int, int, int]] = ()
    g: int = -1
    c: int = -1
    h: int = -1


def module_factors(resident: ResidentAdapter) -> list[ModuleFactors]:
    """The decoder-layer modules of an installed adapter; head and embedding are left out.

    Raises `operator_layout` where a factor or a vector is cut into column tiles: kernels read whole rows.
    """
    made = []
    for layer, module in np.argwhere(resident.index[:, :MODULES] >= 0).tolist():
        row = int(resident.index[layer, module])

        def extents(
            factor: Factor, row: int = row, layer: int = layer, module: int = module
        ) -> list[list[int]]:
            first, count = resident.spans[row, factor].tolist()
            found: list[list[int]] = resident.extents[first : first + count].tolist()
            if any(col_lo for _, _, _, col_lo, _ in found):
                raise InternalFault(
                    ErrorCode.OPERATOR_LAYOUT,
                    f"layer {layer} {Module(module).name} {factor.name}: a row is cut over {len(found)} pages, kernels "
                    "need pages that hold one row",
                )
            return found

        def offset(factor: Factor) -> int:
            found = extents(factor)
            return int(found[0][0]) if found else -1

        a, b = ([(at, lo, n) for at, lo, n, _, _ in extents(f)] for f in (Factor.A, Factor.B))
        made.append(
            ModuleFactors(
                layer, module, int(resident.ranks[row]), float(resident.scales[row]), a, b,
                g=offset(Factor.G), c=offset(Factor.C), h=offset(Factor.H),
            )
        )  # fmt: skip
    return made


MAX_SPLIT_ROWS: Final = 1 << 22
"""Addresses of split rank rows at most: 32 MiB of device memory."""


class FactorTable:
    """Device arrays over `slots` adapter slots; slot 0 stays empty.

    d_in, d_out: dimensions of the seven modules. itemsize: bytes of a factor element. split_rows: room for the rank
    rows of factors that are split over pages. Raises `operator_layout`, `operator_rank_unsupported`.
    """

    def __init__(
        self, slots: int, layers: int, d_in: Sequence[int], d_out: Sequence[int], itemsize: int,
        device: torch.device, split_rows: int = MAX_SPLIT_ROWS,
    ) -> None:  # fmt: skip
        if len(d_in) != MODULES or len(d_out) != MODULES:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"dimensions of {MODULES} modules expected, got {len(d_in)} and {len(d_out)}",
            )
        self.slots, self.layers, self.itemsize, self.device = slots, layers, itemsize, device
        self.d_in, self.d_out = tuple(d_in), tuple(d_out)
        shape = (slots, layers, MODULES)
        self.addresses = torch.zeros((*shape, 2), dtype=torch.int64, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self.flags = torch.zeros(shape, dtype=torch.int32, device=device)
        self.vectors = torch.zeros((*shape, 2), dtype=torch.int64, device=device)
        self.max_ranks_device = torch.zeros((slots, MODULES), dtype=torch.int32, device=device)
        self.row_list = torch.zeros(split_rows, dtype=torch.int64, device=device)
        self.max_ranks = np.zeros((slots, MODULES), dtype=np.int32)
        self.has_vectors = np.zeros(slots, dtype=bool)
        self.generations = np.zeros(slots, dtype=np.int64)
        self._free = [(0, split_rows)]
        self._held: dict[int, tuple[int, int]] = {}
        self._installed: dict[int, list[ModuleFactors]] = {}

    @classmethod
    def mirror_of(cls, table: AdapterTable, split_rows: int | None = None) -> FactorTable:
        """The mirror of an adapter table from now on; `sync` fills it. split_rows: None for what the table's pool can hold."""
        if split_rows is None:  # a factor of at most MAX_RANK rows is split only where it fills a page
            split_rows = min(table.pool.shape[0] * MAX_RANK, MAX_SPLIT_ROWS)
        dims = table.modules.dims
        shapes = [dims.get(module, (1, 1)) for module in LAYER_MODULES]
        mirror = cls(
            table.max_slots, table.modules.layers, [d_in for d_in, _ in shapes], [d_out for _, d_out in shapes],
            table.dtype.itemsize, table.pool.device, split_rows,
        )  # fmt: skip
        table.watch(mirror)
        return mirror

    def installed(self, slot: int, resident: ResidentAdapter) -> None:
        """Take room for a slot that is being installed; raises `operator_layout`, with nothing changed, where it cannot be."""
        modules = module_factors(resident)
        listed: list[int] = []
        seen: set[tuple[int, int]] = set()
        for entry in modules:
            self._check_entry(entry, seen)
            self._sides(entry, listed)
        free, held = list(self._free), self._held.pop(slot, None)
        if held is not None:
            self._give_back(*held)
        try:
            if listed:
                self._take(slot, len(listed))
        except InternalFault:
            self._free = free
            if held is not None:
                self._held[slot] = held
            raise
        self._installed[slot] = modules

    def emptied(self, slot: int) -> None:
        """Give the room of a slot back that was retired, or was never published. Its entry is cleared by the next `sync`."""
        self._installed.pop(slot, None)
        if slot in self._held:
            self._give_back(*self._held.pop(slot))

    def sync(self, table: AdapterTable) -> None:
        """Follow what was published and retired since the last call; enqueued on the current stream."""
        for slot in np.flatnonzero(self.generations != table.published).tolist():
            self._zero(slot)
            if table.published[slot]:
                self.write(slot, self._installed[slot])
            self.generations[slot] = table.published[slot]

    def write(self, slot: int, modules: Sequence[ModuleFactors]) -> None:
        """Fill an empty slot, in room that it holds or that is taken now. Copies are enqueued on the current stream, so
        launches enqueued later see all of it."""
        self._check_slot(slot)
        shape = (self.layers, MODULES)
        addresses, vectors = np.zeros((*shape, 2), np.int64), np.zeros((*shape, 2), np.int64)
        ranks, flags, scales = (
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
        )
        listed: list[int] = []
        seen: set[tuple[int, int]] = set()
        for entry in modules:
            self._check_entry(entry, seen)
            at = (entry.layer, entry.module)
            ranks[at], scales[at] = entry.rank, entry.scale
            addresses[at] = self._sides(entry, listed)
            flags[at] = HAS_G * (entry.g >= 0) + HAS_C * (entry.c >= 0) + HAS_H * (entry.h >= 0)
            for index, offset in enumerate((entry.g, entry.c)):
                vectors[(*at, index)] = max(offset, 0) // VECTOR_ITEMSIZE
        if listed:
            first = self._held[slot][0] if slot in self._held else self._take(slot, len(listed))
            addresses[addresses < 0] -= first
            self._send(self.row_list[first : first + len(listed)], np.array(listed, dtype=np.int64))
        self.max_ranks[slot] = ranks.max(axis=0, initial=0)
        self.has_vectors[slot] = bool((flags & (HAS_G | HAS_C)).any())
        for target, values in (
            (self.addresses, addresses), (self.ranks, ranks), (self.scales, scales), (self.flags, flags),
            (self.vectors, vectors), (self.max_ranks_device, self.max_ranks[slot]),
        ):  # fmt: skip
            self._send(target[slot], values)

    def _send(self, target: torch.Tensor, values: np.ndarray) -> None:
        """Copy without waiting: the source is the copy's own."""
        source = torch.from_numpy(values.copy())
        if self.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Empty a slot: rank 0 everywhere, so that a stale launch adds nothing. The slot may be empty already."""
        self._zero(slot)
        self.emptied(slot)

    def _zero(self, slot: int) -> None:
        self._check_slot(slot)
        for target in (self.ranks, self.max_ranks_device, self.flags, self.addresses):
            target[slot].zero_()
        self.max_ranks[slot] = 0
        self.has_vectors[slot] = False

    def _sides(self, entry: ModuleFactors, listed: list[int]) -> tuple[int, int]:
        """Addresses of A and B; those of split factors are -(1 + first) into `listed`, to which their rows are added."""
        a = self._address(entry, entry.a, self.d_in[entry.module], listed)
        return a, self._address(entry, entry.b, self.d_out[entry.module], listed)

    def _address(
        self, entry: ModuleFactors, extents: Sequence[tuple[int, int, int]], width: int, listed: list[int]
    ) -> int:
        row_bytes = width * self.itemsize
        at = 0
        for offset, rank_lo, rank_n in extents:
            if rank_lo != at or rank_n < 1 or offset % EXTENT_ALIGN_BYTES or offset < 0:
                raise self._refuse(
                    entry,
                    f"extent at byte {offset} with ranks {rank_lo}+{rank_n}: expected rank {at}, 16-byte start",
                )
            at += rank_n
        if at != entry.rank:
            raise self._refuse(entry, f"its extents cover {at} of {entry.rank} ranks")
        if not extents:
            return 0
        if len(extents) == 1 or all(
            extents[i][0] + extents[i][2] * row_bytes == extents[i + 1][0] for i in range(len(extents) - 1)
        ):
            return extents[0][0] // self.itemsize
        first = len(listed)
        for offset, _, rank_n in extents:
            listed.extend(offset // self.itemsize + row * width for row in range(rank_n))
        return -1 - first

    def _give_back(self, first: int, rows: int) -> None:
        """Room of a slot that was emptied, joined with what is free beside it."""
        joined: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (first, rows)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            elif room:
                joined.append((start, room))
        self._free = joined

    def _take(self, slot: int, rows: int) -> int:
        for index, (first, room) in enumerate(self._free):
            if room >= rows:
                self._free[index] = (first + rows, room - rows)
                self._held[slot] = (first, rows)
                return first
        raise InternalFault(
            ErrorCode.OPERATOR_LAYOUT,
            f"slot {slot} needs {rows} addresses of split factor rows, there is no such room among {self.row_list.numel()}",
        )

    def _check_entry(self, entry: ModuleFactors, seen: set[tuple[int, int]]) -> None:
        if not (0 <= entry.layer < self.layers and 0 <= entry.module < MODULES):
            raise self._refuse(entry, f"there are {self.layers} layers and {MODULES} modules")
        if (entry.layer, entry.module) in seen:
            raise self._refuse(entry, "named twice")
        seen.add((entry.layer, entry.module))
        if not 0 <= entry.rank <= MAX_RANK:
            raise InternalFault(
                ErrorCode.OPERATOR_RANK_UNSUPPORTED, f"rank must be 0 to {MAX_RANK}, got {entry.rank}"
            )
        for offset in (entry.g, entry.c, entry.h):
            if offset >= 0 and offset % EXTENT_ALIGN_BYTES:
                raise self._refuse(entry, f"vector at byte {offset}: expected a 16-byte start")

    def _check_slot(self, slot: int) -> None:
        if not 0 < slot < self.slots:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT, f"adapter slots run from 1 to {self.slots - 1}, got {slot}"
            )

    def _refuse(self, entry: ModuleFactors, why: str) -> InternalFault:
        return InternalFault(
            ErrorCode.OPERATOR_LAYOUT,
            f"factor table refused layer {entry.layer} module {entry.module}: {why}",
        )
