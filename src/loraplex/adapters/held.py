"""What the engine holds, and why: adapters that names stand for, adapters that requests are bound to, images on disk.

An adapter is registered before a name means it and leaves the engine when no name stands for it and no request is bound
to it; its image goes when nobody can name it any more. Knows nothing of names but whether one stands for an artifact.

Specification: 0x07H (leases); rulings "Leases".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.residency_controls import EngineCalls
from loraplex.core.errors import LoraplexError
from loraplex.core.messages import RemoveAdapter


class HeldAdapters:
    """Adapters by semantic digest. `change`: held while names or registrations change."""

    def __init__(
        self,
        engine: EngineCalls,
        named: Callable[[str], bool],
        reclaim: Callable[[str], object],
        check: Callable[[str], None],
    ) -> None:
        """named: whether a name stands for a digest. reclaim: gives up the image of a kernel digest.

        check: raises for a digest that must not be registered.
        """
        self.change = asyncio.Lock()
        self.known: dict[str, PreparedAdapter] = {}
        self.failures: dict[str, LoraplexError] = {}
        self._engine = engine
        self._named = named
        self._reclaim = reclaim
        self._check = check
        self._preparing = 0
        self._unnamed: dict[str, str] = {}
        self._registered: set[str] = set()
        self._bound: Counter[str] = Counter()
        self._retiring: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def __contains__(self, key: str) -> bool:
        """Whether the engine has it."""
        return key in self._registered

    def kernel_of(self, key: str) -> str | None:
        """Kernel digest of an adapter that was prepared here."""
        prepared = self.known.get(key)
        return None if prepared is None else prepared.register.kernel_digest

    @contextmanager
    def bound(self, key: str) -> Iterator[None]:
        """A request needs the adapter until the context ends."""
        self._bound[key] += 1
        try:
            yield
        finally:
            self._bound[key] -= 1
            if not self._bound[key]:
                del self._bound[key]
                if key in self._retiring:
                    self._retiring[key][1].set()

    @asynccontextmanager
    async def prepared(self, work: Awaitable[PreparedAdapter]) -> AsyncIterator[PreparedAdapter]:
        """Prepare an adapter; until the context ends, no image is reclaimed that it may have found in the store."""
        self._preparing += 1
        try:
            prepared = await work
            self._unnamed[prepared.register.kernel_digest] = prepared.identity.semantic
            yield prepared
        finally:
            self._preparing -= 1
            self._reclaim_unnamed()

    async def register(self, prepared: PreparedAdapter) -> None:
        """Have the engine know an adapter. Under `change`."""
        key = prepared.identity.semantic
        self._check(key)
        if key not in self._registered:
            await self._engine.call(prepared.register)
            self._registered.add(key)
        self.known[key] = prepared

    async def unregister(self, key: str) -> None:
        """After a publication that failed: the engine forgets what no name stands for. Under `change`."""
        if key in self._registered and not self._named(key) and not self._bound[key]:
            self._registered.discard(key)
            with suppress(LoraplexError):  # an engine that is gone has forgotten it
                await self._engine.call(RemoveAdapter(0, key))

    async def revoked(self, key: str, revoke: Callable[[str], Awaitable[None]]) -> None:
        """Have `revoke` end an adapter and everything bound to it, if the engine has it, and give up its image.

        What the engine refuses is kept in `failures`.
        """
        prepared = self.known.get(key)
        if prepared is not None:
            self._unnamed[prepared.register.kernel_digest] = key
        registered = key in self._registered
        self._registered.discard(key)
        self.failures.pop(key, None)
        try:
            if registered:
                await revoke(key)
        except LoraplexError as error:
            self.failures[key] = error
        finally:
            self._reclaim_unnamed()

    def forget_engine(self) -> None:
        """The engine was replaced by one that knows nothing. Under `change`."""
        self._registered.clear()

    def retire_later(self, key: str) -> None:
        """Let an adapter leave the engine when no name stands for it and nothing is bound to it."""
        prepared = self.known.get(key)
        if prepared is None:
            return
        self._unnamed[prepared.register.kernel_digest] = key
        if self._named(key) or key in self._retiring:
            return
        unbound = asyncio.Event()
        if not self._bound[key]:
            unbound.set()
        self._retiring[key] = (asyncio.create_task(self._retire(key, unbound)), unbound)

    @property
    def leaving(self) -> list[asyncio.Task[None]]:
        """What waits for adapters on their way out."""
        return [task for task, _ in self._retiring.values()]

    async def _retire(self, key: str, unbound: asyncio.Event) -> None:
        """Remove `key` from the engine once nothing is bound to it, unless a name has taken it up again."""
        try:
            while True:
                await unbound.wait()
                async with self.change:
                    if self._named(key) or key not in self._registered:
                        return
                    if not self._bound[key]:
                        self._registered.discard(key)
                        break
                    unbound.clear()
            # Sent before anything else can run, so a later registration of the same key comes after it.
            await self._engine.call(RemoveAdapter(0, key))
        except LoraplexError as error:
            self.failures[key] = error
        finally:
            del self._retiring[key]
            self._reclaim_unnamed()

    def _reclaim_unnamed(self) -> None:
        """Give up images whose adapter the engine no longer has, unless a preparation may be about to name one."""
        if self._preparing:
            return
        for digest, key in list(self._unnamed.items()):
            if key not in self._retiring:
                del self._unnamed[digest]
                if key not in self._registered and not self._named(key):
                    self.known.pop(key, None)
                    self._reclaim(digest)
