"""One dense projection: y = x W^T + b, with the weight in the layout that the device multiplies fastest.

On a CPU the weight is reordered once for oneDNN's blocked kernels and the plain copy is dropped; measured on SmolLM2
shapes that takes 0.4 to 0.6 of the plain time at 8 rows (bfloat16, float32). Elsewhere, and where oneDNN lacks the
type, the plain matrix is used as it is.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

ROWS_HINT: Final = 32
"""Rows that the reordering is tuned for; one layout serves 1 to 512 rows equally well."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this type are reordered on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


class Linear:
    """A weight [d_out, d_in] and a bias [d_out] or None."""

    __slots__ = ("_packed", "_plain", "bias", "shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._plain: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None
        self.bias = bias
        self.shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, d_in] -> [n, d_out], contiguous; in `out` where it is given."""
        if out is not None:
            if self.bias is None and self._plain is not None:
                return torch.mm(x, self._plain.t(), out=out)
            return out.copy_(self(x))
        if self._plain is not None:
            return F.linear(x, self._plain, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    @property
    def weight(self) -> torch.Tensor:
        """The weight [d_out, d_in] as a plain matrix; made anew from the reordered one, bit for bit."""
        if self._plain is not None:
            return self._plain
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        own = self._plain if self._plain is not None else self._packed
        assert own is not None
        bias = 0 if self.bias is None else self.bias.nbytes
        return own.numel() * own.element_size() + bias

    def pack(self) -> None:
        """Reorder the weight for this device's kernels, if it has any; called once the weight is filled."""
        if self._plain is None or not can_pack(self._plain.dtype, self._plain.device):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain, ROWS_HINT)
        self._plain = None
