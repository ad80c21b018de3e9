"""The disk store of adapter images: one file for each kernel digest, shared by all processes of a server.

A file appears by rename after its bytes are on disk and never changes afterwards, so a reader maps it and a
delete only unlinks it: maps that are open stay valid. What lies in the folder's region (`region`) is the
exception: its bytes are others' as soon as it is deleted, so whoever deletes it must know that nobody reads
it. A writer holds a lock on its temporary file, so what a killed writer left behind is told from what a
living one still writes. Implements `core.ports.ImageSource`.

`image_file` has the layout of a file, `adoption` the way an image takes from one store into another.

Specification: 0x04A (host tier), 0x05D (verified host source).
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import InternalFault
from loraplex.core.layout import AdapterImage, page_checksum
from loraplex.identity.canonical import check_digest
from loraplex.images.adoption import PageThreads, adopt_pages
from loraplex.images.image_file import ImageFile, failed, front, header_of
from loraplex.images.region import Region

_SUFFIX: Final = ".image"
_TEMPORARY: Final = ".tmp-"


class ImageStore:
    """Images in `directory`, which is created when it is not there. Safe for several processes at once."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._region: Region | None = None
        self._remove_abandoned()

    def region(self) -> Region | None:
        """The folder's region, mapped once; None where it has none."""
        if self._region is None:
            self._region = Region.find(self._directory)
        return self._region

    def put(self, image: AdapterImage) -> Path:
        """Store `image` durably and return its file. A whole one stays as it is, a damaged one is replaced.

        Raises `adapter_load_failed` when the image contradicts itself or the disk refuses it.
        """
        pages = np.ascontiguousarray(image.pages).reshape(-1).data

        def write(fd: int, beginning: bytes) -> None:
            write_all(fd, beginning)
            write_all(fd, pages)

        return self._store(image, write, durable=True)

    def adopt(self, image: AdapterImage, threads: PageThreads | None = None) -> Path:
        """Take an image over from another store: each page is copied and the copy is summed where it lies.

        So what lies here afterwards is what the checksums were made of, whatever the other store's bytes do
        meanwhile. threads: take pages beside each other; None: the caller's. Not synced to a disk: this store
        is a tier that a restart fills again. A whole image that is here stays as it is. Raises
        `adapter_load_failed` for a page without its checksum, or a full disk.
        """
        return self._store(
            image, lambda fd, beginning: adopt_pages(image, fd, beginning, threads), durable=False
        )

    def _store(self, image: AdapterImage, write: Callable[[int, bytes], None], *, durable: bool) -> Path:
        """Make the image's file whole or not at all. write: all of it to a file descriptor, after the given
        beginning.
        """
        beginning = front(header_of(image), image)
        if self._is_whole(image.kernel_digest):
            return self._path(image.kernel_digest)
        return self._write_file(image.kernel_digest, lambda fd: write(fd, beginning), durable=durable)

    def _write_file(self, kernel_digest: str, write: Callable[[int], None], *, durable: bool) -> Path:
        path = self._path(kernel_digest)
        try:
            with self._temporary() as (fd, temporary):
                write(fd)
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
            raise failed(
                f"image {kernel_digest:.16} cannot be stored: {error.strerror}; look at {where}"
            ) from error
        return path

    def open(self, kernel_digest: str) -> AdapterImage:
        """The image, its arrays mapped. Raises `adapter_load_failed` when it is not there or not whole.

        `read_page` reads the same file, also after its deletion: its descriptor lives as long as the image.
        Pages that lie in the region are not to be read after it.
        """
        try:
            file = ImageFile(os.open(self._path(kernel_digest), os.O_RDONLY | os.O_CLOEXEC), kernel_digest)
        except FileNotFoundError:
            raise failed(f"image {kernel_digest:.16} is not in the store") from None
        except OSError as error:
            raise failed(f"image {kernel_digest:.16} cannot be opened: {error.strerror}") from error
        try:
            return file.image(self.region)
        except BaseException:
            file.close()
            raise

    def verify(self, kernel_digest: str) -> AdapterImage:
        """`open`, and every page against its checksum."""
        image = self.open(kernel_digest)
        for page, (got, expected) in enumerate(zip(_checksums(image.pages), image.checksums, strict=True)):
            if got != expected:
                raise failed(f"page {page} of image {kernel_digest:.16} does not have its checksum")
        return image

    def delete(self, kernel_digest: str) -> bool:
        """Remove an image; open maps of files stay valid. Returns whether it was there."""
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


def write_all(fd: int, part: bytes | memoryview) -> None:
    """Write all of it at the file's position."""
    view, done = memoryview(part), 0
    while done < len(view):
        done += os.write(fd, view[done:])


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksums(pages: npt.NDArray[np.uint8]) -> Iterator[np.int64]:
    for page in range(len(pages)):
        yield page_checksum(pages[page : page + 1])[0]
