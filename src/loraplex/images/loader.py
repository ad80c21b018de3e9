"""The host tier's hands: brings verified images from the disk store into shared memory, in a process of its
own.

`core.ports.Loader` for an engine. The child is niced, so that it takes what a step leaves of the processor;
it reads an image from the disk store, compares every page with its checksum, and writes it to the host store,
where backends map it. A child that dies fails what it was asked for, typed, and is replaced for the next
fetch; the engine tries again.

The engine's thread only writes short frames and reads what has arrived.
Specification: rulings "Loading", "Processes".
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from loraplex.core.errors import ErrorCode, LoraplexError
from loraplex.core.ports import Fetched
from loraplex.images.disk_store import ImageStore
from loraplex.process.child import BlockingChild, describe_exit
from loraplex.process.pipe import Failed, PipeClosed
from loraplex.process.workdir import private_folder, remove_abandoned

_log: Final = logging.getLogger(__name__)
MODULE: Final = "loraplex.images.loader_process"
SHARED_MEMORY: Final = Path("/dev/shm")
HOST_SHARE: Final = 0.25
"""Part of the machine's memory that host images may take unless told otherwise."""
_WAIT_S: Final = 0.002
_UNANSWERED: Final = 32
"""Fetches that the child has been sent and has not answered: its pipe never fills."""
STOP_GRACE_S: Final = 2.0
MOST_THREADS: Final = 8
"""Threads of a loader that need not yield: a few move bytes as fast as memory lets them."""


class LoaderStart(msgspec.Struct, frozen=True):
    """What a loader is to do. disk, host: folders of the two stores. nice: added to its niceness. threads:
    that copy and verify pages; with one, images come one after the other.
    """

    disk: str
    host: str
    nice: int
    threads: int


class LoaderAsk(msgspec.Struct, frozen=True, array_like=True):
    """Fetch an image, or drop it."""

    kernel_digest: str
    drop: bool = False


class LoaderAnswer(msgspec.Struct, frozen=True, tag=True):
    """The end of a fetch."""

    kernel_digest: str
    code: str | None = None
    message: str = ""


_answers: Final[msgspec.msgpack.Decoder[LoaderAnswer | Failed]] = msgspec.msgpack.Decoder(
    LoaderAnswer | Failed
)


class InlineLoader:
    """`core.ports.Loader` where the caller's thread prepares adapters itself: the disk store is mapped where
    it lies.
    """

    def __init__(self, disk: ImageStore) -> None:
        self._disk = disk
        self._asked: deque[str] = deque()

    def fetch(self, kernel_digest: str) -> None:
        """Remember it for the next poll."""
        self._asked.append(kernel_digest)

    def drop(self, kernel_digest: str) -> None:
        """The store keeps its file."""

    def poll(self, wait: bool) -> Sequence[Fetched]:
        """Verify one image."""
        if not self._asked:
            return ()
        digest = self._asked.popleft()
        try:
            self._disk.verify(digest)
        except LoraplexError as error:
            return (Fetched(digest, error.code.value, error.message),)
        return (Fetched(digest),)

    def close(self) -> None:
        """Nothing is held."""


