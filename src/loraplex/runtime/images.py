"""The host store of adapter images: one file for each kernel digest, shared by all processes of a server.

A file appears by rename after its bytes are on disk and never changes afterwards, so a reader maps it and a delete
only unlinks it: maps that are open stay valid. A writer holds a lock on its temporary file, so what a killed writer
left behind is told from what a living one still writes. Implements `core.ports.ImageSource`.

Layout of a file, little-endian: header of `_HEADER`, SHA-256 of header and tables, modules int32 [n, 5], extents
int32 [n, 9], checksums int64 [pages], zeros up to a multiple of 4096, pages.

Specification: 0x04A (host tier), 0x05D (verified host source).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import EXTENT_COLUMNS, MODULE_COLUMNS, AdapterImage, page_checksum
from loraplex.identity.canonical import check_digest

MAGIC: Final = b"lpximg\x00\x03"
_HEADER: Final = struct.Struct(
    "<8sIIIIQ32s32s"
)  # magic, itemsize, modules, extents, pages, page bytes, key, kernel
_SEAL_BYTES: Final = 32
_ALIGN: Final = 4096
_SUFFIX: Final = ".image"
_TEMPORARY: Final = ".tmp-"
_FRONT_BYTES: Final = 1 << 16
"""What one read takes of a file's beginning; the tables of most images lie in it."""
_THREADS_FROM: Final = 4 << 20
"""An image of fewer bytes is not worth threads."""


def _failed(message: str) -> InternalFault:
    return InternalFault(ErrorCode.ADAPTER_LOAD_FAILED, message)


