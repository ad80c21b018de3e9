"""Fills the file of an image with another image's pages: each is read into the file's own memory and summed
there.

The new file is mapped, and nobody else has it: it is private until it is renamed. A write call would hold the
file against all other threads while memory is found for its pages, which takes longer than to copy them; a
mapping is filled by as many threads as there are. Memory is asked for ahead of a page, so that a full disk is
an error and not a signal.

Specification: 0x05D (verified host source), rulings "Loading".
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.layout import AdapterImage, page_checksum
from loraplex.images.image_file import failed

_THREADS_FROM: Final = 1 << 20
"""An image of fewer bytes is not worth threads."""
_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module has no name for it
_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PageThreads:
    """Threads that take pages, those of the first image first, for as long as a loader lives."""

    def __init__(self, count: int) -> None:
        """count: at least 2; a caller that wants one does without."""
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="pages")

    def run(self, work: Callable[[], list[int]], pages: int) -> list[int]:
        """What `work` returned on as many threads as there are pages for, joined, once all have ended.

        An exception of one is raised then.
        """
        parts = [self._pool.submit(work) for _ in range(min(self._count, pages))]
        wait(parts)
        return [page for part in parts for page in part.result()]

    def close(self) -> None:
        """End them, after what they have been given."""
        self._pool.shutdown()


def adopt_pages(image: AdapterImage, fd: int, beginning: bytes, threads: PageThreads | None) -> None:
    """Write `beginning` and then the image's pages to the empty file `fd`.

    Raises `adapter_load_failed` for a page without its checksum, OSError where there is no room.
    """
    size = len(beginning) + image.pages.nbytes
    os.ftruncate(fd, size)
    memory = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
    by_page = _populate(memory, 0, len(beginning))
    if not by_page:
        os.posix_fallocate(fd, 0, size)
    memory[: len(beginning)] = np.frombuffer(beginning, dtype=np.uint8)
    width = image.pages.shape[1]

    def before(page: int) -> None:
        if by_page:
            _populate(memory, len(beginning) + page * width, width)

    def after(page: int) -> None:
        # The bytes stay; one unmapping of all takes long.
        _advise(memory, len(beginning) + page * width, width, mmap.MADV_DONTNEED)

    fill_pages(image, memory[len(beginning) :].reshape(image.pages.shape), threads, before, after)


def fill_pages(
    image: AdapterImage,
    pages: npt.NDArray[np.uint8],
    threads: PageThreads | None,
    before: Callable[[int], object] = lambda page: None,
    after: Callable[[int], object] = lambda page: None,
) -> None:
    """Read each page of an image into `pages`, uint8 [pages, page_bytes], which nobody else has, and sum it
    there.

    before, after: what is done around each page. Raises `adapter_load_failed` for a page without its
    checksum.
    """
    turns = iter(range(len(pages)))  # shared by the threads: each takes the next page that nobody has taken

    def take() -> list[int]:
        return [page for page in turns if not intact(page)]

    def intact(page: int) -> bool:
        own = pages[page : page + 1]
        before(page)
        image.read_page(page, own[0])
        same = bool(page_checksum(own)[0] == image.checksums[page])
        after(page)
        return same

    damaged = take() if threads is None or pages.nbytes < _THREADS_FROM else threads.run(take, len(pages))
    if damaged:
        raise failed(f"page {min(damaged)} of image {image.kernel_digest:.16} does not have its checksum")


def populate(memory: npt.NDArray[np.uint8], threads: int) -> bool:
    """Find memory for a mapped file, several threads at a time; raises OSError where there is none left.

    False where the kernel cannot be asked, and none was found: whoever locks the memory finds it then, only
    later.
    """
    share = -(-memory.size // threads // mmap.PAGESIZE) * mmap.PAGESIZE
    starts = range(0, memory.size, share) if memory.size else ()
    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(lambda start: _populate(memory, start, min(share, memory.size - start)), starts))


def _populate(memory: npt.NDArray[np.uint8], start: int, nbytes: int) -> bool:
    """Find memory for a part of a mapped file; False where the kernel cannot be asked. Raises OSError when it
    is full.
    """
    error = _advise(memory, start, nbytes, _POPULATE_WRITE)
    if error == errno.EFAULT:  # what a write to it would end the process with
        error = errno.ENOSPC
    if error not in (0, errno.EINVAL):
        raise OSError(error, os.strerror(error))
    return error == 0


def _advise(memory: npt.NDArray[np.uint8], start: int, nbytes: int, advice: int) -> int:
    """madvise on all pages of memory that a part of a mapping touches; holds no lock of the interpreter. 0 or
    an errno.
    """
    low = start - start % mmap.PAGESIZE
    address = memory.ctypes.data + low
    return ctypes.get_errno() if _madvise(address, start + nbytes - low, advice) else 0
