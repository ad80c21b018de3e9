"""Background tasks whose end somebody must hear of: nobody waits for them, so an error that ends one is
logged.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

T = TypeVar("T")


def reported(task: asyncio.Task[T], log: logging.Logger, consequence: str) -> asyncio.Task[T]:
    """The task. consequence: what is logged with the error that ends it, if one does."""

    def ended(done: asyncio.Task[T]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error(consequence, exc_info=error)

    task.add_done_callback(ended)
    return task
