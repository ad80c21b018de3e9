"""How tests wait: for what must come, however long a busy machine takes, and never for a moment.

What never comes ends the test by `LIMIT_S`, or by pytest's own limit, which is the longer one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol

import psutil

LIMIT_S = 280.0
PAUSE_S = 0.005
"""Between two questions: what is waited for needs the processor more than who asks."""


class Owner(Protocol):
    """Whatever runs a process."""

    @property
    def pid(self) -> int | None: ...


def run(test: Callable[[], Awaitable[None]], limit_s: float = LIMIT_S) -> None:
    """Run a test in an event loop; one that hangs is ended, and says where it was."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await test()

    asyncio.run(bounded())


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another process brings about."""
    pause = threading.Event()
    while not holds():
        pause.wait(PAUSE_S)


async def pause() -> None:
    """Between two questions of a loop that asks a server until its answer is the right one."""
    await asyncio.sleep(PAUSE_S)


def pid_of(owner: Owner) -> int:
    """Process id of what a supervisor runs. There must be one: a signal to 0 would go to the tests
    themselves.
    """
    assert owner.pid, "nothing runs that could be sent a signal"
    return owner.pid


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(*processes: psutil.Process) -> None:
    """Wait until processes have ended. Takes nobody's exit status; who adopted one may not have asked for it
    yet.
    """
    until(lambda: all(map(_is_gone, processes)))
