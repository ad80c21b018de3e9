"""The file of one adapter image: its layout, and an open one that pages are read from.

Layout, little-endian: header of `_HEADER`, SHA-256 of header and tables, modules int32 [n, 5], extents int32 [n, 9],
checksums int64 [pages], zeros up to a multiple of 4096, pages. Knows nothing of where files lie or who writes them.

Specification: 0x04A (host tier), 0x05D (verified host source).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import EXTENT_COLUMNS, MODULE_COLUMNS, AdapterImage
from loraplex.identity.canonical import check_digest

MAGIC: Final = b"lpximg\x00\x03"
_HEADER: Final = struct.Struct(
    "<8sIIIIQ32s32s"
)  # magic, itemsize, modules, extents, pages, page bytes, key, kernel
_SEAL_BYTES: Final = 32
_ALIGN: Final = 4096
_FRONT_BYTES: Final = 1 << 16
"""What one read takes of a file's beginning; the tables of most images lie in it."""


def failed(message: str) -> InternalFault:
    """The fault of an image that cannot be stored or read."""
    return InternalFault(ErrorCode.ADAPTER_LOAD_FAILED, message)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself before its tables. key, kernel_digest: 64 hexadecimal characters."""

    itemsize: int
    modules: int
    extents: int
    pages: int
    page_bytes: int
    key: str
    kernel_digest: str

    def pack(self) -> bytes:
        """Its bytes."""
        return _HEADER.pack(
            MAGIC, self.itemsize, self.modules, self.extents, self.pages, self.page_bytes,
            bytes.fromhex(self.key), bytes.fromhex(self.kernel_digest),
        )  # fmt: skip

    @property
    def tables_bytes(self) -> int:
        """Bytes of the three tables."""
        return 4 * (self.modules * MODULE_COLUMNS + self.extents * EXTENT_COLUMNS) + 8 * self.pages

    @property
    def pages_at(self) -> int:
        """Where the first page begins."""
        end = _HEADER.size + _SEAL_BYTES + self.tables_bytes
        return -(-end // _ALIGN) * _ALIGN

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.pages_at + self.pages * self.page_bytes


def header_of(image: AdapterImage) -> Header:
    """The header of an image; raises `adapter_load_failed` where it contradicts itself."""
    pages, page_bytes = image.pages.shape
    modules, extents = len(image.modules), len(image.extents)
    if image.modules.shape != (modules, MODULE_COLUMNS) or image.extents.shape != (extents, EXTENT_COLUMNS):
        raise failed(f"tables have the shapes {image.modules.shape} and {image.extents.shape}")
    if image.checksums.shape != (pages,):
        raise failed(f"{pages} pages have {image.checksums.shape} checksums")
    check_digest("key", image.key)
    return Header(image.itemsize, modules, extents, pages, page_bytes, image.key, image.kernel_digest)


def front(header: Header, image: AdapterImage) -> bytes:
    """Everything before the pages."""
    tables = b"".join(
        np.ascontiguousarray(table, dtype=dtype).tobytes()
        for table, dtype in ((image.modules, "<i4"), (image.extents, "<i4"), (image.checksums, "<i8"))
    )
    head = header.pack()
    front = head + hashlib.sha256(head + tables).digest() + tables
    return front.ljust(header.pages_at, b"\0")


class ImageFile:
    """An open file of the store, closed with the last reference to it: `layout.PageReader` of its image."""

    __slots__ = ("_at", "_digest", "_fd", "pages")

    def __init__(self, fd: int, kernel_digest: str) -> None:
        self._fd, self._digest, self._at = fd, kernel_digest, 0
        self.pages = np.empty((0, 0), dtype=np.uint8)

    def close(self) -> None:
        """Let go of the file; nothing is read from it any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def read(self, index: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill `into` with pages from `index` on; raises `adapter_load_failed` where the file ends before they do."""
        view, start, done = into.data.cast("B"), self._at + index * self.pages.shape[1], 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], start + done)
            if count == 0:
                within = index + done // self.pages.shape[1]
                raise failed(f"image {self._digest:.16} ends at byte {start + done}, within page {within}")
            done += count

    def image(self) -> AdapterImage:
        """Decode it; its pages are mapped, and read by this object."""
        name, size = f"image {self._digest:.16}", os.fstat(self._fd).st_size
        if size < _HEADER.size + _SEAL_BYTES:
            raise failed(f"{name} has {size} bytes, too few for a header")
        front = os.pread(self._fd, _FRONT_BYTES, 0)
        magic, itemsize, modules, extents, pages, page_bytes, key, kernel = _HEADER.unpack_from(front)
        header = Header(itemsize, modules, extents, pages, page_bytes, key.hex(), kernel.hex())
        if magic != MAGIC:
            raise failed(f"{name} starts with {magic!r}, expected {MAGIC!r}")
        if header.kernel_digest != self._digest:
            raise failed(f"{name} holds the image {header.kernel_digest:.16}")
        if header.file_bytes != size:
            raise failed(f"{name} has {size} bytes, its header implies {header.file_bytes}")
        start = _HEADER.size + _SEAL_BYTES
        end = start + header.tables_bytes
        if end > len(front):
            front += os.pread(self._fd, end - len(front), len(front))
        tables = front[start:end]
        if hashlib.sha256(front[: _HEADER.size] + tables).digest() != front[_HEADER.size : start]:
            raise failed(f"{name} has tables that do not match their digest")
        mapped = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        flat = np.frombuffer(mapped, dtype=np.uint8, count=pages * page_bytes, offset=header.pages_at)
        self._at, self.pages = header.pages_at, flat.reshape(pages, page_bytes)
        ints = np.frombuffer(tables, dtype="<i4", count=modules * MODULE_COLUMNS + extents * EXTENT_COLUMNS)
        split = modules * MODULE_COLUMNS
        return AdapterImage(
            key=header.key,
            kernel_digest=self._digest,
            itemsize=itemsize,
            modules=ints[:split].reshape(modules, MODULE_COLUMNS),
            extents=ints[split:].reshape(extents, EXTENT_COLUMNS),
            pages=self.pages,
            checksums=np.frombuffer(tables, dtype="<i8", count=pages, offset=4 * ints.size),
            reader=self,
        )
