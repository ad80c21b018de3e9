"""Small operators between the GEMMs of a layer: norms with residual, and the gated activation.

Owns the interface and its plain torch form, which is what every other form must agree with. Sums run in
float32, results are rounded once. Specification: rulings "Dependencies" (fused operators on CUDA).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class FusedOps(Protocol):
    """What the decoder asks for between GEMMs. x, residual: [T, hidden]; weight: [hidden]."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm, a new tensor."""
        ...

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x, in place, rounded; then the norm of it. x may be overwritten and returned."""
        ...

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of `both` [T, gate | up] -> [T, inner]."""
        ...


class TorchFused:
    """The operators in plain torch."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.norm`."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `FusedOps.add_norm`."""
        residual += x
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.silu_mul`."""
        inner = both.shape[1] // 2
        return F.silu(both[:, :inner]).mul_(both[:, inner:])
