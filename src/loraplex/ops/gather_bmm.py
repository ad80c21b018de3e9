"""Gather and batched product: rows are bucketed by true rank, their factors gathered into one batch for each
bucket.

The rank-bucketed path of 0x06C and 0x06E: every launch has one fixed rank, buckets in increasing rank,
results scattered by row. Factors are copied once for each row, which is what makes it slow and simple.
Specification: 0x02H, 0x06D "buckets by rank".
"""

from __future__ import annotations

import torch

from loraplex.core.ids import Module
from loraplex.core.layout import Factor
from loraplex.ops.rows import RowGroups
from loraplex.ops.table import ResidentModule
from loraplex.ops.torch_common import TorchOps, finish


def dense(module: ResidentModule, factor: Factor, columns: int) -> torch.Tensor:
    """A factor as one matrix [rank, columns]: the view itself where it is one piece, else a copy."""
    pieces = module.pieces(factor)
    if len(pieces) == 1:
        return pieces[0].view
    out = pieces[0].view.new_empty((module.rank, columns))
    for piece in pieces:
        rows = slice(piece.rank_lo, piece.rank_lo + piece.rank_n)
        out[rows, piece.col_lo : piece.col_lo + piece.col_n] = piece.view
    return out


class GatherBmmOps(TorchOps):
    """Two batched products for each distinct rank."""

    family = "gather_bmm"

    def _module(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, module: Module, groups: RowGroups
    ) -> None:
        buckets: dict[int, list[tuple[int, ResidentModule]]] = {}
        for row in groups.group_rows.tolist():
            resident = self.resident(int(groups.adapters[row]), layer, module)
            if resident is not None:
                buckets.setdefault(resident.rank, []).append((row, resident))
        for rank, bucket in sorted(buckets.items()):
            deltas = (
                self._bucket(x, [r for r, _ in bucket], [m for _, m in bucket], y.shape[1]) if rank else None
            )
            for index, (row, resident) in enumerate(bucket):
                own = slice(row, row + 1)
                y[own] = finish(y[own], None if deltas is None else deltas[index : index + 1], resident)

    @staticmethod
    def _bucket(x: torch.Tensor, rows: list[int], modules: list[ResidentModule], d_out: int) -> torch.Tensor:
        """Deltas in float32 [n, d_out] of n rows that share a rank."""
        a = torch.stack([dense(m, Factor.A, x.shape[1]) for m in modules]).float()
        b = torch.stack([dense(m, Factor.B, d_out) for m in modules]).float()
        scale = torch.tensor([m.scale for m in modules], dtype=torch.float32, device=x.device)
        own = x[torch.tensor(rows, device=x.device)].float().unsqueeze(1)
        z = torch.bmm(own, a.transpose(1, 2)).to(x.dtype).float()
        return torch.bmm(z, b).squeeze(1) * scale.unsqueeze(1)
