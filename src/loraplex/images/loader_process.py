"""The loader's process, a child of `images.loader.LoaderProcess`.

With one thread, one image after the other. With several, a few images are under way at once, so that the
threads are busy with the pages of the next while one is opened or named; answers come in the order in which
images are there.

Imports nothing heavy, so that it is there in a moment. Specification: rulings "Loading".
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from loraplex.core.errors import ErrorCode, LoraplexError
from loraplex.images.adoption import PageThreads
from loraplex.images.disk_store import ImageStore
from loraplex.images.host_store import HostStore
from loraplex.images.loader import LoaderAnswer, LoaderAsk, LoaderStart
from loraplex.process.parent import Parent, run_child

IMAGES_AT_ONCE: Final = 4
_asks: Final = msgspec.msgpack.Decoder(LoaderAsk)


def bring(
    kernel_digest: str, disk: ImageStore, host: ImageStore, threads: PageThreads | None = None
) -> LoaderAnswer:
    """Take an image of the disk store into the host store, every page verified as it lies there."""
    try:
        host.adopt(disk.open(kernel_digest), threads)
    except LoraplexError as error:
        return LoaderAnswer(kernel_digest, error.code.value, error.message)
    except Exception as error:  # noqa: BLE001 - the process's boundary: a fetch ends typed, whatever happens
        return LoaderAnswer(
            kernel_digest, ErrorCode.ADAPTER_LOAD_FAILED.value, f"{type(error).__name__}: {error}"
        )
    return LoaderAnswer(kernel_digest)


class Answers(Protocol):
    """Where answers go."""

    def send(self, message: LoaderAnswer) -> None:
        """Send one; the caller sees that there is one at a time."""
        ...


class Fetches:
    """Images under way. What is asked for one image happens in the order of the asks."""

    def __init__(self, answers: Answers, disk: ImageStore, host: ImageStore, threads: int) -> None:
        self._answers, self._disk, self._host = answers, disk, host
        self._sending = threading.Lock()
        self._under_way: dict[str, Future[None]] = {}
        self._pages = PageThreads(threads) if threads > 1 else None
        self._images = ThreadPoolExecutor(IMAGES_AT_ONCE, thread_name_prefix="images")

    def begin(self, kernel_digest: str) -> None:
        """Bring an image; with one thread it is there, and answered, on return."""
        if self._pages is None:
            self._bring(kernel_digest)
            return
        self._settle(kernel_digest)
        self._under_way = {digest: fetch for digest, fetch in self._under_way.items() if not fetch.done()}
        self._under_way[kernel_digest] = self._images.submit(self._bring, kernel_digest)

    def drop(self, kernel_digest: str) -> None:
        """Let go of an image, once a fetch of it has ended."""
        self._settle(kernel_digest)
        self._host.delete(kernel_digest)

    def close(self) -> None:
        """End the threads; what has not begun is not brought any more."""
        self._images.shutdown(cancel_futures=True)
        if self._pages is not None:
            self._pages.close()

    def _settle(self, kernel_digest: str) -> None:
        before = self._under_way.pop(kernel_digest, None)
        if before is not None:
            before.result()

    def _bring(self, kernel_digest: str) -> None:
        answer = bring(kernel_digest, self._disk, self._host, self._pages)
        with self._sending:
            self._answers.send(answer)


def run(parent: Parent, start: LoaderStart) -> int:
    """Bring and drop images until the parent closes its pipe."""
    with suppress(OSError):
        os.nice(start.nice)
    fetches = Fetches(parent, ImageStore(start.disk), HostStore(start.host), start.threads)
    try:
        while True:
            ask = parent.receive(_asks)
            (fetches.drop if ask.drop else fetches.begin)(ask.kernel_digest)
    finally:
        fetches.close()


if __name__ == "__main__":
    sys.exit(run_child(LoaderStart, run))
