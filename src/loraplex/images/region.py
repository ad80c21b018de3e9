"""One piece of shared memory for host images: found once, so that no load waits for memory, and page-locked
by a device.

A new page of shared memory costs the kernel several times the copy into it, and a device reads page-locked
memory alone without the processor's help. So a part of the host tier is a region of fixed size: a file of
zeros in the host folder, made before the loader starts. The loader places images in it and is the only one
that writes; whoever holds a device maps it, locks it and reads images where they lie. What finds no room
there is a file of its own (`image_file`).

Specification: 0x04A (pinned host staging); rulings "Loading".
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.images.image_file import failed

REGION_FILE: Final = "region"
ALIGN_BYTES: Final = 4096


class Region:
    """The region of a folder, mapped. memory: uint8 [bytes]. locked: whether a device may read it in
    place.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.locked = False

    @staticmethod
    def create(folder: Path, nbytes: int) -> None:
        """Make a region of `nbytes`, rounded down to whole pages of memory; raises OSError where it cannot
        be.
        """
        fd = os.open(folder / REGION_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, nbytes - nbytes % ALIGN_BYTES)
        finally:
            os.close(fd)

    @staticmethod
    def find(folder: Path) -> Region | None:
        """Map the region of a folder; None where it has none."""
        try:
            fd = os.open(folder / REGION_FILE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        return Region(np.frombuffer(mapped, dtype=np.uint8))

    def span(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A part of it, uint8 [nbytes]; raises `adapter_load_failed` for one that is not inside."""
        if offset % ALIGN_BYTES or not 0 <= offset <= offset + nbytes <= self.memory.size:
            raise failed(f"bytes {offset} to {offset + nbytes} are not in a region of {self.memory.size}")
        return self.memory[offset : offset + nbytes]


class Room:
    """Free parts of a region: the first that is large enough is taken, what comes back is joined with its
    neighbours.

    taken: (offset, bytes) of parts that are in use already. Safe for several threads.
    """

    def __init__(self, nbytes: int, taken: Sequence[tuple[int, int]] = ()) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []
        for offset, size in sorted(taken):
            self._carve(offset, _whole(size))

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        with self._lock:
            return sum(size for _, size in self._free)

    def take(self, nbytes: int) -> int | None:
        """Offset of a part of `nbytes`, None where no free part is so large."""
        size = _whole(nbytes)
        with self._lock:
            for offset, room in self._free:
                if room >= size:
                    self._carve(offset, size)
                    return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take a part back; raises `host_tier_state` for one that is free already."""
        with self._lock:
            parts = sorted([*self._free, (offset, _whole(nbytes))])
            joined: list[tuple[int, int]] = []
            for start, size in parts:
                end = sum(joined[-1]) if joined else 0
                if start < end:
                    raise InternalFault(
                        ErrorCode.HOST_TIER_STATE, f"bytes {offset} on of the region are given back twice"
                    )
                if joined and start == end:
                    joined[-1] = (joined[-1][0], joined[-1][1] + size)
                else:
                    joined.append((start, size))
            self._free = joined

    def _carve(self, offset: int, size: int) -> None:
        for index, (start, room) in enumerate(self._free):
            if start <= offset and offset + size <= start + room:
                after = (offset + size, start + room - offset - size)
                self._free[index : index + 1] = [part for part in ((start, offset - start), after) if part[1]]
                return
        raise InternalFault(ErrorCode.HOST_TIER_STATE, f"bytes {offset} on of the region are in use twice")


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
