"""Adapters by name: prepare, register with the engine, publish, swap, retire.

Order is what matters here. A name is published only after the engine has its adapter; the old one is retired only after
the name points elsewhere and no request of this process is bound to it; a failure before publication leaves everything
as it was. Two names may share one artifact, which leaves the engine with the last of them.

The catalog may know revisions that this process has never read: those of an earlier run, and those that another server
published. They are read from their source when they are first asked for, or in the background, and served only if
their digest is the recorded one. Database calls run in a thread of their own.

Never reads adapter files itself (the preparation does) and never touches pages.

Specification: 0x07F (swap by compare-and-set), 0x07H (leases), rulings "Leases".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final, TypeVar

from loraplex.adapters.adapter_catalog import AdapterCatalog, draft_of
from loraplex.adapters.held import HeldAdapters
from loraplex.adapters.name_lookup import CatalogNames
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.reading import Prepare, Reading
from loraplex.adapters.residency_controls import EngineCalls, Name, ResidencyControls
from loraplex.adapters.unbroken import Unbroken, to_its_end
from loraplex.catalog.changes import OPERATOR, Draft, Expectation, Mode
from loraplex.catalog.records import DEFAULT_NAMESPACE, Revision
from loraplex.core.errors import CallerError, LoraplexError
from loraplex.core.messages import Inspect
from loraplex.process.tasks import reported

_log: Final = logging.getLogger(__name__)
FOLLOW_EVERY_S: Final = 0.5
"""How often a shared catalog is asked whether others published: how long a removal elsewhere may go unseen."""
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
    ) -> None:
        """reclaim: called with the kernel digest of an image that no revision names any more."""
        super().__init__(catalog)
        self._engine = engine
        self._prepare = prepare
        self.controls = ResidencyControls(engine)
        self._held = HeldAdapters(engine, catalog.shares, reclaim, self.controls.require_not_revoked)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="catalog")
        self._pinned_elsewhere: set[tuple[str, str]] = set()
        self._reading = Reading(prepare, catalog.shares, self._held, self._pin_again)
        self._follower: asyncio.Task[None] | None = None

    @property
    def retire_failures(self) -> dict[str, LoraplexError]:
        """Removals that the engine refused, by semantic digest."""
        return self._held.failures

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do something that waits for the catalog's database, in the thread that does so."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Names

    @contextmanager
    def bind(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Iterator[Revision]:
        """Resolve once and hold: the revision stays registered with the engine until the context ends."""
        revision = self._catalog.resolve(name, tenant)
        with self._held.bound(revision.key):
            yield revision

    @asynccontextmanager
    async def serving(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> AsyncIterator[Revision]:
        """`find_revision` and hold, with the engine ready for the revision."""
        revision = await self.find_revision(name, tenant)
        with self._held.bound(revision.key):
            await self.ready(revision)
            yield revision

    async def find_revision(self, name: str, tenant: str = DEFAULT_NAMESPACE) -> Revision:
        """`resolve`, and `alias@revision` of a superseded revision, as the catalog recorded it.

        A name that is not known may have been published elsewhere a moment ago: a shared catalog is asked once more before
        it is refused. Raises `model_not_found`, `adapter_revoked`.
        """
        try:
            return self._catalog.resolve(name, tenant)
        except CallerError:
            if self._catalog.shared:
                await self.refresh()
        try:
            return self._catalog.resolve(name, tenant)
        except CallerError:
            place = self._catalog.view.superseded(tenant, name)
            store = self._catalog.store
            found = await self.off_loop(lambda: store.superseded(*place)) if place is not None else None
            if found is None:
                raise
        return found

    async def ready(self, revision: Revision) -> None:
        """Have the engine know a revision, reading it first where this process never did. See `Reading.ready`."""
        await self._reading.ready(revision)

    # Changes

    async def add(
        self, alias: str, source: str, tenant: str = DEFAULT_NAMESPACE, actor: str = OPERATOR
    ) -> Revision:
        """Publish the first revision of a new alias; `adapter_exists` when it has one. tenant: whose namespace."""
        return await self._change(
            Mode.ADD, (tenant, alias), source, actor, lambda: self._catalog.check_new(alias, tenant)
        )

    async def swap(
        self, alias: str, source: str, expected: int | None = None, tenant: str = DEFAULT_NAMESPACE,
        actor: str = OPERATOR, *, drain: bool = False,
    ) -> Revision:  # fmt: skip
        """Publish a new revision of an alias. expected: the revision to replace; another one is a conflict.

        The new one is on the device before the alias moves, if the old one is; `pool_exhausted` where there is no room
        for both. drain: move the alias at once, and load the new one into what the old one leaves.
        """
        return await self._change(
            Mode.SWAP, (tenant, alias), source, actor,
            lambda: self._catalog.check_swap(alias, expected, tenant), expected, drain=drain,
        )  # fmt: skip

    async def put(
        self, alias: str, source: str, expected: int | None = None, tenant: str = DEFAULT_NAMESPACE,
        actor: str = OPERATOR, *, drain: bool = False,
    ) -> Revision:  # fmt: skip
        """`add` a new alias, `swap` a known one; with `expected`, only a known one."""
        return await self._change(
            Mode.PUT, (tenant, alias), source, actor,
            lambda: self._check_put(alias, expected, tenant), expected, drain=drain,
        )  # fmt: skip

    async def _change(
        self,
        mode: Mode,
        place: Name,
        source: str,
        actor: str,
        check: Callable[[], object],
        expected: int | None = None,
        *,
        drain: bool = False,
    ) -> Revision:
        """Prepare and publish. check: raises where the change cannot be made; asked before anything is read, and again
        when nobody else changes names any more.
        """
        check()
        async with self._prepared(source) as prepared, self._held.change:
            check()
            draft = draft_of(prepared, place[1], source, place[0], actor)
            return await self._publish(draft, prepared, mode, expected, drain=drain)

    async def put_unless(
        self, alias: str, source: str, seen: Revision, tenant: str = DEFAULT_NAMESPACE, actor: str = OPERATOR
    ) -> Revision | None:
        """`put`, unless `source` still holds what `seen` was published from: then whatever is current stays."""
        async with self._prepared(source) as prepared, self._held.change:
            if prepared.identity.semantic != seen.key:
                draft = draft_of(prepared, alias, source, tenant, actor)
                return await self._publish(draft, prepared, Mode.PUT, None)
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
        async with self._held.change:
            return await to_its_end(self._remove(alias, tenant, actor))

    async def _remove(self, alias: str, tenant: str, actor: str) -> Revision:
        """Under the change lock. Raises only where the alias is still there: what fails afterwards is logged."""
        store = self._catalog.store
        old, generation = await self.off_loop(lambda: store.remove(tenant, alias, actor))
        if generation > self.generation + 1:
            await self._refresh_after(old.name, "removed")
        for superseded in self._catalog.removed(old, generation):
            self._held.retire_later(superseded.key)
        self._pinned_elsewhere.discard((tenant, alias))
        try:
            await self.controls.unpin((tenant, alias))
        except LoraplexError as error:
            _log.error("%s is removed, the engine kept its pin: %s", old.name, error)
        return old

    async def _refresh_after(self, name: str, what: str) -> None:
        """See what others published before a change of our own; without an answer that change is seen alone."""
        try:
            await self.refresh()
        except LoraplexError as error:
            _log.error("%s is %s; what others published is not seen yet: %s", name, what, error)

    async def _publish(
        self,
        draft: Draft,
        prepared: PreparedAdapter,
        mode: Mode,
        expected: int | None,
        *,
        drain: bool = False,
    ) -> Revision:
        """Register, have it on the device where the old one is, publish, retire: in this order, under the change lock.

        A cancellation before the publication undoes everything; one that comes later is raised when all of it is done.
        """
        change = Unbroken()
        return await change.run(self._commit(change, draft, prepared, mode, expected, drain))

    async def _commit(
        self, change: Unbroken, draft: Draft, prepared: PreparedAdapter, mode: Mode, expected: int | None, drain: bool
    ) -> Revision:  # fmt: skip
        store, key = self._catalog.store, prepared.identity.semantic
        place = (draft.namespace, draft.alias)
        current = self._catalog.get(draft.alias, draft.namespace)
        beside = (
            nullcontext() if current is None else self.controls.swapping(place, current.key, key, drain=drain)
        )
        try:
            await self._held.register(prepared)
            async with beside:
                change.commit()
                _, new = await self.off_loop(lambda: store.publish(draft, mode, Expectation(expected)))
                if new.generation <= self.generation + 1:
                    for superseded in self._catalog.published(new):
                        self._held.retire_later(superseded.key)
        except (
            BaseException
        ):  # no room beside the old one, another server won the race, or nobody waits any more
            await self._held.unregister(key)
            raise
        if self.controls.pinned_key(place) == key:
            self._pinned_elsewhere.discard(place)
        if new.generation > self.generation:  # others published in between
            await self._refresh_after(new.name, "published")
            for superseded in self._catalog.published(new):
                self._held.retire_later(superseded.key)
        return new

    async def pin(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> None:
        """Keep an alias on the device, whatever it stands for; `pool_exhausted` where pins leave too little."""
        revision = self._catalog.current(alias, tenant)
        await self.ready(revision)
        async with self._held.change:
            key = self._catalog.current(alias, tenant).key
            await to_its_end(self.controls.pin((tenant, alias), key))

    async def unpin(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> None:
        """Let an alias be evicted again."""
        async with self._held.change:
            self._catalog.current(alias, tenant)
            self._pinned_elsewhere.discard((tenant, alias))
            await to_its_end(self.controls.unpin((tenant, alias)))

    async def prefetch(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> None:
        """Load an alias on speculation; `pool_exhausted` where that would take what requests will want."""
        revision = self._catalog.current(alias, tenant)
        await self.ready(revision)
        await self.controls.prefetch(revision.key)

    async def revoke(
        self,
        alias: str,
        tenant: str = DEFAULT_NAMESPACE,
        actor: str = OPERATOR,
        caller: str | None = None,
    ) -> list[Revision]:
        """Take away every name of what an alias stands for, and end its requests; nothing publishes it again.

        caller: the tenant that asks, None for the operator; `forbidden` when names of other namespaces would go.
        """
        async with self._held.change:
            key = self._catalog.current(alias, tenant).key
            return await to_its_end(self._revoke(key, actor, caller))

    async def _revoke(self, key: str, actor: str, caller: str | None) -> list[Revision]:
        """Under the change lock. Revoked is revoked, also where the catalog does not answer afterwards."""
        store, view = self._catalog.store, self._catalog.view
        gone = await self.off_loop(lambda: store.revoke(key, actor, caller))
        await self._refresh_after(key[:12], "revoked")
        unseen = [revision for revision in gone if view.now((revision.namespace, revision.alias)) == revision]
        if unseen or (caller is None and not self.controls.forbidden(key)):  # the refresh had no answer
            for revision in unseen:
                self._catalog.gone(revision)
            await self._held.revoked(key, self.controls.revoke if caller is None else self.controls.end)
        if key in self._held.failures:
            raise self._held.failures[key]
        return gone

    # Other servers, other runs

    async def refresh(self) -> None:
        """See what other servers published, retire what is no longer current, read what is new in the background."""
        before = {revision.key for revision in self._catalog}
        view = self._catalog.view
        changes = await self.off_loop(lambda: self._catalog.store.changes(view.generation))
        for key in changes.revoked:
            self.controls.forbid(key)
        moved: list[Revision] = []
        for superseded in view.apply(changes):
            self._held.retire_later(superseded.key)
            current = view.now((superseded.namespace, superseded.alias))
            if await self._follow_pin((superseded.namespace, superseded.alias), current):
                moved += [] if current is None else [current]
        at_home = [key for key in changes.revoked_at_home if not self._catalog.shares(key)]
        for key in (*changes.revoked, *at_home):
            everywhere = key in changes.revoked
            await self._held.revoked(key, self.controls.revoke if everywhere else self.controls.end)
            if key in self._held.failures:
                _log.error("revoking %s was refused by the engine: %s", key[:12], self._held.failures[key])
        for error in changes.damaged_grants:
            _log.error("an authorisation record is ignored: %s", error)
        new = (revision for revision in self._catalog if revision.key not in before)
        self._reading.later(new, moved)

    async def _follow_pin(self, place: tuple[str, str], current: Revision | None) -> bool:
        """Somebody else moved an alias: its pin leaves the old revision and, once the new one is read, takes that.

        Whether it has to.
        """
        if self.controls.pinned_key(place) in (None, None if current is None else current.key):
            return False
        self._pinned_elsewhere.add(place)
        try:
            await self.controls.unpin(place)
        except LoraplexError as error:
            _log.error("the pin of adapter %s could not leave its old revision: %s", place[1], error)
        return True

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
        self._reading.later(self._catalog)
        if self._catalog.shared:
            self._follower = reported(
                asyncio.create_task(self.follow()), _log, "the catalog is no longer followed"
            )

    async def _pin_again(self, revision: Revision) -> None:
        """A revision that was read in the background takes the pin of its alias, if somebody else had moved that."""
        place = (revision.namespace, revision.alias)
        if place in self._pinned_elsewhere:
            self._pinned_elsewhere.discard(place)
            async with self._held.change:
                if self._catalog.view.now(place) == revision:
                    await to_its_end(self.controls.pin_kept(place, revision.key))

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
            await self.controls.restore()
        return failed

    # Questions

    async def describe(self, alias: str, tenant: str = DEFAULT_NAMESPACE) -> dict[str, Any]:
        """One adapter with the engine's view of it (interface "HTTP")."""
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
        return self._held.kernel_of(key)

    async def settled(self) -> None:
        """Wait until nothing is on its way into or out of the engine."""
        while tasks := [*self._held.leaving, *self._reading.background]:
            await asyncio.gather(*tasks)

    async def close(self) -> None:
        """Give up waiting for adapters on their way in or out, and let go of the catalog."""
        tasks = [*self._held.leaving, *self._reading.tasks]
        if self._follower is not None:
            tasks.append(self._follower)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.off_loop(self._catalog.close)
        self._thread.shutdown()

    def _prepared(self, source: str) -> AbstractAsyncContextManager[PreparedAdapter]:
        """Prepare an adapter, keeping the images that the preparation may find."""
        return self._held.prepared(self._prepare(source))
