"""Stacked ranks: the rank rows of all active adapters in one product, a block mask keeps each row to its own.

With a physical rank, each adapter gets that many rows and its tail is zero: the padded indexed path of 0x06A
and 0x06C, which refuses ranks that do not fit. Without one, adapters are stacked at true rank. Few large
products instead of many small ones; factors are copied, and each row multiplies every adapter's.
Specification: 0x06A, 0x06D "padding to a maximum".
"""

from __future__ import annotations

import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.layout import Factor
from loraplex.core.plan import BatchPlan
from loraplex.ops.gather_bmm import dense
from loraplex.ops.rows import RowGroups
from loraplex.ops.table import AdapterTable, ResidentModule
from loraplex.ops.torch_common import TorchOps, finish


class StackedOps(TorchOps):
    """Two products for each module, whatever the number of adapters.

    physical_rank: rows that each adapter gets; None stacks true ranks.
    """

    family = "stacked"

    def __init__(self, plan: BatchPlan, table: AdapterTable, physical_rank: int | None = None) -> None:
        super().__init__(plan, table)
        self._physical_rank = physical_rank
        if physical_rank is not None:
            for slot, adapter in self._adapters.items():
                if (top := int(adapter.ranks.max())) > physical_rank:
                    raise InternalFault(
                        ErrorCode.OPERATOR_RANK_UNSUPPORTED,
                        f"rank {top} in adapter slot {slot} exceeds the physical rank {physical_rank}",
                    )

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        members: list[tuple[torch.Tensor, ResidentModule]] = []
        for index, slot in enumerate(groups.group_adapters.tolist()):
            resident = self.resident(slot, layer, module)
            if resident is not None:
                members.append((self._rows(groups, index), resident))
        if not members:
            return
        rows = torch.cat([r for r, _ in members])
        deltas = self._deltas(x.index_select(0, rows), members, y.shape[1])
        lo = 0
        for own, resident in members:
            hi = lo + own.numel()
            y[own] = finish(y[own], deltas[lo:hi] if resident.rank else None, resident)
            lo = hi

    def _deltas(
        self, x: torch.Tensor, members: list[tuple[torch.Tensor, ResidentModule]], d_out: int
    ) -> torch.Tensor:
        """Float32 [n, d_out] for the members' rows, one after the other in x [n, d_in]."""
        ranks = [m.rank if self._physical_rank is None else self._physical_rank for _, m in members]
        total = sum(ranks)
        if total == 0:
            return x.new_zeros((x.shape[0], d_out), dtype=torch.float32)
        a = x.new_zeros((total, x.shape[1]))
        b = x.new_zeros((total, d_out))
        mask = torch.zeros((x.shape[0], total), dtype=torch.float32, device=x.device)
        row = rank = 0
        for (own, resident), width in zip(members, ranks, strict=True):
            if resident.rank:
                a[rank : rank + resident.rank] = dense(resident, Factor.A, x.shape[1])
                b[rank : rank + resident.rank] = dense(resident, Factor.B, d_out)
                mask[row : row + own.numel(), rank : rank + resident.rank] = resident.scale
            row += own.numel()
            rank += width
        z = (x.float() @ a.float().T).to(x.dtype).float()
        # `where`, not a product with zero: another adapter's overflow must not reach this row as NaN.
        return torch.where(mask != 0, z * mask, 0.0) @ b.float()
