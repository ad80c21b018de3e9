"""Host loop: for each adapter, each phase apart, two small matrix products over in-place views.

The plainest family, and the phase-split path of 0x06C: prefill rows and decode rows of one adapter are
computed in separate products, as their separate shapes invite (0x03). Specification: 0x02A, 0x02H.
"""

from __future__ import annotations

import torch

from loraplex.core.ids import Module
from loraplex.ops.rows import RowGroups
from loraplex.ops.torch_common import TorchOps, expand, finish, shrink


class TorchLoopOps(TorchOps):
    """Two products for each adapter and phase."""

    family = "torch_loop"

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        for index, slot in enumerate(groups.group_adapters.tolist()):
            resident = self.resident(slot, layer, module)
            if resident is None:
                continue
            rows = self._rows(groups, index)
            for part in (rows[rows < groups.doff], rows[rows >= groups.doff]):
                if part.numel() == 0:
                    continue
                delta = expand(shrink(x[part], resident), resident, y.shape[1]) if resident.rank else None
                y[part] = finish(y[part], delta, resident)
