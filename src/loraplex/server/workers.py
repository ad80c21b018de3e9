"""Work that a caller's size drives, done outside the event loop: a few threads and a bounded queue in front
of them.

What streams meanwhile waits for an interpreter's switch at most. Who comes when the queue is full is refused,
typed. Never decides how much a caller may ask; that is checked before, against `core/limits.py`.

Specification: rulings "Processes", "Text".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from loraplex.core import limits
from loraplex.core.errors import CapacityError, ErrorCode

T = TypeVar("T")


class Workers:
    """Threads for texts, bodies and schemas."""

    def __init__(self, threads: int = limits.TEXT_THREADS, waiting: int = limits.MAX_WAITING_TEXTS) -> None:
        """waiting: pieces of work that may wait for a thread, beside those that have one."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._most = threads + waiting
        self._begun = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises `queue_full` where too much waits; a caller that leaves
        abandons it.
        """
        if self._begun >= self._most:
            raise CapacityError(
                ErrorCode.QUEUE_FULL,
                f"{self._begun} long texts are being read, the limit; try again in a moment",
            )
        self._begun += 1
        future = self._threads.submit(work)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended))
        return await asyncio.wrap_future(future)

    async def run_if(self, long: bool, work: Callable[[], T]) -> T:
        """Do `work` here, or outside the event loop if it is `long`."""
        return await self.run(work) if long else work()

    def _ended(self) -> None:
        self._begun -= 1

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
