"""Where each factor of each resident adapter lies, as kernels read it: the device mirror of the adapter
table.

int64 addresses [slots, layers, 7, (A, B)] in elements from the pool's start, ranks int32 and scales float32
[slots, layers, 7]. A factor that lies in one extent has its address; one that is split over pages has -(1 +
first) instead, and one address for each rank row in `row_list[first:]`. Vectors g and c have float32 element
addresses in `vectors`. Reads no factor, owns no page: it is told by whoever publishes. A slot is written
before any launch may name it and cleared after the last one (0x04E, 0x05E). Room for the addresses of split
factors is taken when a slot is installed: where there is none, or a factor is cut in a way that kernels do
not read, the load fails and no step.

Specification: 0x06E (ranks against extents), rulings "One page pool".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES
from loraplex.core.limits import MAX_RANK
from loraplex.ops.factor_entry import Factors, SlotEntry, make_entry, read_factors
from loraplex.ops.table import AdapterTable, ResidentAdapter
from loraplex.ops.work_layout import HAS_C, HAS_G, MODULES

MAX_SPLIT_ROWS: Final = 1 << 22
"""Addresses of split rank rows at most: 32 MiB of device memory."""


class FactorTable:
    """Device arrays over `slots` adapter slots; slot 0 stays empty.

    d_in, d_out: dimensions of the seven modules. itemsize: bytes of a factor element. split_rows: room for
    the rank rows of factors that are split over pages. Raises `operator_layout`, `operator_rank_unsupported`.
    """

    def __init__(
        self,
        slots: int,
        layers: int,
        d_in: Sequence[int],
        d_out: Sequence[int],
        itemsize: int,
        device: torch.device,
        split_rows: int = MAX_SPLIT_ROWS,
    ) -> None:
        if len(d_in) != MODULES or len(d_out) != MODULES:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"dimensions of {MODULES} modules expected, got {len(d_in)} and {len(d_out)}",
            )
        self.slots, self.layers, self.itemsize, self.device = slots, layers, itemsize, device
        self.d_in, self.d_out = tuple(d_in), tuple(d_out)
        self._widths = np.array([self.d_in, self.d_out], dtype=np.int64).T
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
        self._installed: dict[int, SlotEntry] = {}

    @classmethod
    def mirror_of(cls, table: AdapterTable, split_rows: int | None = None) -> FactorTable:
        """The mirror of an adapter table from now on; `sync` fills it. split_rows: None for what the table's
        pool can hold.
        """
        if split_rows is None:  # a factor of at most MAX_RANK rows is split only where it fills a page
            split_rows = min(table.pool.shape[0] * MAX_RANK, MAX_SPLIT_ROWS)
        dims = table.modules.dims
        shapes = [dims.get(module, (1, 1)) for module in LAYER_MODULES]
        mirror = cls(
            table.max_slots,
            table.modules.layers,
            [d_in for d_in, _ in shapes],
            [d_out for _, d_out in shapes],
            table.dtype.itemsize,
            table.pool.device,
            split_rows,
        )
        table.watch(mirror)
        return mirror

    def installed(self, slot: int, resident: ResidentAdapter) -> None:
        """Work out the entry of a slot that is being installed and take its room; raises `operator_layout`,
        with nothing changed.
        """
        entry = self._entry(read_factors(resident))
        free, held = list(self._free), self._held.pop(slot, None)
        if held is not None:
            self._give_back(*held)
        try:
            self._settle(slot, entry)
        except InternalFault:
            self._free = free
            if held is not None:
                self._held[slot] = held
            raise
        self._installed[slot] = entry

    def emptied(self, slot: int) -> None:
        """Give the room of a slot back that was retired, or was never published. Its entry is cleared by the
        next `sync`.
        """
        self._installed.pop(slot, None)
        if slot in self._held:
            self._give_back(*self._held.pop(slot))

    def sync(self, table: AdapterTable) -> None:
        """Follow what was published and retired since the last call; enqueued on the current stream."""
        for slot in np.flatnonzero(self.generations != table.published).tolist():
            if table.published[slot]:
                self._send_entry(slot, self._installed[slot])
            else:
                self._zero(slot)
            self.generations[slot] = table.published[slot]

    def _entry(self, factors: Factors) -> SlotEntry:
        return make_entry(factors, self.layers, self.itemsize, self._widths)

    def _settle(self, slot: int, entry: SlotEntry) -> None:
        """Take the room that a slot's split factors need, and place their addresses there."""
        if entry.listed.size:
            entry.addresses[entry.addresses < 0] -= self._take(slot, entry.listed.size)

    def _send_entry(self, slot: int, entry: SlotEntry) -> None:
        """Send everything of a slot from one page-locked buffer, without waiting."""
        self.max_ranks[slot] = entry.ranks.max(axis=0, initial=0)
        self.has_vectors[slot] = bool((entry.flags & (HAS_G | HAS_C)).any())
        pairs: list[tuple[torch.Tensor, np.ndarray]] = [
            (self.addresses[slot], entry.addresses), (self.vectors[slot], entry.vectors),
            (self.ranks[slot], entry.ranks),
            (self.flags[slot], entry.flags), (self.scales[slot], entry.scales),
            (self.max_ranks_device[slot], self.max_ranks[slot]),
        ]  # fmt: skip
        if entry.listed.size:
            first, rows = self._held[slot]
            pairs.insert(0, (self.row_list[first : first + rows], entry.listed))
        staged = torch.empty(
            sum(values.nbytes for _, values in pairs),
            dtype=torch.uint8,
            pin_memory=self.device.type == "cuda",
        )
        at = 0
        for target, values in pairs:  # those of 8 bytes come first, so that every part is aligned
            part = staged[at : at + values.nbytes]
            part.numpy()[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            target.copy_(part.view(target.dtype).view(target.shape), non_blocking=True)
            at += values.nbytes

    def _zero(self, slot: int) -> None:
        self._check_slot(slot)
        for target in (self.ranks, self.max_ranks_device, self.flags, self.addresses):
            target[slot].zero_()
        self.max_ranks[slot] = 0
        self.has_vectors[slot] = False

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
            f"slot {slot} needs {rows} addresses of split factor rows, there is no such room among "
            f"{self.row_list.numel()}",
        )

    def _check_slot(self, slot: int) -> None:
        if not 0 < slot < self.slots:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT, f"adapter slots run from 1 to {self.slots - 1}, got {slot}"
            )
