"""Adapters by name: prepare, register with the engine, publish, swap, retire.

Order is what matters here. A name is published only after the engine has its adapter; the old one is retired only after
the name points elsewhere and no request of this process is bound to it; a failure before publication leaves everything
as it was. Two names may share one artifact, which leaves the engine with the last of them.

Never reads adapter files itself (the preparation does) and never touches pages.

Specification: 0x07F (swap by compare-and-set), 0x07H (leases), DESIGN 4 "Leases".
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from loraplex.catalog.memory import DEFAULT_NAMESPACE, AdapterCatalog, Revision
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.messages import Inspect, RemoveAdapter
from loraplex.runtime.controls import EngineCalls, ResidencyControls
from loraplex.runtime.prepare import PreparedAdapter

Prepare = Callable[[str], Awaitable[PreparedAdapter]]


def local_source(source: str, roots: Sequence[str | os.PathLike[str]]) -> str:
    """The folder behind a source that a remote caller named, links followed, if it lies in an allowed root.

    Raises `adapter_source_forbidden` otherwise, without saying whether the path exists.
    """
    path = Path(source)
    if "://" in source:
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"source {source!r} is not a local folder; give its path",
            param="source",
        )
    real = Path(os.path.realpath(path)) if "\0" not in source else path
    inside = any(real.is_relative_to(os.path.realpath(root)) for root in roots)
    if not path.is_absolute() or ".." in path.parts or "\0" in source or not inside:
        raise CallerError(
            ErrorCode.ADAPTER_SOURCE_FORBIDDEN,
            f"source {source!r} must be an absolute path without '..' that resolves into a folder given as --adapter-dir",
            param="source",
        )
    return str(real)


def _keep(kernel_digest: str) -> None:
    """Images stay where they are."""


class AdapterService:
    """What names mean now, kept in step with the engine. Its methods are called from one event loop."""

    def __init__(
        self,
        engine: EngineCalls,
        catalog: AdapterCatalog,
        prepare: Prepare,
        reclaim: Callable[[str], object] = _keep,
    ) -> None:
        """reclaim: called with the kernel digest of an image that no revision names any more."""
        self._engine = engine
        self._reclaim = reclaim
        self._preparing = 0
        self._unnamed: dict[str, str] = {}
        self._catalog = catalog
        self._prepare = prepare
        self._change = asyncio.Lock()
        self._registered: set[str] = set()
        self._bound: Counter[str] = Counter()
        self._retiring: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self.retire_failures: dict[str, LoraplexError] = {}
        self.controls = ResidencyControls(engine)

    def __iter__(self) -> Iterator[Revision]:
        return iter(self._catalog)

    @property
    def generation(self) -> int:
        """The catalog's generation."""
        return self._catalog.generation

    def resolve(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What `alias` or `alias@revision` means to a tenant now; `model_not_found` otherwise."""
        return self._catalog.resolve(name, tenant)

    def find(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> Revision | None:
        """Current revision of what a tenant means by `alias`, or None."""
        return self._catalog.find(alias, tenant)

    def visible(self, tenant: str = DEFAULT_NAMESPACE) -> list[Revision]:
        """What a tenant may use and list, by alias."""
        return self._catalog.visible(tenant)

    @contextmanager
    def bind(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Iterator[Revision]:
        """Resolve once and hold: the revision stays registered with the engine until the context ends."""
        revision = self._catalog.resolve(name, tenant)
        self._bound[revision.key] += 1
        try:
            yield revision
        finally:
            self._bound[revision.key] -= 1
            if not self._bound[revision.key]:
                del self._bound[revision.key]
                if revision.key in self._retiring:
                    self._retiring[revision.key][1].set()

    async def add(self, alias: str, source: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """Publish the first revision of a new alias; `adapter_exists` when it has one. tenant: whose namespace."""
        self._catalog.check_new(alias, tenant)
        async with self._prepared(source) as prepared, self._change:
            self._catalog.check_new(alias, tenant)
            await self._register(prepared)
            return self._catalog.add(alias, source, prepared, tenant)

    async def swap(
        self,
        alias: str,
        source: str,
        expected: int | None = None,
        tenant: str = DEFAULT_NAMESPACE,
        *,
        drain: bool = False,
    ) -> Revision:
        """Publish a new revision of an alias. expected: the revision to replace; another one is a conflict.

        The new one is on the device before the alias moves, if the old one is; `pool_exhausted` where there is no room
        for both. drain: move the alias at once, and load the new one into what the old one leaves.
        """
        self._catalog.check_swap(alias, expected, tenant)
        async with self._prepared(source) as prepared, self._change:
            return await self._swap(alias, source, prepared, expected, tenant, drain=drain)

    async def put(
        self,
        alias: str,
        source: str,
        expected: int | None = None,
        tenant: str = DEFAULT_NAMESPACE,
        *,
        drain: bool = False,
    ) -> Revision:
        """`add` a new alias, `swap` a known one; with `expected`, only a known one."""
        if self._catalog.get(alias, tenant) is None and expected is None:
            self._catalog.check_new(alias, tenant)
        else:
            self._catalog.check_swap(alias, expected, tenant)
        async with self._prepared(source) as prepared, self._change:
            if self._catalog.get(alias, tenant) is not None or expected is not None:
                return await self._swap(alias, source, prepared, expected, tenant, drain=drain)
            await self._register(prepared)
            return self._catalog.add(alias, source, prepared, tenant)

    async def remove(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """Take an alias away. It is unknown at once; its adapter leaves the engine when nothing uses it any more."""
        async with self._change:
            revision = self._catalog.remove(alias, tenant)
            await self.controls.unpin((tenant, alias))
            self._retire_later(revision)
            return revision

    async def pin(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> None:
        """Keep an alias on the device, whatever it stands for; `pool_exhausted` where pins leave too little."""
        async with self._change:
            await self.controls.pin((tenant, alias), self._catalog.current(alias, tenant).key)

    async def unpin(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> None:
        """Let an alias be evicted again."""
        async with self._change:
            self._catalog.current(alias, tenant)
            await self.controls.unpin((tenant, alias))

    async def prefetch(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> None:
        """Load an alias on speculation; `pool_exhausted` where that would take what requests will want."""
        await self.controls.prefetch(self._catalog.current(alias, tenant).key)

    async def revoke(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> list[Revision]:
        """Take away every name of what an alias stands for, and end its requests; it is never registered again."""
        async with self._change:
            key = self._catalog.current(alias, tenant).key
            gone = [revision for revision in self._catalog if revision.key == key]
            for revision in gone:
                self._catalog.remove(revision.alias, revision.namespace)
                self._unnamed[revision.prepared.register.kernel_digest] = key
            self._registered.discard(key)
            try:
                await self.controls.revoke(key)
            finally:
                self._reclaim_unnamed()
            return gone

    async def restore(self) -> dict[str, LoraplexError]:
        """Register everything with a restarted engine. Returns what could not be, by alias."""
        failed: dict[str, LoraplexError] = {}
        async with self._change:
            self._registered.clear()
            for revision in self._catalog:
                try:
                    await self._register(revision.prepared)
                except LoraplexError as error:
                    failed[revision.alias] = error
            await self.controls.restore()
        return failed

    async def describe(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> dict[str, Any]:
        """One adapter of a tenant's own with the engine's view of it (DESIGN 5)."""
        revision = self._catalog.current(alias, tenant)
        return revision.describe(await self._engine.call(Inspect(0)))

    async def describe_all(self, tenant: str = DEFAULT_NAMESPACE) -> list[dict[str, Any]]:
        """Every adapter that a tenant may list, by alias."""
        figures = await self._engine.call(Inspect(0))
        return [revision.describe(figures) for revision in self.visible(tenant)]

    async def settled(self) -> None:
        """Wait until nothing is on its way out of the engine."""
        while self._retiring:
            await asyncio.gather(*(task for task, _ in self._retiring.values()))

    async def close(self) -> None:
        """Give up waiting for adapters on their way out."""
        tasks = [task for task, _ in self._retiring.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _swap(
        self,
        alias: str,
        source: str,
        prepared: PreparedAdapter,
        expected: int | None,
        tenant: str,
        *,
        drain: bool,
    ) -> Revision:
        self._catalog.check_swap(alias, expected, tenant)
        key = prepared.identity.semantic
        await self._register(prepared)
        try:
            current = self._catalog.current(alias, tenant).key
            async with self.controls.swapping((tenant, alias), current, key, drain=drain):
                old, new = self._catalog.swap(alias, source, prepared, expected, tenant)
        except LoraplexError:
            await self._unregister(key)
            raise
        self._retire_later(old)
        return new

    async def _unregister(self, key: str) -> None:
        """After a publication that failed: the engine forgets what no name stands for."""
        if key in self._registered and not self._catalog.shares(key) and not self._bound[key]:
            self._registered.discard(key)
            with suppress(LoraplexError):  # an engine that is gone has forgotten it
                await self._engine.call(RemoveAdapter(0, key))

    @asynccontextmanager
    async def _prepared(self, source: str) -> AsyncIterator[PreparedAdapter]:
        """Prepare an adapter; until the context ends, no image is reclaimed that it may have found in the store."""
        self._preparing += 1
        try:
            prepared = await self._prepare(source)
            digest = prepared.register.kernel_digest
            self._unnamed[digest] = prepared.identity.semantic
            yield prepared
        finally:
            self._preparing -= 1
            self._reclaim_unnamed()

    def _reclaim_unnamed(self) -> None:
        """Give up images whose adapter the engine no longer has, unless a preparation may be about to name one."""
        if self._preparing:
            return
        for digest, key in list(self._unnamed.items()):
            if key not in self._retiring:
                del self._unnamed[digest]
                if key not in self._registered and not self._catalog.shares(key):
                    self._reclaim(digest)

    async def _register(self, prepared: PreparedAdapter) -> None:
        key = prepared.identity.semantic
        self.controls.require_not_revoked(key)
        if key not in self._registered:
            await self._engine.call(prepared.register)
            self._registered.add(key)

    def _retire_later(self, revision: Revision) -> None:
        key = revision.key
        self._unnamed[revision.prepared.register.kernel_digest] = key
        if self._catalog.shares(key) or key in self._retiring:
            return
        unbound = asyncio.Event()
        if not self._bound[key]:
            unbound.set()
        self._retiring[key] = (asyncio.create_task(self._retire(key, unbound)), unbound)

    async def _retire(self, key: str, unbound: asyncio.Event) -> None:
        """Remove `key` from the engine once nothing is bound to it, unless a name has taken it up again."""
        try:
            while True:
                await unbound.wait()
                async with self._change:
                    if self._catalog.shares(key) or key not in self._registered:
                        return
                    if not self._bound[key]:
                        self._registered.discard(key)
                        break
                    unbound.clear()
            # Sent before anything else can run, so a later registration of the same key comes after it.
            await self._engine.call(RemoveAdapter(0, key))
        except LoraplexError as error:
            self.retire_failures[key] = error
        finally:
            del self._retiring[key]
            self._reclaim_unnamed()
