"""Per-row gather of a matrix-vector product: each active row runs its own adapter's factors, alone.

The exact-rank per-row path of 0x06C. Its result for a row cannot depend on any other row, by construction;
the cost is that an adapter's factors are read once for each of its rows. Specification: 0x02H.
"""

from __future__ import annotations

import torch

from loraplex.core.ids import Module
from loraplex.ops.rows import RowGroups
from loraplex.ops.torch_common import TorchOps, expand, finish, shrink


class BgmvOps(TorchOps):
    """Two products for each active row."""

    family = "bgmv"

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        for row in groups.group_rows.tolist():
            resident = self.resident(int(groups.adapters[row]), layer, module)
            if resident is None:
                continue
            own = slice(row, row + 1)
            delta = expand(shrink(x[own], resident), resident, y.shape[1]) if resident.rank else None
            y[own] = finish(y[own], delta, resident)
