"""Adapters on their way out of the engine of a server: each waits until nothing is bound to it, in a task of
its own.

A retirement ends with the adapter gone, or with a name that stands for it again. What is registered once more
while its removal is under way is retired once more, by the same task. Specification: 0x07H; rulings "Leases".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from loraplex.adapters.lifecycle import Lifecycle


class Retirement:
    """Tasks by semantic digest. Called from one event loop."""

    def __init__(self, life: Lifecycle, named: Callable[[str], bool], lock: asyncio.Lock) -> None:
        """named: whether a name stands for a digest. lock: held while names or registrations change."""
        self._life = life
        self._named = named
        self._lock = lock
        self._unbound: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        life.held.released = self._released

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What waits for adapters on their way out."""
        return list(self._tasks.values())

    def later(self, key: str) -> None:
        """Let an adapter leave the engine when no name stands for it and nothing is bound to it."""
        if key not in self._life.held.known:
            return
        self._life.held.unnamed(key)
        if self._named(key) or key in self._tasks:  # the task looks again before it ends
            return
        self._unbound[key] = asyncio.Event()
        self._tasks[key] = asyncio.create_task(self._retire(key))

    def _released(self, key: str) -> None:
        if key in self._unbound:
            self._unbound[key].set()

    async def _retire(self, key: str) -> None:
        held, unbound = self._life.held, self._unbound[key]
        try:
            # No await lies between the last look of a turn and the end: `later` finds the task, or none.
            while key in held and not self._named(key):
                if held.is_bound(key):
                    unbound.clear()
                    await unbound.wait()
                async with self._lock:
                    leaves = key in held and not self._named(key) and not held.is_bound(key)
                if (
                    leaves
                ):  # sent before anything else can run, so a later registration of the key comes after it
                    await self._life.leave(key)
        finally:
            del self._tasks[key], self._unbound[key]
            held.reclaim()