class LoaderProcess:
    """`core.ports.Loader` over a child process."""

    def __init__(self, disk: str | os.PathLike[str], host: str | os.PathLike[str], nice: int = 10) -> None:
        """disk, host: folders of the two image stores. nice: 0 where the device is not the processor; one
        that yields takes one thread.
        """
        threads = 1 if nice else min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._start = LoaderStart(os.fspath(disk), os.fspath(host), nice, threads)
        self._child: BlockingChild | None = None
        self._waiting: deque[str] = deque()
        self._asked: list[str] = []
        self._ended: list[Fetched] = []
        self._host = ImageStore(host)
        self._kept: set[str] = set()
        """What arrived and was not dropped."""
        self._said = ""
        """Why the child cannot go on, if it said so."""

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before the first fetch and after a death."""
        return None if self._child is None else self._child.pid

    def fetch(self, kernel_digest: str) -> None:
        """Ask the child; one is started where there is none."""
        self._waiting.append(kernel_digest)
        self._send_waiting()

    def drop(self, kernel_digest: str) -> None:
        """Tell the child; where there is none the file goes at once, and the next child's books do not have
        it.
        """
        self._kept.discard(kernel_digest)
        if self._child is None:
            self._host.delete(kernel_digest)
        else:
            self._send(LoaderAsk(kernel_digest, drop=True))

    def poll(self, wait: bool) -> Sequence[Fetched]:
        """Read what has arrived, and notice a death."""
        if self._child is not None:
            try:
                for payload in self._child.poll(_WAIT_S if wait and not self._ended else 0):
                    self._take(_answers.decode(payload))
            except PipeClosed:
                self._died()
        self._send_waiting()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stop(STOP_GRACE_S)
            self._child = None

    def _take(self, answer: LoaderAnswer | Failed) -> None:
        if isinstance(answer, Failed):
            self._said = f": {answer.message}"
        elif answer.kernel_digest in self._asked:
            self._asked.remove(answer.kernel_digest)
            if answer.code is None:
                self._kept.add(answer.kernel_digest)
            self._ended.append(Fetched(answer.kernel_digest, answer.code, answer.message))

    def _send_waiting(self) -> None:
        while self._waiting and len(self._asked) < _UNANSWERED:
            digest = self._waiting.popleft()
            if self._child is None and not self._spawn(digest):
                continue
            self._asked.append(digest)
            self._send(LoaderAsk(digest))

    def _spawn(self, kernel_digest: str) -> bool:
        """Start a child; False, with the fetch that wanted one failed, when the system refuses."""
        self._said = ""
        try:
            self._child = BlockingChild.start(MODULE, "the loader process")
        except LoraplexError as error:
            self._ended.append(Fetched(kernel_digest, ErrorCode.ADAPTER_LOAD_FAILED.value, error.message))
            return False
        self._send(self._start)
        return True

    def _send(self, message: LoaderStart | LoaderAsk) -> None:
        if self._child is None:
            return
        try:
            self._child.send(message)
        except PipeClosed:
            self._died()

    def _died(self) -> None:
        """Everything that the child was asked for has failed; the next fetch starts another.

        What it brought unsaid, or was told to drop and did not, takes no memory that nobody counts.
        """
        if self._child is None:
            return
        how = f"{describe_exit(self._child.ended(STOP_GRACE_S))}{self._said}"
        self._child = None
        _log.warning("the loader process is gone: %s", how)
        for digest in self._host.digests():
            if digest not in self._kept:
                self._host.delete(digest)
        asked, self._asked = self._asked, []
        text = f"the loader process died ({how}) while it brought the image"
        self._ended += [Fetched(digest, ErrorCode.ADAPTER_LOAD_FAILED.value, text) for digest in asked]


@contextmanager
def host_folder(beside: Path, wanted_bytes: int | None) -> Iterator[tuple[Path, int, str]]:
    """A private folder for host images, their bound in bytes, and a sentence on both.

    In shared memory where there is room for the bound, else beside the disk store: mapped files of the page
    cache then.
    """
    limit = wanted_bytes if wanted_bytes is not None else int(_memory_bytes() * HOST_SHARE)
    parent = SHARED_MEMORY / f"loraplex-{os.getuid()}"
    with suppress(OSError):  # what a killed server left takes no room from this one
        remove_abandoned(parent)
    room = _free_bytes(SHARED_MEMORY)
    where = "in shared memory"
    if wanted_bytes is None:
        limit = min(limit, int(room * 0.9)) if room >= limit // 4 else limit
    if room < limit:
        parent, where = (
            beside / "host",
            f"in files, because {SHARED_MEMORY} has room for {room >> 20} MiB only",
        )
    with private_folder(parent) as folder:
        yield folder, limit, f"host images: at most {limit >> 20} MiB, {where}"


def in_shared_memory(folder: Path) -> bool:
    """Whether a folder of `host_folder` lies in shared memory, and not in files."""
    return folder.is_relative_to(SHARED_MEMORY)


def _free_bytes(folder: Path) -> int:
    try:
        info = os.statvfs(folder)
    except OSError:
        return 0
    return info.f_bavail * info.f_frsize if os.access(folder, os.W_OK) else 0


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
