"""What the engine holds, and why: adapters that names stand for, adapters that requests are bound to, images
on disk.

A ledger: it is told what happened and answers questions; what happens is for `lifecycle.py`. An image is
given up when no name stands for its adapter, the engine has none of it, nothing is bound to it and no
preparation may name it. Whether the engine has an adapter is written down before the message is sent that
takes it away and, while one is sent that brings it, as *arriving*: between a question and its answer nobody
else sees the state of before.

Specification: 0x07H (leases); rulings "Leases".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.core.errors import LoraplexError


def _ignore(key: str) -> None:
    """Nobody waits for releases."""


class HeldAdapters:
    """Adapters by semantic digest. known: prepared here, with an image in the store. failures: what the
    engine refused to let go. released: called with a key to which nothing is bound any more.
    """

    def __init__(self, named: Callable[[str], bool], reclaim: Callable[[str], object]) -> None:
        """named: whether a name stands for a digest. reclaim: gives up the image of a kernel digest."""
        self.known: dict[str, PreparedAdapter] = {}
        self.failures: dict[str, LoraplexError] = {}
        self.endings: Counter[str] = Counter()
        self.released: Callable[[str], None] = _ignore
        self._named = named
        self._reclaim_image = reclaim
        self._preparing = 0
        self._unnamed: dict[str, str] = {}
        self._registered: set[str] = set()
        self._arriving: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        self._bound: Counter[str] = Counter()

    def __contains__(self, key: str) -> bool:
        """Whether the engine has it."""
        return key in self._registered

    def is_bound(self, key: str) -> bool:
        """Whether anything is bound to an adapter."""
        return self._bound[key] > 0

    def kernel_of(self, key: str) -> str | None:
        """Kernel digest of an adapter that was prepared here."""
        prepared = self.known.get(key)
        return None if prepared is None else prepared.register.kernel_digest

    @contextmanager
    def bound(self, key: str) -> Iterator[None]:
        """Something needs the adapter, and its image, until the context ends."""
        self._bound[key] += 1
        try:
            yield
        finally:
            _discount(self._bound, key)
            if not self._bound[key]:
                self.released(key)
                self.reclaim()

    @asynccontextmanager
    async def prepared(self, work: Awaitable[PreparedAdapter]) -> AsyncIterator[PreparedAdapter]:
        """Prepare an adapter; until the context ends, no image is reclaimed that it may have found in the
        store.
        """
        self._preparing += 1
        try:
            prepared = await work
            self._unnamed[prepared.register.kernel_digest] = prepared.identity.semantic
            yield prepared
        finally:
            self._preparing -= 1
            self.reclaim()

    @contextmanager
    def arriving(self, prepared: PreparedAdapter) -> Iterator[None]:
        """The engine is told of an adapter. It has it afterwards, unless it refused.

        Whoever is cancelled meanwhile does not hear the answer: then it may have it, and is asked to let it
        go.
        """
        key = prepared.identity.semantic
        self._arriving[key] += 1
        try:
            yield
        except LoraplexError:
            raise
        except BaseException:
            self._registered.add(key)
            self.known[key] = prepared
            raise
        else:
            self._registered.add(key)
            self.known[key] = prepared
        finally:
            _discount(self._arriving, key)

    @contextmanager
    def leaving(self, key: str) -> Iterator[bool]:
        """The engine is told to let an adapter go, whose image stays until it has. Yields whether it may have
        it.
        """
        there = key in self._registered or self._arriving[key] > 0
        self._registered.discard(key)
        self._leaving[key] += 1
        self.unnamed(key)
        try:
            yield there
        finally:
            _discount(self._leaving, key)
            self.reclaim()

    def unnamed(self, key: str) -> None:
        """A name no longer stands for an adapter: its image may go when everything else has let go of it."""
        kernel = self.kernel_of(key)
        if kernel is not None:
            self._unnamed[kernel] = key

    def forget_engine(self) -> None:
        """The engine was replaced by one that knows nothing."""
        self._registered.clear()

    def reclaim(self) -> None:
        """Give up images whose adapter nobody has or wants, unless a preparation may be about to name one."""
        if self._preparing:
            return
        for digest, key in list(self._unnamed.items()):
            if self._leaving[key] or self._arriving[key] or self._bound[key]:
                continue
            del self._unnamed[digest]
            if key not in self._registered and not self._named(key):
                self.known.pop(key, None)
                self._reclaim_image(digest)


def _discount(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