@dataclass(frozen=True, slots=True)
class _Header:
    itemsize: int
    modules: int
    extents: int
    pages: int
    page_bytes: int
    key: str
    kernel_digest: str

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC, self.itemsize, self.modules, self.extents, self.pages, self.page_bytes,
            bytes.fromhex(self.key), bytes.fromhex(self.kernel_digest),
        )  # fmt: skip

    @property
    def tables_bytes(self) -> int:
        return 4 * (self.modules * MODULE_COLUMNS + self.extents * EXTENT_COLUMNS) + 8 * self.pages

    @property
    def pages_at(self) -> int:
        end = _HEADER.size + _SEAL_BYTES + self.tables_bytes
        return -(-end // _ALIGN) * _ALIGN

    @property
    def file_bytes(self) -> int:
        return self.pages_at + self.pages * self.page_bytes


class ImageStore:
    """Images in `directory`, which is created when it is not there. Safe for several processes at once."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_abandoned()

    def put(self, image: AdapterImage) -> Path:
        """Store `image` durably and return its file. A whole one stays as it is, a damaged one is replaced.

        Raises `adapter_load_failed` when the image contradicts itself or the disk refuses it.
        """
        pages = np.ascontiguousarray(image.pages).reshape(-1).data
        return self._store(image, lambda fd, at: _write_all(fd, pages, at), durable=True)

    def adopt(self, image: AdapterImage, threads: int = 1) -> Path:
        """Take an image over from another store: each page is copied and the copy is summed, in one pass.

        So what lies here afterwards is what the checksums were made of, whatever the other store's bytes do meanwhile.
        threads: pages under way at once. Not synced to a disk: this store is a tier that a restart fills again. A whole
        image that is here stays as it is. Raises `adapter_load_failed` for a page without its checksum, or a full disk.
        """
        return self._store(image, lambda fd, at: _copy_pages(image, fd, at, threads), durable=False)

    def _store(self, image: AdapterImage, write_pages: Callable[[int, int], None], *, durable: bool) -> Path:
        """Make the image's file whole or not at all. write_pages: to a file descriptor, from an offset on."""
        header = _header_of(image)
        path = self._path(image.kernel_digest)
        if self._is_whole(image.kernel_digest):
            return path
        try:
            with self._temporary() as (fd, temporary):
                _write_all(fd, _front(header, image))
                write_pages(fd, header.pages_at)
                if durable:
                    os.fsync(fd)
                os.replace(temporary, path)
            if durable:
                _sync_directory(self._directory)
        except OSError as error:
            where = (
                "the disk behind LORAPLEX_CACHE, or behind TMPDIR for an LLM"
                if durable
                else "the shared memory that holds adapters on the host"
            )
            raise _failed(
                f"image {image.kernel_digest:.16} cannot be stored: {error.strerror}; look at {where}"
            ) from error
        return path

    def open(self, kernel_digest: str) -> AdapterImage:
        """The image, its arrays mapped read-only. Raises `adapter_load_failed` when it is not there or not whole.

        `read_page` reads the same file, also after its deletion: its descriptor lives as long as the image.
        """
        try:
            file = _PageFile(os.open(self._path(kernel_digest), os.O_RDONLY | os.O_CLOEXEC), kernel_digest)
        except OSError:
            raise _failed(f"image {kernel_digest:.16} is not in the store") from None
        try:
            return file.image()
        except BaseException:
            file.close()
            raise

    def verify(self, kernel_digest: str) -> AdapterImage:
        """`open`, and every page against its checksum."""
        image = self.open(kernel_digest)
        for page, (got, expected) in enumerate(zip(_checksums(image.pages), image.checksums, strict=True)):
            if got != expected:
                raise _failed(f"page {page} of image {kernel_digest:.16} does not have its checksum")
        return image

    def delete(self, kernel_digest: str) -> bool:
        """Remove an image; open maps stay valid. Returns whether it was there."""
        try:
            self._path(kernel_digest).unlink()
        except FileNotFoundError:
            return False
        return True

    def digests(self) -> tuple[str, ...]:
        """Kernel digests of all stored images, sorted."""
        return tuple(sorted(path.stem for path in self._directory.glob(f"*{_SUFFIX}")))

    def total_bytes(self) -> int:
        """Bytes of all stored images."""
        total = 0
        for path in self._directory.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process may delete it meanwhile
                total += path.stat().st_size
        return total

    def _is_whole(self, kernel_digest: str) -> bool:
        try:
            self.verify(kernel_digest)
        except InternalFault:  # absent or damaged: the caller writes it
            return False
        return True

    def _path(self, kernel_digest: str) -> Path:
        return self._directory / f"{check_digest('kernel_digest', kernel_digest)}{_SUFFIX}"

    @contextmanager
    def _temporary(self) -> Iterator[tuple[int, Path]]:
        """A locked temporary file, gone afterwards unless it was renamed."""
        while True:
            path = self._directory / f"{_TEMPORARY}{secrets.token_hex(16)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _lock(fd) and os.fstat(fd).st_nlink == 1:
                break
            os.close(fd)  # another process took it for abandoned between creation and lock
        try:
            yield fd, path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def _remove_abandoned(self) -> None:
        """Delete temporary files that nobody holds a lock on: their writer is gone."""
        for path in self._directory.glob(f"{_TEMPORARY}*"):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if _lock(fd):
                    path.unlink(missing_ok=True)
            finally:
                os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(fd: int, part: bytes | memoryview, at: int | None = None) -> None:
    """Write all of it: at the file's position, or from `at` on."""
    view, done = memoryview(part), 0
    while done < len(view):
        rest = view[done:]
        done += os.write(fd, rest) if at is None else os.pwrite(fd, rest, at + done)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _front(header: _Header, image: AdapterImage) -> bytes:
    """Everything before the pages."""
    tables = b"".join(
        np.ascontiguousarray(table, dtype=dtype).tobytes()
        for table, dtype in ((image.modules, "<i4"), (image.extents, "<i4"), (image.checksums, "<i8"))
    )
    head = header.pack()
    front = head + hashlib.sha256(head + tables).digest() + tables
    return front.ljust(header.pages_at, b"\0")


def _copy_pages(image: AdapterImage, fd: int, at: int, threads: int) -> None:
    """Copy each page into memory of our own, compare that with the checksum, and write it to its place in the file.

    Written, not mapped: a fault for every 4 KiB costs several times the copy.
    """
    page_bytes = image.pages.shape[1]
    buffers: SimpleQueue[npt.NDArray[np.uint8]] = SimpleQueue()
    threads = min(threads, len(image.pages)) if image.pages.nbytes >= _THREADS_FROM else 1
    for _ in range(threads):
        buffers.put(np.empty((1, page_bytes), dtype=np.uint8))

    def copy(page: int) -> bool:
        own = buffers.get()
        try:
            image.read_page(page, own[0])
            intact = bool(page_checksum(own)[0] == image.checksums[page])
            if intact:
                _write_all(fd, own.data.cast("B"), at + page * page_bytes)
            return intact
        finally:
            buffers.put(own)  # a page that fails must not leave the others waiting for its buffer

    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="images") as pool:
            intact = list(pool.map(copy, range(len(image.pages))))
    else:
        intact = [copy(page) for page in range(len(image.pages))]
    if not all(intact):
        raise _failed(
            f"page {intact.index(False)} of image {image.kernel_digest:.16} does not have its checksum"
        )


