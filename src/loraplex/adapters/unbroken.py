"""Changes that a cancellation must not leave half made: undone before their commit, finished after it.

A client that goes away cancels whoever works for it. What a thread has begun goes on all the same, so that a
database may hold a change that this process then knew nothing of. Specification: 0x07F (publication is one
point).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class Unbroken:
    """One change. Until the work calls `commit`, a cancellation is passed on to it; from there on it is put
    off.
    """

    def __init__(self) -> None:
        self._committing = False

    def commit(self) -> None:
        """From here on the work goes to its end."""
        self._committing = True

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the work. A cancellation is raised when the work has ended, whichever way
        that was.
        """
        task = asyncio.create_task(work)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                if cancelled is None and not self._committing:
                    task.cancel()
                cancelled = error
        if cancelled is None:
            return task.result()
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            _log.error("a change whose client has gone failed: %s", failed)
        raise cancelled
