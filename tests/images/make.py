"""Images of random bytes, and what tests of stores say of them."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import AdapterImage, page_checksum


def make_image(seed: int = 0, pages: int = 3, page_bytes: int = 256) -> AdapterImage:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    return AdapterImage(
        key="ab" * 32,
        kernel_digest=f"{seed:02x}" * 32,
        itemsize=2,
        modules=rng.integers(-(1 << 31), 1 << 31, (2, 5)).astype(np.int32),
        extents=rng.integers(0, 100, (5, 9)).astype(np.int32),
        pages=data,
        checksums=page_checksum(data),
    )


def same(a: AdapterImage, b: AdapterImage) -> bool:
    arrays = ("modules", "extents", "pages", "checksums")
    return (a.key, a.kernel_digest, a.itemsize) == (b.key, b.kernel_digest, b.itemsize) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays
    )


def refused(call: object, *args: object) -> str:
    with pytest.raises(InternalFault) as caught:
        call(*args)  # type: ignore[operator]
    assert caught.value.code is ErrorCode.ADAPTER_LOAD_FAILED
    return caught.value.message
