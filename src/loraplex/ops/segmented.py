"""Contiguous segments: each run of rows with one adapter is a slice of x and y; nothing is gathered or
scattered.

A run may cross `doff` and request boundaries: adapter identity is all that matters to a projection (0x03B).
The same adapter may own several runs and its factors are then read once for each. Specification: 0x02B, 0x02D
"Contiguous intervals".
"""

from __future__ import annotations

from itertools import pairwise

import torch

from loraplex.core.ids import BASE_SLOT, Module
from loraplex.ops.rows import RowGroups
from loraplex.ops.torch_common import TorchOps, expand, finish, shrink


class SegmentedOps(TorchOps):
    """Two products for each contiguous run."""

    family = "segmented"

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        bounds = pairwise(groups.segment_offsets.tolist())
        for slot, (lo, hi) in zip(groups.segment_adapters.tolist(), bounds, strict=True):
            resident = None if slot == BASE_SLOT else self.resident(slot, layer, module)
            if resident is None:
                continue
            delta = expand(shrink(x[lo:hi], resident), resident, y.shape[1]) if resident.rank else None
            y[lo:hi] = finish(y[lo:hi], delta, resident)
