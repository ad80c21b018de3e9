"""Indexed segments: stable grouped row indices address x and y; rows stay in packed order.

Active rows are gathered once for a call, each group is a slice of the gathered matrix, and one scatter
through the same indices returns the results. Specification: 0x02D "Indexed rows", 0x02E.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from loraplex.core.ids import Module
from loraplex.ops.rows import RowGroups
from loraplex.ops.torch_common import TorchOps, expand, finish, shrink


class IndexedOps(TorchOps):
    """One gather, two products for each adapter, one scatter."""

    family = "indexed"

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        index = torch.from_numpy(groups.group_rows.astype(np.int64)).to(y.device)
        x_grouped, y_grouped = x.index_select(0, index), y.index_select(0, index)
        bounds = pairwise(groups.group_offsets.tolist())
        for slot, (lo, hi) in zip(groups.group_adapters.tolist(), bounds, strict=True):
            resident = self.resident(slot, layer, module)
            if resident is None:
                continue
            x_own, y_own = x_grouped[lo:hi], y_grouped[lo:hi]
            delta = expand(shrink(x_own, resident), resident, y.shape[1]) if resident.rank else None
            y_grouped[lo:hi] = finish(y_own, delta, resident)
        y.index_copy_(0, index, y_grouped)
