"""FlashInfer's norms and activation as the decoder's operators between GEMMs."""

from __future__ import annotations

import flashinfer
import torch


class FlashInferFused:
    """`FusedOps` for bfloat16 and float16 on CUDA."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `FusedOps.norm`."""
        out: torch.Tensor = flashinfer.rmsnorm(x, weight, eps)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `FusedOps.add_norm`; x is overwritten."""
        flashinfer.fused_add_rmsnorm(x, residual, weight, eps)
        return x

    def silu_mul(self, both: torch.Tensor) -> torch.Tensor:
        """See `FusedOps.silu_mul`."""
        out = torch.empty((both.shape[0], both.shape[1] // 2), dtype=both.dtype, device=both.device)
        flashinfer.silu_and_mul(both, out)
        return out
