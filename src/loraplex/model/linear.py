"""Dense projections, in the layout that their device multiplies fastest.

On a CPU with wide vectors the weight is packed once into panels for our own kernel (`ops/cpu/gemm.h`), whose
result for a row is the same bits in any batch; the plain copy is dropped. Where that kernel does not serve
(other types, narrow vectors, a matrix unit that the compiler does not know) oneDNN's reordered layout does,
and elsewhere the plain matrix. Measured: docs/notes/cpu-operators.md.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import torch
import torch.nn.functional as F

from loraplex.ops.cpu import compiled

ROWS_HINT: Final = 32
"""Rows that oneDNN's reordering is tuned for; one layout serves 1 to 512 rows equally well."""
_NAMES: Final = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ALIGN: Final = 64


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN reorders weights of this type on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def panel_kernel(dtype: torch.dtype, device: torch.device) -> compiled.Library | None:
    """The compiled library where its panels serve weights of this type: products as wide as the type, and in
    the matrix unit where the processor has one.
    """
    library = compiled.library() if device.type == "cpu" and dtype in _NAMES else None
    if library is None or library.vector_level < (2 if dtype is torch.bfloat16 else 1):
        return None
    if dtype is torch.bfloat16 and compiled.has_matrix_unit() and not library.matrix_unit:
        return None
    return library


class Arena:
    """One anonymous buffer for packed weights, in large pages where the system gives them: half as long to
    read.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(pages, dtype=torch.uint8)
        self._taken = 0

    @staticmethod
    def room(nbytes: int) -> int:
        """Bytes that a piece of `nbytes` takes."""
        return -(-nbytes // _ALIGN) * _ALIGN

    def take(self, nbytes: int) -> torch.Tensor:
        """The next piece, uint8 [nbytes], zeros."""
        start, self._taken = self._taken, self._taken + self.room(nbytes)
        return self._buffer[start : start + nbytes]


class Linear:
    """A weight [d_out, d_in] and a bias [d_out] or None."""

    __slots__ = ("_dtype", "_handle", "_packed", "_panels", "_plain", "bias", "shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._plain: torch.Tensor | None = weight
        self._packed: torch.Tensor | None = None
        self._panels: torch.Tensor | None = None
        self._handle: Any = None
        self._dtype = weight.dtype
        self.bias = bias
        self.shape = tuple(weight.shape)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, d_in] -> [n, d_out], contiguous; in `out` where it is given."""
        if out is not None:
            if self.bias is None and self._plain is not None:
                return torch.mm(x, self._plain.t(), out=out)
            return out.copy_(self(x))
        if self._panels is not None:
            return self._multiply(x)
        if self._plain is not None:
            return F.linear(x, self._plain, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    @property
    def weight(self) -> torch.Tensor:
        """The weight [d_out, d_in] as a plain matrix; made anew from the packed one, bit for bit."""
        if self._plain is not None:
            return self._plain
        if self._panels is not None:
            out = torch.empty(self.shape, dtype=self._dtype)
            unpack = getattr(self._handle, f"dense_unpack_{_NAMES[self._dtype]}")
            unpack(self._panels.data_ptr(), *self.shape, out.data_ptr())
            return out
        assert self._packed is not None
        return self._packed.to_dense()

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.shape[0] * self.shape[1] * self._dtype.itemsize + bias

    @property
    def panels(self) -> torch.Tensor | None:
        """The weight in panels for the compiled kernel, uint8, or None where another layout serves."""
        return self._panels

    def packed_bytes(self) -> int:
        """Bytes that `pack` takes from an arena; 0 where it takes none."""
        library = None if self._plain is None else panel_kernel(self._dtype, self._plain.device)
        if library is None:
            return 0
        return int(library.handle.dense_packed_bytes(*self.shape, self._dtype.itemsize))

    def pack(self, arena: Arena | None = None) -> None:
        """Reorder the weight for this device's kernels, if it has any; called once the weight is filled."""
        if self._plain is None:
            return
        library = panel_kernel(self._dtype, self._plain.device)
        if library is not None:
            size = self.packed_bytes()
            self._panels = (arena or Arena(size)).take(size)
            self._handle = library.handle
            source = self._plain.contiguous()
            pack = getattr(library.handle, f"dense_pack_{_NAMES[self._dtype]}")
            pack(source.data_ptr(), *self.shape, self._panels.data_ptr())
            self._plain = None
        elif can_pack(self._dtype, self._plain.device):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain, ROWS_HINT)
            self._plain = None

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        assert self._panels is not None
        columns, d_in = self.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        y = torch.empty((x.shape[0], columns), dtype=x.dtype)
        function = (
            self._handle.dense_bfloat16 if self._dtype is torch.bfloat16 else self._handle.dense_float32
        )
        function(
            self._panels.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            d_in,
            columns,
            x.shape[0],
            y.data_ptr(),
            columns,
            x.data_ptr(),
            x.stride(0),
        )
        return y
