"""Element types of adapter weights, the tensor record, and exact conversion between types.

bfloat16 has no numpy type: its bit patterns live in uint16. Conversion rounds to nearest, ties to even, and
refuses what would become infinite. Specification: 0x01G (tensor content hashes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from loraplex.artifact.refuse import not_finite

Array = npt.NDArray[np.generic]
F32Array = npt.NDArray[np.float32]

BLOCK: Final = 1 << 16
"""Elements handled at a time, so that temporaries stay in the cache."""


class Dtype(StrEnum):
    """Element types that adapters are read and served in."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self is Dtype.FLOAT32 else 2

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The numpy type that carries the bit patterns."""
        return _STORAGE[self]


_STORAGE: Final[dict[Dtype, np.dtype[np.generic]]] = {
    Dtype.FLOAT32: np.dtype("<f4"),
    Dtype.FLOAT16: np.dtype("<f2"),
    Dtype.BFLOAT16: np.dtype("<u2"),
}
_EXPONENT: Final[dict[Dtype, int]] = {
    Dtype.FLOAT32: 0x7F80_0000,
    Dtype.FLOAT16: 0x7C00,
    Dtype.BFLOAT16: 0x7F80,
}


class TensorHeader(Protocol):
    """What a file says of a tensor before its data is read."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        ...

    @property
    def dtype(self) -> Dtype:
        """Its element type."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        ...


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file, as it was read.

    name: its name in the file. data: bit patterns in `dtype.storage`, C-contiguous, of `shape`, read-only.
    sha256: hexadecimal digest of exactly these bytes.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    data: Array
    sha256: str

    def float32(self) -> F32Array:
        """The values, exactly."""
        return to_float32(self.data, self.dtype)


def to_float32(data: Array, dtype: Dtype) -> F32Array:
    """Values of bit patterns; exact for all three types."""
    if dtype is Dtype.BFLOAT16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.astype(np.float32)


def is_finite(data: Array, dtype: Dtype) -> bool:
    """Whether no element is NaN or infinite. data: any shape, C-contiguous."""
    mask = _EXPONENT[dtype]
    flat: npt.NDArray[np.unsignedinteger] = data.reshape(-1).view(f"<u{dtype.itemsize}")
    magnitude = (1 << (8 * dtype.itemsize - 1)) - 1
    for start in range(0, flat.size, BLOCK):
        if int((flat[start : start + BLOCK] & magnitude).max()) >= mask:
            return False
    return True


def convert(data: Array, source: Dtype, target: Dtype, name: str) -> Array:
    """`data` in another element type, same shape, rounded to nearest even.

    Raises `adapter_not_finite` naming tensor `name` where a finite value does not fit the target type.
    """
    if source is target:
        return data
    if target is Dtype.FLOAT32:
        return to_float32(data, source)
    out = np.empty(data.shape, dtype=target.storage)
    flat_in, flat_out = np.ascontiguousarray(data).reshape(-1), out.reshape(-1)
    for start in range(0, flat_in.size, BLOCK):
        block = to_float32(flat_in[start : start + BLOCK], source)
        flat_out[start : start + BLOCK] = _round(block, target)
    if not is_finite(out, target):
        largest = float(np.abs(to_float32(data, source)).max())
        raise not_finite(
            name, f"tensor {name} holds {largest:g}, which does not fit {target.value}; serve it in float32"
        )
    return out


def _round(block: F32Array, target: Dtype) -> Array:
    if target is Dtype.FLOAT16:
        with np.errstate(over="ignore"):  # an overflow becomes infinity, which the caller refuses by name
            return block.astype(np.float16)
    bits = np.ascontiguousarray(block).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
