"""The adapter branch inside captured launches: the same for every mix, over static work lists, the shrink
beside the GEMM.

`TritonState.plan` fills the lists before a replay; here only launches are made, the same for every mix of
adapters. A capture names the fused groups that it serves, so that adapters on attention alone do not pay for
the feed-forward part.

Measured: docs/notes/cuda-operators.md ("Added time per layer"). Specification: 0x02H, 0x06E; rulings
"Operators".
"""

from __future__ import annotations

from typing import Final

import torch

from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.ops.interface import RowSet
from loraplex.ops.triton_lora import group_index
from loraplex.ops.triton_ops import TritonState
from loraplex.ops.worklist import Phase


class CapturedOps:
    """`AdapterOps` for capture.

    groups: fused groups that are launched. phases: whose rows are served; the lists of all of them must be
    filled or emptied before a replay. side: stream of the shrink of one phase, None: no overlap.
    """

    active: Final = True
    scales_input: Final = False

    def __init__(
        self,
        state: TritonState,
        groups: frozenset[int],
        side: torch.cuda.Stream | None = None,
        phases: tuple[Phase, ...] = (Phase.DECODE,),
    ) -> None:
        self._state, self._groups, self._phases = state, groups, phases
        self._side = side if len(phases) == 1 else None

    def scale_input(
        self, x: torch.Tensor, layer: int, module: Module, rows: RowSet = RowSet.ALL
    ) -> torch.Tensor:
        """x: adapters with an input vector are not captured."""
        return x

    def ahead(
        self, x: torch.Tensor, layer: int, modules: tuple[Module, ...], rows: RowSet = RowSet.ALL
    ) -> None:
        """Start the shrink, where it has a stream of its own."""
        group = self._group(modules)
        if group is None or self._side is None:
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._state.steps[self._phases[0]].shrink(x, layer, group)

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        modules: tuple[Module, ...],
        rows: RowSet = RowSet.ALL,
    ) -> None:
        """Join the shrink and add."""
        group = self._group(modules)
        if group is None:
            return
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
            self._state.steps[self._phases[0]].expand(y, layer, group)
            return
        self._state.apply(y, x, layer, group, self._phases)

    def embed(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """Nothing: embedding adapters are not captured."""

    def _group(self, modules: tuple[Module, ...]) -> int | None:
        if modules[0] not in LAYER_MODULES:
            return None
        group = group_index(modules)
        return group if group in self._groups else None
