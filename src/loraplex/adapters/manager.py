"""Adapters by name in a server: the asynchronous shell around the life of an adapter (`lifecycle.py`).

Owns the lock under which names and registrations change, the thread that waits for the database, and the
tasks in which adapters are read (`reading.py`), leave (`retiring.py`) and others' publications are followed
(`following.py`).

The catalog may know revisions that this process has never read: those of an earlier run, and those that
another server published. They are read from their source when they are first asked for, or in the background,
and served only if their digest is the recorded one. Database calls run in a thread of their own.

Specification: 0x07F (swap by compare-and-set), 0x07H (leases), rulings "Leases".
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.describing import Entry, for_tenant, live_entries
from loraplex.adapters.following import FOLLOW_EVERY_S, Following
from loraplex.adapters.lifecycle import Change, Commit, Lifecycle, Prepare
from loraplex.adapters.name_lookup import CatalogNames
from loraplex.adapters.reading import Reading
from loraplex.adapters.residency_controls import EngineCalls, ResidencyControls
from loraplex.adapters.retiring import Retirement
from loraplex.adapters.revision_texts import RevisionText, RevisionTexts
from loraplex.adapters.unbroken import Unbroken
from loraplex.catalog.changes import OPERATOR, Mode
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, Revision, Right, TextWord
from loraplex.core.errors import CallerError, LoraplexError
from loraplex.core.messages import Inspect, RegisterAdapter

T = TypeVar("T")


def _keep(kernel_digest: str) -> None:
    """Images stay where they are."""


class AdapterService(CatalogNames):
    """What names mean now, kept in step with the engine. Its methods are called from one event loop."""

    def __init__(
        self,
        engine: EngineCalls,
        catalog: AdapterCatalog,
        prepare: Prepare,
        reclaim: Callable[[str], object] = _keep,
        texts: RevisionTexts | None = None,
    ) -> None:
        """reclaim: called with the kernel digest of an image that no revision names any more.

        texts: whose text each revision uses, where the base has text.
        missing: called with a name that means nothing to who asks, which may bring its adapter.
        """
        super().__init__(catalog)
        self._engine = engine
        self._lock = asyncio.Lock()
        self.missing: Callable[[str], Awaitable[None]] | None = None
        self._requests: Counter[tuple[str, str]] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="catalog")
        self._life = Lifecycle(engine, catalog, prepare, reclaim, self, texts)
        self._retirement = Retirement(self._life, catalog.shares, self._lock)
        self._reading = Reading(self._life, catalog.shares, self._lock, self._read)
        self._following = Following(
            catalog,
            self._life,
            self._reading,
            self._retirement,
            self._lock,
            lambda after: self.off_loop(lambda: catalog.store.changes(after)),
        )

    @property
    def controls(self) -> ResidencyControls:
        """Pins, limits and revocations."""
        return self._life.controls

    @property
    def texts(self) -> RevisionTexts:
        """Whose text each revision's requests use."""
        return self._life.texts

    @property
    def retire_failures(self) -> dict[str, LoraplexError]:
        """Removals that the engine refused, by semantic digest."""
        return self._life.held.failures

    # The shell of `Lifecycle`

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        async with self._lock:
            yield

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Inside, nobody else changes names or registrations."""
        return self._locked()

    async def whole(self, work: Callable[[Commit], Coroutine[Any, Any, T]]) -> T:
        """Do work that a cancellation undoes before its commit; one that comes later is raised when all is
        done.
        """
        change = Unbroken()
        return await change.run(work(change.commit))

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do something that waits for the catalog's database, in the thread that does so."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def look(self) -> None:
        """See what other servers published. See `Following.look`."""
        await self._following.look()

    async def ready(self, revision: Revision) -> None:
        """Have the engine know a revision, reading it first where this process never did. See
        `Reading.ready`.
        """
        await self._reading.ready(revision)

    async def retire(self, key: str) -> None:
        """Let an adapter leave when no name and no request needs it."""
        self._retirement.later(key)

    # Names

    @contextmanager
    def bind(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Iterator[Revision]:
        """Resolve once and hold: the revision stays registered with the engine until the context ends."""
        revision = self._catalog.resolve(name, tenant)
        with self._life.held.bound(revision.key):
            yield revision

    @asynccontextmanager
    async def serving(
        self, name: str, tenant: str = DEFAULT_NAMESPACE
    ) -> AsyncIterator[tuple[Revision, RevisionText]]:
        """`find_revision` and hold, with the engine ready for the revision; and whose text it uses."""
        revision = await self.find_revision(name, tenant)
        with self._life.held.bound(revision.key):
            text = await self._reading.ready(revision)
            self._requests[tenant, revision.key] += 1
            try:
                yield revision, text
            finally:
                self._requests[tenant, revision.key] -= 1
                if not self._requests[tenant, revision.key]:
                    del self._requests[tenant, revision.key]

    async def find_revision(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """`resolve`, and `alias@revision` of a superseded revision, as the catalog recorded it.

        A name that is not known may have been published elsewhere a moment ago: a shared catalog is asked
        once more before it is refused. Raises `model_not_found`, `adapter_revoked`.
        """
        try:
            return self._catalog.resolve(name, tenant)
        except CallerError:
            if self._catalog.shared:
                await self.look()
        alias = name.partition("@")[0]
        if self.missing is not None and self._catalog.view.find(tenant, alias, Right.USE) is None:
            await self.missing(alias)
        try:
            return self._catalog.resolve(name, tenant)
        except CallerError:
            earlier = self._catalog.view.superseded(tenant, name)
            store = self._catalog.store
            found = None if earlier is None else await self.off_loop(lambda: store.superseded(*earlier))
            if found is None:
                raise
        return found

    # Changes

    async def add(
        self, alias_key: AliasKey, source: str, actor: str = OPERATOR, *, text: TextWord | None = None
    ) -> Revision:
        """Publish the first revision of a new alias; `adapter_exists` when it has one. text: as in `put`."""
        return await self._life.change(Change(Mode.ADD, alias_key, source, actor=actor, text=text))

    async def swap(
        self,
        alias_key: AliasKey,
        source: str,
        actor: str = OPERATOR,
        *,
        expected: int | None = None,
        drain: bool = False,
    ) -> Revision:
        """Publish a new revision of an alias. expected: the revision to replace; another one is a conflict.

        The new one is on the device before the alias moves, if the old one is; `pool_exhausted` where there
        is no room for both. drain: move the alias at once, and load the new one into what the old one leaves.
        """
        return await self._life.change(Change(Mode.SWAP, alias_key, source, expected, actor, drain))

    async def put(
        self,
        alias_key: AliasKey,
        source: str,
        actor: str = OPERATOR,
        *,
        expected: int | None = None,
        drain: bool = False,
        text: TextWord | None = None,
    ) -> Revision:
        """`add` a new alias, `swap` a known one; with `expected`, only a known one.

        text: whose text its requests use, None for the default.
        """
        return await self._life.change(Change(Mode.PUT, alias_key, source, expected, actor, drain, text))

    async def put_unless(
        self, alias_key: AliasKey, source: str, seen: Revision, actor: str = OPERATOR
    ) -> Revision | None:
        """`put`, unless `source` still holds what `seen` was published from: then whatever is
        current stays.
        """
        return await self._life.put_unless(Change(Mode.PUT, alias_key, source, actor=actor), seen)

    async def remove(self, alias_key: AliasKey, actor: str = OPERATOR) -> Revision:
        """Take an alias away. It is unknown at once; its adapter leaves the engine when nothing uses it any
        more.
        """
        return await self._life.remove(alias_key, actor)

    async def revoke(
        self, alias_key: AliasKey, actor: str = OPERATOR, caller: str | None = None
    ) -> list[Revision]:
        """Take away every name of what an alias stands for, and end its requests. See `Lifecycle.revoke`."""
        return await self._life.revoke(alias_key, actor, caller)

    async def pin(self, alias_key: AliasKey) -> None:
        """Keep an alias on the device, whatever it stands for; `pool_exhausted` where pins leave too
        little.
        """
        await self._life.pin(alias_key)

    async def unpin(self, alias_key: AliasKey) -> None:
        """Let an alias be evicted again."""
        await self._life.unpin(alias_key)

    async def prefetch(self, alias_key: AliasKey) -> None:
        """Load an alias on speculation; `pool_exhausted` where that would take what requests will want."""
        await self._life.prefetch(alias_key)

    # Other servers, other runs

    async def refresh(self) -> None:
        """See what other servers published, and wait until pins and revocations have followed."""
        await self._following.refresh()

    async def follow(self, every_s: float = FOLLOW_EVERY_S) -> None:
        """Keep seeing what other servers publish, until cancelled."""
        await self._following.follow(every_s)

    def begin(self) -> None:
        """Read what the catalog knew when this process began, and follow it if it is shared; both in the
        background.
        """
        self._reading.later(self._catalog)
        if self._catalog.shared:
            self._following.begin()

    async def _read(self, revision: Revision) -> None:
        """A revision was read in the background."""
        await self._following.pin_again(revision)

    async def restore(self) -> dict[str, LoraplexError]:
        """Register everything with a restarted engine: what names stand for, and what requests hold of the
        rest.

        Returns what could not be registered, by name.
        """
        failed: dict[str, LoraplexError] = {}
        held = self._life.held
        async with self._lock:
            held.forget_engine()
            for revision in self._catalog:
                prepared = held.known.get(revision.key)
                if prepared is None:
                    continue  # it was never read here: it is when somebody asks for it
                try:
                    await self._life.take_up(prepared)
                except LoraplexError as error:
                    failed[revision.alias] = error
            for key, prepared in list(held.known.items()):
                if key in held or not held.is_bound(key) or self.controls.forbidden(key):
                    continue
                try:
                    await self._life.take_up(prepared)
                except LoraplexError as error:
                    failed[key[:12]] = error
            await self.controls.restore()
        return failed

    # Questions

    async def describe(self, alias_key: AliasKey, viewer: str | None = None) -> dict[str, Any]:
        """One adapter with the engine's view of it (interface "HTTP"). viewer: the tenant that asks, None for
        the operator.
        """
        revision = self._catalog.current(alias_key)
        figures = await self._engine.call(Inspect(0, (revision.key,)))
        return self._described(revision, live_entries(figures).get(revision.key, {}), viewer)

    async def describe_some(
        self, tenant: str, viewer: str | None, after: str | None, limit: int
    ) -> tuple[list[dict[str, Any]], bool]:
        """Of the adapters that a tenant may list, by name, the first `limit` after a name; and whether there
        are more.

        The engine is asked once, about these alone. viewer: as in `describe`.
        """
        visible = self._catalog.view.visible(tenant)
        first = 0 if after is None else bisect_right(visible, after, key=lambda item: item[0])
        page = visible[first : first + limit]
        figures = await self._engine.call(Inspect(0, tuple(revision.key for _, revision in page)))
        live = live_entries(figures)
        described = [
            {**self._described(revision, live.get(revision.key, {}), viewer), "alias": name}
            for name, revision in page
        ]
        return described, first + limit < len(visible)

    def _described(self, revision: Revision, live: Entry, viewer: str | None) -> dict[str, Any]:
        seen = live if viewer is None or not live else self.seen_by(viewer, live, [revision])
        return {**revision.describe(seen), **self._life.as_read(revision)}

    def seen_by(self, viewer: str, live: Entry, revisions: Sequence[Revision]) -> dict[str, Any]:
        """An engine's entry as a tenant may see it. revisions: what the tenant may list of the entry's
        adapter.
        """
        own = [revision.alias_key for revision in revisions if revision.namespace == viewer]
        return for_tenant(live, self.requests_of(viewer, live["key"]), any(map(self.controls.pinned, own)))

    def requests_of(self, tenant: str, key: str | None = None) -> int:
        """Requests of a tenant that hold an adapter, this one or any."""
        return sum(n for (who, what), n in self._requests.items() if who == tenant and key in (None, what))

    def registration_of(self, key: str) -> RegisterAdapter:
        """What the engine was told of an adapter that is held ready (`serving`), by semantic digest."""
        return self._life.held.known[key].register

    async def settled(self) -> None:
        """Wait until nothing is on its way into or out of the engine."""
        while tasks := [*self._retirement.tasks, *self._reading.background, *self._following.background]:
            await asyncio.gather(*tasks)

    async def close(self) -> None:
        """Give up waiting for adapters on their way in or out, and let go of the catalog."""
        tasks = [*self._retirement.tasks, *self._reading.tasks, *self._following.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.off_loop(self._catalog.close)
        self._thread.shutdown()
