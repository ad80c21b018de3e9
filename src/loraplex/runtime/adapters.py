"""Adapters by name: prepare, register with the engine, publish, swap, retire.

Order is what matters here. A name is published only after the engine has its adapter; the old one is retired only after
the name points elsewhere and no request of this process is bound to it; a failure before publication leaves everything
as it was. Two names may share one artifact, which leaves the engine with the last of them.

The catalog may know revisions that this process has never read: those of an earlier run, and those that another server
published. They are read from their source when they are first asked for, or in the background, and served only if
their digest is the recorded one. Database calls run in a thread of their own.

Never reads adapter files itself (the preparation does) and never touches pages.

Specification: 0x07F (swap by compare-and-set), 0x07H (leases), DESIGN 4 "Leases".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Final, Protocol, TypeVar

from loraplex.catalog.adapters import AdapterCatalog, draft_of
from loraplex.catalog.records import DEFAULT_NAMESPACE, Revision, Right
from loraplex.catalog.store import OPERATOR, Expectation, Mode
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.messages import Inspect
from loraplex.runtime.held import EngineCalls, HeldAdapters
from loraplex.runtime.prepare import PreparedAdapter

_log: Final = logging.getLogger(__name__)
FOLLOW_EVERY_S: Final = 0.5
"""How often a shared catalog is asked whether others published: how long a removal elsewhere may go unseen."""
T = TypeVar("T")


class Prepare(Protocol):
    """Reads, verifies and converts an adapter. content: its key in the artifact store, where it is known."""

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        """The prepared adapter, its image in the store; raises `adapter_*`."""
        ...


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
        self._catalog = catalog
        self._prepare = prepare
        self._held = HeldAdapters(engine, catalog.shares, reclaim)
        self._getting_ready: dict[str, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="catalog")
        self._unread: list[Revision] = []
        self._reader: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[Revision]:
        return iter(self._catalog)

    @property
    def generation(self) -> int:
        """The catalog's generation."""
        return self._catalog.generation

    @property
    def retire_failures(self) -> dict[str, LoraplexError]:
        """Removals that the engine refused, by semantic digest."""
        return self._held.failures

    @property
    def catalog(self) -> AdapterCatalog:
        """The catalog behind the names."""
        return self._catalog

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do something that waits for the catalog's database, in the thread that does so."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Names

    def resolve(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What `alias` or `alias@revision` means to a tenant now; `model_not_found` otherwise."""
        return self._catalog.resolve(name, tenant)

    def current(self, alias: str, namespace: str = DEFAULT_NAMESPACE) -> Revision:
        """Current revision of an alias; `adapter_not_found` otherwise."""
        return self._catalog.current(alias, namespace)

    def find(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision | None:
        """Current revision of what a tenant that may list it means by a name, or None."""
        return self._catalog.view.find(tenant, name, Right.LIST)

    def visible(self, tenant: str = DEFAULT_NAMESPACE) -> list[tuple[str, Revision]]:
        """(its name for the tenant, revision) of everything that a tenant may list, by name."""
        return self._catalog.view.visible(tenant)

    def target(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> tuple[str, str]:
        """(namespace, alias) that a tenant means by a name under which it publishes."""
        return self._catalog.view.target(tenant, name)

    def owned(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """What a tenant means by a name that it changes; raises `adapter_not_found`, and `forbidden` for others'."""
        return self._catalog.view.owned(tenant, name)

    @contextmanager
    def bind(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Iterator[Revision]:
        """Resolve once and hold: the revision stays registered with the engine until the context ends."""
        revision = self._catalog.resolve(name, tenant)
        with self._held.bound(revision.key):
            yield revision

    @asynccontextmanager
    async def serving(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> AsyncIterator[Revision]:
        """`bind`, with the engine ready for the revision. A name that is not known may have been published elsewhere
        a moment ago: the catalog is asked once more before it is refused.
        """
        if self._catalog.shared:
            try:
                self._catalog.resolve(name, tenant)
            except CallerError:
                await self.refresh()
        with self.bind(name, tenant) as revision:
            await self.ready(revision)
            yield revision

    async def ready(self, revision: Revision) -> None:
        """Have the engine know a revision, reading it first where this process never did.

        Raises what its preparation raises; `adapter_source_changed` when the source holds something else by now,
        `adapter_base_mismatch` when it was published for another base.
        """
        key = revision.key
        while key not in self._held:
            task = self._getting_ready.get(key)
            if task is None:
                task = asyncio.create_task(self._get_ready(revision))
                self._getting_ready[key] = task
                task.add_done_callback(lambda done: self._got_ready(key, done))
            await asyncio.shield(task)

    def _got_ready(self, key: str, task: asyncio.Task[None]) -> None:
        self._getting_ready.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever waits hears it too; nobody may wait

    async def _get_ready(self, revision: Revision) -> None:
        known = self._held.known.get(revision.key)
        if known is not None:
            async with self._held.change:
                await self._held.register(known)
            return
        async with self._prepared(revision.source, revision.content) as prepared:
            identity = prepared.identity
            if identity.base != revision.artifact.base:
                raise CallerError(
                    ErrorCode.ADAPTER_BASE_MISMATCH,
                    f"{revision.name} was published for base {revision.artifact.base:.16}, this server has "
                    f"{identity.base:.16}; serve it there",
                    param="model",
                )
            if identity.semantic != revision.key:
                raise CallerError(
                    ErrorCode.ADAPTER_SOURCE_CHANGED,
                    f"{revision.name} is artifact {revision.artifact.artifact:.16}, but its source now holds "
                    f"{identity.artifact:.16}; publish that as a new revision",
                    param="model",
                )
            async with self._held.change:
                await self._held.register(prepared)
                if not self._catalog.shares(revision.key):
                    self._held.retire_later(revision.key)

    # Changes

    async def add(
        self, alias: str, source: str, tenant: str = DEFAULT_NAMESPACE, actor: str = OPERATOR
    ) -> Revision:
        """Publish the first revision of a new alias; `adapter_exists` when it has one. tenant: whose namespace."""
        self._catalog.check_new(alias, tenant)
        async with self._prepared(source) as prepared, self._held.change:
            self._catalog.check_new(alias, tenant)
            return await self._publish(alias, source, prepared, Mode.ADD, None, tenant, actor)

    async def swap(
        self,
        alias: str,
        source: str,
        expected: int | None = None,
        tenant: str = DEFAULT_NAMESPACE,
        actor: str = OPERATOR,
    ) -> Revision:
        """Publish a new revision of an alias. expected: the revision to replace; another one is a conflict."""
        self._catalog.check_swap(alias, expected, tenant)
        async with self._prepared(source) as prepared, self._held.change:
            self._catalog.check_swap(alias, expected, tenant)
            return await self._publish(alias, source, prepared, Mode.SWAP, expected, tenant, actor)

    async def put(
        self,
        alias: str,
        source: str,
        expected: int | None = None,
        tenant: str = DEFAULT_NAMESPACE,
        actor: str = OPERATOR,
    ) -> Revision:
        """`add` a new alias, `swap` a known one; with `expected`, only a known one."""
        self._check_put(alias, expected, tenant)
        async with self._prepared(source) as prepared, self._held.change:
            self._check_put(alias, expected, tenant)
            return await self._publish(alias, source, prepared, Mode.PUT, expected, tenant, actor)

    async def put_unless(
        self, alias: str, source: str, seen: Revision, tenant: str = DEFAULT_NAMESPACE, actor: str = OPERATOR
    ) -> Revision | None:
        """`put`, unless `source` still holds what `seen` was published from: then whatever is current stays."""
        async with self._prepared(source) as prepared, self._held.change:
            if prepared.identity.semantic != seen.key:
                return await self._publish(alias, source, prepared, Mode.PUT, None, tenant, actor)
            current = self._catalog.get(alias, tenant)
            if current is not None and current.key == seen.key:
                await self._held.register(prepared)
            return current

    def _check_put(self, alias: str, expected: int | None, tenant: str) -> None:
        if self._catalog.get(alias, tenant) is None and expected is None:
            self._catalog.check_new(alias, tenant)
        else:
            self._catalog.check_swap(alias, expected, tenant)

    async def remove(self, alias: str, tenant: str = DEFAULT_NAMESPACE, actor: str = OPERATOR) -> Revision:
        """Take an alias away. It is unknown at once; its adapter leaves the engine when nothing uses it any more."""
        store = self._catalog.store
        async with self._held.change:
            old, generation = await self.off_loop(lambda: store.remove(tenant, alias, actor))
            if generation != self.generation + 1:
                await self.refresh()
            for superseded in self._catalog.removed(old, generation):
                self._held.retire_later(superseded.key)
            return old

    async def _publish(
        self,
        alias: str,
        source: str,
        prepared: PreparedAdapter,
        mode: Mode,
        expected: int | None,
        tenant: str,
        actor: str,
    ) -> Revision:
        """Register, publish, retire: in this order, under the change lock."""
        await self._held.register(prepared)
        draft = draft_of(prepared, alias, source, tenant, actor)
        store = self._catalog.store
        try:
            _, new = await self.off_loop(lambda: store.publish(draft, mode, Expectation(expected)))
        except LoraplexError:  # another server may have won the race
            self._held.retire_later(prepared.identity.semantic)
            raise
        if new.generation != self.generation + 1:
            await self.refresh()
        for superseded in self._catalog.published(new):
            self._held.retire_later(superseded.key)
        return new

    # Other servers, other runs

    async def refresh(self) -> None:
        """See what other servers published, retire what is no longer current, read what is new in the background."""
        before = {revision.key for revision in self._catalog}
        view = self._catalog.view
        changes = await self.off_loop(lambda: self._catalog.store.changes(view.generation))
        for superseded in view.apply(changes):
            self._held.retire_later(superseded.key)
        for error in changes.damaged_grants:
            _log.error("an authorisation record is ignored: %s", error)
        self._read_later(revision for revision in self._catalog if revision.key not in before)

    async def follow(self, every_s: float = FOLLOW_EVERY_S) -> None:
        """Keep seeing what other servers publish, until cancelled. A catalog that does not answer is asked again."""
        silent = False
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.refresh()
                silent = False
            except LoraplexError as error:
                if not silent:
                    _log.error("the catalog is not followed: %s", error)
                silent = True

    def begin(self) -> None:
        """Read what the catalog knew when this process began, and follow it if it is shared; both in the background."""
        self._read_later(self._catalog)
        if self._catalog.shared:
            self._follower = asyncio.create_task(self.follow())

    def _read_later(self, revisions: Iterable[Revision]) -> None:
        """Queue revisions that this process has never read. One at a time, so that a request never waits for many."""
        self._unread += [revision for revision in revisions if revision.key not in self._held.known]
        if self._unread and self._reader is None:
            self._reader = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        try:
            while self._unread:
                revision = self._unread.pop(0)
                if not self._catalog.shares(revision.key):
                    continue  # superseded meanwhile
                try:
                    await self.ready(revision)
                except LoraplexError as error:
                    _log.warning("%s is in the catalog but cannot be served: %s", revision.name, error)
        finally:
            self._reader = None

    async def restore(self) -> dict[str, LoraplexError]:
        """Register everything with a restarted engine. Returns what could not be, by alias."""
        failed: dict[str, LoraplexError] = {}
        async with self._held.change:
            self._held.forget_engine()
            for revision in self._catalog:
                prepared = self._held.known.get(revision.key)
                if prepared is None:
                    continue  # it was never read here: it is when somebody asks for it
                try:
                    await self._held.register(prepared)
                except LoraplexError as error:
                    failed[revision.alias] = error
        return failed

    # Questions

    async def describe(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> dict[str, Any]:
        """One adapter with the engine's view of it (DESIGN 5)."""
        revision = self._catalog.current(alias, tenant)
        return revision.describe(await self._engine.call(Inspect(0)))

    async def describe_all(self, tenant: str = DEFAULT_NAMESPACE) -> list[dict[str, Any]]:
        """Every adapter that a tenant may list, by the name that it has there."""
        figures = await self._engine.call(Inspect(0))
        return [
            {**revision.describe(figures), "alias": name}
            for name, revision in self._catalog.view.visible(tenant)
        ]

    def kernel_of(self, key: str) -> str | None:
        """Kernel digest under which the engine holds an adapter, by semantic digest."""
        prepared = self._held.known.get(key)
        return None if prepared is None else prepared.register.kernel_digest

    async def settled(self) -> None:
        """Wait until nothing is on its way into or out of the engine."""
        while self._held.leaving or self._reader is not None:
            reading = [] if self._reader is None else [self._reader]
            await asyncio.gather(*self._held.leaving, *reading)

    async def close(self) -> None:
        """Give up waiting for adapters on their way in or out, and let go of the catalog."""
        tasks = self._held.leaving
        tasks += [task for task in (self._follower, self._reader) if task is not None]
        tasks += self._getting_ready.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.off_loop(self._catalog.close)
        self._thread.shutdown()

    def _prepared(
        self, source: str, content: str | None = None
    ) -> AbstractAsyncContextManager[PreparedAdapter]:
        """Prepare an adapter, keeping the images that the preparation may find."""
        work = self._prepare(source) if content is None else self._prepare(source, content)
        return self._held.prepared(work)
