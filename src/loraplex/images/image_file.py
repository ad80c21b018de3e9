"""The file of one adapter image: its layout, and an open one that pages are read from.

Layout, little-endian: header of `_HEADER`, SHA-256 of header and tables, modules int32 [n, 5], extents int32
[n, 9], checksums int64 [pages], zeros up to a multiple of 4096, pages. Where the pages lie in the folder's
region (`region`), the file has another magic and, in place of pages, an int64 that says where; the SHA-256
covers it. Knows nothing of where files lie or who writes them.

Specification: 0x04A (host tier), 0x05D (verified host source).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import EXTENT_COLUMNS, MODULE_COLUMNS, AdapterImage
from loraplex.identity.canonical import check_digest

MAGIC: Final = b"lpximg\x00\x03"
PLACED_MAGIC: Final = b"lpxplc\x00\x01"
_PLACE: Final = struct.Struct("<q")
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
    placed: bool = False

    def pack(self) -> bytes:
        """Its bytes."""
        return _HEADER.pack(
            PLACED_MAGIC if self.placed else MAGIC,
            self.itemsize,
            self.modules,
            self.extents,
            self.pages,
            self.page_bytes,
            bytes.fromhex(self.key),
            bytes.fromhex(self.kernel_digest),
        )

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
        return self.pages_at + (_PLACE.size if self.placed else self.pages * self.page_bytes)


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
    head, tables = header.pack(), _tables(image)
    return (head + hashlib.sha256(head + tables).digest() + tables).ljust(header.pages_at, b"\0")


def placed_file(image: AdapterImage, offset: int) -> bytes:
    """The whole file of an image whose pages lie in the region from `offset` on."""
    header = replace(header_of(image), placed=True)
    head, tables, place = header.pack(), _tables(image), _PLACE.pack(offset)
    seal = hashlib.sha256(head + tables + place).digest()
    return (head + seal + tables).ljust(header.pages_at, b"\0") + place


def _tables(image: AdapterImage) -> bytes:
    return b"".join(
        np.ascontiguousarray(table, dtype=dtype).tobytes()
        for table, dtype in ((image.modules, "<i4"), (image.extents, "<i4"), (image.checksums, "<i8"))
    )


class Places(Protocol):
    """Memory of a region. locked: whether a device may read it in place."""

    locked: bool

    def span(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A part of it, uint8 [nbytes]; raises `adapter_load_failed` for one that is not inside."""
        ...


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
        """Fill `into` with pages from `index` on; raises `adapter_load_failed` where the file ends before
        they do.
        """
        view, start, done = into.data.cast("B"), self._at + index * self.pages.shape[1], 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], start + done)
            if count == 0:
                within = index + done // self.pages.shape[1]
                raise failed(f"image {self._digest:.16} ends at byte {start + done}, within page {within}")
            done += count

    def image(self, region: Callable[[], Places | None]) -> AdapterImage:
        """Decode it; its pages are mapped and read by this object, or lie in the region. Raises
        `adapter_load_failed`.
        """
        header, tables, offset = self._decode()
        shape, nbytes = (header.pages, header.page_bytes), header.pages * header.page_bytes
        places = None
        if offset is None:
            mapped = mmap.mmap(self._fd, header.file_bytes, prot=mmap.PROT_READ)
            pages = np.frombuffer(mapped, dtype=np.uint8, count=nbytes, offset=header.pages_at).reshape(shape)
            self._at, self.pages = header.pages_at, pages
        else:
            places = region()
            if places is None:
                raise failed(f"image {self._digest:.16} lies in a region that is not there")
            pages = places.span(offset, nbytes).reshape(shape)
        ints = np.frombuffer(
            tables, dtype="<i4", count=header.modules * MODULE_COLUMNS + header.extents * EXTENT_COLUMNS
        )
        split = header.modules * MODULE_COLUMNS
        return AdapterImage(
            key=header.key,
            kernel_digest=self._digest,
            itemsize=header.itemsize,
            modules=ints[:split].reshape(header.modules, MODULE_COLUMNS),
            extents=ints[split:].reshape(header.extents, EXTENT_COLUMNS),
            pages=pages,
            checksums=np.frombuffer(tables, dtype="<i8", count=header.pages, offset=4 * ints.size),
            reader=self if places is None else None,
            locked=places is not None and places.locked,
        )

    def place(self) -> tuple[int, int] | None:
        """(offset, bytes) of an image that lies in the region, None for any other. Raises
        `adapter_load_failed`.
        """
        header, _, offset = self._decode()
        return None if offset is None else (offset, header.pages * header.page_bytes)

    def _decode(self) -> tuple[Header, bytes, int | None]:
        """Header, tables, and where in the region the pages lie."""
        name, size = f"image {self._digest:.16}", os.fstat(self._fd).st_size
        if size < _HEADER.size + _SEAL_BYTES:
            raise failed(f"{name} has {size} bytes, too few for a header")
        front = os.pread(self._fd, _FRONT_BYTES, 0)
        magic, itemsize, modules, extents, pages, page_bytes, key, kernel = _HEADER.unpack_from(front)
        if magic not in (MAGIC, PLACED_MAGIC):
            raise failed(f"{name} starts with {magic!r}, expected {MAGIC!r}")
        placed = magic == PLACED_MAGIC
        header = Header(itemsize, modules, extents, pages, page_bytes, key.hex(), kernel.hex(), placed)
        if header.kernel_digest != self._digest:
            raise failed(f"{name} holds the image {header.kernel_digest:.16}")
        if header.file_bytes != size:
            raise failed(f"{name} has {size} bytes, its header implies {header.file_bytes}")
        start = _HEADER.size + _SEAL_BYTES
        end = start + header.tables_bytes
        needed = size if placed else end
        if needed > len(front):
            front += os.pread(self._fd, needed - len(front), len(front))
        tables, place = front[start:end], front[header.pages_at : size] if placed else b""
        if hashlib.sha256(front[: _HEADER.size] + tables + place).digest() != front[_HEADER.size : start]:
            raise failed(f"{name} has tables that do not match their digest")
        return header, tables, _PLACE.unpack(place)[0] if placed else None