def _checksums(pages: npt.NDArray[np.uint8]) -> Iterator[np.int64]:
    for page in range(len(pages)):
        yield page_checksum(pages[page : page + 1])[0]


def _header_of(image: AdapterImage) -> _Header:
    pages, page_bytes = image.pages.shape
    modules, extents = len(image.modules), len(image.extents)
    if image.modules.shape != (modules, MODULE_COLUMNS) or image.extents.shape != (extents, EXTENT_COLUMNS):
        raise _failed(f"tables have the shapes {image.modules.shape} and {image.extents.shape}")
    if image.checksums.shape != (pages,):
        raise _failed(f"{pages} pages have {image.checksums.shape} checksums")
    check_digest("key", image.key)
    return _Header(image.itemsize, modules, extents, pages, page_bytes, image.key, image.kernel_digest)


class _PageFile:
    """An open file of the store, closed with the last reference to it: `layout.PageReader` of its image."""

    __slots__ = ("_at", "_digest", "_fd", "_page_bytes")

    def __init__(self, fd: int, kernel_digest: str) -> None:
        self._fd, self._digest = fd, kernel_digest
        self._at = self._page_bytes = 0

    def close(self) -> None:
        """Let go of the file; nothing is read from it any more."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close

    def read(self, index: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill `into` with a page; raises `adapter_load_failed` where the file ends before it does."""
        view, start, done = into.data, self._at + index * self._page_bytes, 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], start + done)
            if count == 0:
                raise _failed(f"image {self._digest:.16} ends at byte {start + done}, within page {index}")
            done += count

    def image(self) -> AdapterImage:
        """Decode it; its pages are mapped, and read by this object."""
        name, size = f"image {self._digest:.16}", os.fstat(self._fd).st_size
        if size < _HEADER.size + _SEAL_BYTES:
            raise _failed(f"{name} has {size} bytes, too few for a header")
        front = os.pread(self._fd, _FRONT_BYTES, 0)
        magic, itemsize, modules, extents, pages, page_bytes, key, kernel = _HEADER.unpack_from(front)
        header = _Header(itemsize, modules, extents, pages, page_bytes, key.hex(), kernel.hex())
        if magic != MAGIC:
            raise _failed(f"{name} starts with {magic!r}, expected {MAGIC!r}")
        if header.kernel_digest != self._digest:
            raise _failed(f"{name} holds the image {header.kernel_digest:.16}")
        if header.file_bytes != size:
            raise _failed(f"{name} has {size} bytes, its header implies {header.file_bytes}")
        start = _HEADER.size + _SEAL_BYTES
        end = start + header.tables_bytes
        if end > len(front):
            front += os.pread(self._fd, end - len(front), len(front))
        tables = front[start:end]
        if hashlib.sha256(front[: _HEADER.size] + tables).digest() != front[_HEADER.size : start]:
            raise _failed(f"{name} has tables that do not match their digest")
        self._at, self._page_bytes = header.pages_at, page_bytes
        mapped = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        ints = np.frombuffer(tables, dtype="<i4", count=modules * MODULE_COLUMNS + extents * EXTENT_COLUMNS)
        split = modules * MODULE_COLUMNS
        return AdapterImage(
            key=header.key,
            kernel_digest=self._digest,
            itemsize=itemsize,
            modules=ints[:split].reshape(modules, MODULE_COLUMNS),
            extents=ints[split:].reshape(extents, EXTENT_COLUMNS),
            pages=np.frombuffer(
                mapped, dtype=np.uint8, count=pages * page_bytes, offset=header.pages_at
            ).reshape(pages, page_bytes),
            checksums=np.frombuffer(tables, dtype="<i8", count=pages, offset=4 * ints.size),
            reader=self,
        )
