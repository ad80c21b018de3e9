"""The life of an adapter under its name: prepare, register, shadow, publish, retire; each step beside what
undoes it.

| step | done by | undone by, before the publication |
|---|---|---|
| prepare | `HeldAdapters.prepared`: an image in the store | the image goes, if nothing else names it |
| register | `register`: the engine knows the adapter | `unregister` |
| shadow | `_shadow`: on the device beside the old one, pinned if that is | the pin leaves the new one |
| publish | `CatalogStore.publish`, one transaction | nothing: this is the point of no return |
| retire | `leave`, when no name and no request needs the old one | nothing |

A name is published only after the engine has its adapter, and the old adapter leaves only after the name
points elsewhere. What fails before the publication leaves everything as it was; what fails after it is
reported, and the publication stands. Two names may share one artifact, which leaves the engine with the last
of them.

The steps are the same for a server and for `LLM`; how they wait is a `Shell`'s: a server's (`manager.py`)
holds a lock, puts cancellations off and uses a thread, `LLM`'s (`plain_shell.py`) just calls. Never reads
adapter files itself and never touches pages.

Specification: 0x07F (swap by compare-and-set), 0x07G (shadow), 0x07H (leases), 0x07I (revocation); rulings
"Leases".
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

from loraplex.adapters.adapter_catalog import AdapterCatalog, draft_of
from loraplex.adapters.held import HeldAdapters
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.residency_controls import EngineCalls, ResidencyControls
from loraplex.adapters.revision_texts import RevisionTexts
from loraplex.artifact.companions import NO_COMPANIONS
from loraplex.artifact.notes import Note
from loraplex.catalog.changes import OPERATOR, Expectation, Mode
from loraplex.catalog.records import AliasKey, Revision, TextWord
from loraplex.core.errors import LoraplexError
from loraplex.core.messages import LoadAdapter, PinAdapter, RemoveAdapter

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")
Commit = Callable[[], None]
"""Called at the point of no return."""


class Prepare(Protocol):
    """Reads, verifies and converts an adapter. content: its key in the artifact store, where it is known."""

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        """The prepared adapter, its image in the store; raises `adapter_*`."""
        ...


class Shell(Protocol):
    """How a life waits: what an event loop does otherwise than plain calls."""

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Inside, nobody else changes names or registrations."""
        ...

    async def whole(self, work: Callable[[Commit], Coroutine[Any, Any, T]]) -> T:
        """Do work that a cancellation undoes before it has called its argument, and no longer afterwards."""
        ...

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do something that waits for the catalog's database."""
        ...

    async def look(self) -> None:
        """See what others published; raises what the database says."""
        ...

    async def ready(self, revision: Revision) -> None:
        """Have the engine know a current revision that this process may never have read."""
        ...

    async def retire(self, key: str) -> None:
        """`Lifecycle.leave`, when no name stands for an adapter and nothing is bound to it."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """A publication as it is asked for. expected: the revision to replace, None for whatever is current.

    drain: ask for no room beside the old revision: the alias moves at once, its new requests queue, and the
    new revision loads into what the old one leaves. text: whose text its requests use, None for the server's
    default.
    """

    mode: Mode
    alias_key: AliasKey
    source: str
    expected: int | None = None
    actor: str = OPERATOR
    drain: bool = False
    text: TextWord | None = None


class Lifecycle:
    """The steps over one engine and one catalog."""

    def __init__(
        self,
        engine: EngineCalls,
        catalog: AdapterCatalog,
        prepare: Prepare,
        reclaim: Callable[[str], object],
        shell: Shell,
        texts: RevisionTexts | None = None,
    ) -> None:
        """reclaim: called with the kernel digest of an image that no revision names any more. texts: of a
        base with text.
        """
        self.texts = RevisionTexts() if texts is None else texts
        self.held = HeldAdapters(catalog.shares, reclaim)
        self.controls = ResidencyControls(engine)
        self._notes: dict[AliasKey, tuple[int, tuple[Note, ...]]] = {}
        self._engine = engine
        self._catalog = catalog
        self._prepare = prepare
        self._shell = shell

    # Publications

    async def change(self, wanted: Change) -> Revision:
        """Prepare and publish. Raises where the change cannot be made: before anything is read, and once more
        when nobody else changes names any more.
        """
        self._check(wanted)
        async with self._fitting(wanted) as prepared, self._shell.alone():
            self._check(wanted)
            return await self._shell.whole(lambda commit: self._publish(wanted, prepared, commit))

    async def put_unless(self, wanted: Change, seen: Revision) -> Revision | None:
        """`change`, unless its source still holds what `seen` was published from: then whatever is current
        stays.
        """
        async with self._fitting(wanted) as prepared, self._shell.alone():
            if prepared.identity.semantic != seen.key:
                return await self._shell.whole(lambda commit: self._publish(wanted, prepared, commit))
            current = self._catalog.get(wanted.alias_key)
            if current is not None and current.key == seen.key:
                await self.take_up(prepared)
                if current == seen:
                    self.note(seen, prepared)
            return current

    @asynccontextmanager
    async def _fitting(self, wanted: Change) -> AsyncIterator[PreparedAdapter]:
        """Prepare what is to be published; `adapter_unsupported` where its requests could not use
        its text.
        """
        async with self.prepared(wanted.source) as prepared:
            if prepared.companions != NO_COMPANIONS:
                await self._shell.off_loop(lambda: self.texts.check(prepared.companions, wanted.text))
            yield prepared

    def _check(self, wanted: Change) -> None:
        alias_key, expected = wanted.alias_key, wanted.expected
        new = self._catalog.get(alias_key) is None and expected is None
        if wanted.mode is Mode.ADD or (wanted.mode is Mode.PUT and new):
            self._catalog.check_new(alias_key)
        else:
            self._catalog.check_swap(alias_key, expected)

    def prepared(
        self, source: str, content: str | None = None
    ) -> AbstractAsyncContextManager[PreparedAdapter]:
        """Prepare an adapter, keeping the images that the preparation may find."""
        work = self._prepare(source) if content is None else self._prepare(source, content)
        return self.held.prepared(work)

    async def _publish(self, wanted: Change, prepared: PreparedAdapter, commit: Commit) -> Revision:
        """Register, shadow, publish, retire: in this order, alone."""
        store, key = self._catalog.store, prepared.identity.semantic
        draft = draft_of(prepared, wanted.alias_key, wanted.source, wanted.actor, wanted.text)
        current = self._catalog.get(wanted.alias_key)
        gone: list[Revision] = []
        try:
            await self.register(prepared)
            async with self._shadow(wanted, None if current is None else current.key, key):
                commit()
                _, new = await self._shell.off_loop(
                    lambda: store.publish(draft, wanted.mode, Expectation(wanted.expected))
                )
                in_step = new.generation <= self._catalog.generation + 1
                if in_step:
                    gone += self._catalog.published(new)
        except (
            BaseException
        ):  # no room beside the old one, another server won the race, nobody waits any more
            await self.unregister(key)
            raise
        if not in_step:  # others published in between
            await self._catch_up(new.name, "published")
            gone += self._catalog.published(new)
        self.note(new, prepared)
        for superseded in gone:
            await self._shell.retire(superseded.key)
        return new

    def note(self, revision: Revision, prepared: PreparedAdapter) -> None:
        """Keep what a revision's files say of text, and keep and log what it is served in spite of."""
        self.texts.keep(revision, prepared.companions)
        if self._notes.get(revision.alias_key, (0, ()))[0] <= revision.revision:
            self._notes[revision.alias_key] = revision.revision, prepared.notes
        for note in prepared.notes:
            _log.warning("adapter %s: %s", revision.name, note.message)

    def as_read(self, revision: Revision) -> dict[str, Any]:
        """What only a revision's files tell, and whose text it uses, as the adapter's JSON says it.

        shares: what it has in common with the base. Nothing is noted, and the last is None,
        before its files were read here.
        """
        number, notes = self._notes.get(revision.alias_key, (0, ()))
        prepared = self.held.known.get(revision.key)
        return {
            "notes": [
                {"kind": note.kind.value, "message": note.message}
                for note in notes
                if number == revision.revision
            ],
            "text": self.texts.choice(revision.text).value,
            "shares": None if prepared is None else msgspec.to_builtins(prepared.shares),
        }

    async def register(self, prepared: PreparedAdapter) -> None:
        """Have the engine know an adapter. Alone; raises `adapter_revoked` for what was revoked, also
        meanwhile.
        """
        key = prepared.identity.semantic
        self.controls.require_not_revoked(key)
        if key not in self.held:
            with self.held.arriving(prepared):
                await self._engine.call(prepared.register)
        if self.controls.forbidden(key):
            await self.leave(key)
        self.controls.require_not_revoked(key)
        self.held.known[key] = prepared

    async def unregister(self, key: str) -> None:
        """The engine forgets what no name stands for, or will once nothing is bound to it. Alone."""
        if key not in self.held or self._catalog.shares(key):
            return
        if self.held.is_bound(key):
            await self._shell.retire(key)
            return
        with self.held.leaving(key), suppress(LoraplexError):  # an engine that is gone has forgotten it
            await self._engine.call(RemoveAdapter(0, key))

    async def take_up(self, prepared: PreparedAdapter) -> None:
        """`register` an adapter that a name stood for; it leaves again if none does by now. Alone."""
        await self.register(prepared)
        if not self._catalog.shares(prepared.identity.semantic):
            await self._shell.retire(prepared.identity.semantic)

    async def leave(self, key: str) -> None:
        """The engine lets an adapter go. What it refuses is kept in `held.failures`."""
        with self.held.leaving(key):
            try:
                await self._engine.call(RemoveAdapter(0, key))
            except LoraplexError as error:
                self.held.failures[key] = error

    @asynccontextmanager
    async def _shadow(self, wanted: Change, old: str | None, new: str) -> AsyncIterator[None]:
        """Around a publication: the new adapter beside the old one and pinned like it before, the old pin's
        end after.

        A swap of an adapter that is on the device copies the new revision beside it before the alias moves;
        without room it is refused with the shortfall, unless it drains. Once the publication is made, what
        the engine refuses is logged.
        """
        if old is None or old == new:
            yield
            return
        alias_key, pinned = wanted.alias_key, self.controls.pinned(wanted.alias_key)
        if wanted.drain:
            yield
            if pinned:
                await self.controls.move_pin(alias_key, new)
            return
        try:
            if pinned:
                await self._engine.call(PinAdapter(0, new, True))
            await self._engine.call(LoadAdapter(0, new, beside=old))
            yield
        except BaseException:
            if pinned:
                with suppress(LoraplexError):
                    await self._engine.call(PinAdapter(0, new, False))
            raise
        if pinned:
            await self.controls.pin_moved(alias_key, new)

    # The end of names

    async def remove(self, alias_key: AliasKey, actor: str = OPERATOR) -> Revision:
        """Take an alias away. It is unknown at once; its adapter leaves the engine when nothing uses it any
        more.
        """
        async with self._shell.alone():
            return await self._to_its_end(self._remove(alias_key, actor))

    async def _remove(self, alias_key: AliasKey, actor: str) -> Revision:
        """Raises only where the alias is still there: what fails afterwards is logged."""
        store = self._catalog.store
        old, generation = await self._shell.off_loop(lambda: store.remove(alias_key, actor))
        if generation > self._catalog.generation + 1:
            await self._catch_up(old.name, "removed")
        gone = self._catalog.removed(old, generation)
        self._notes.pop(alias_key, None)
        self.texts.forget(alias_key)
        try:
            await self.controls.unpin(alias_key)
        except LoraplexError as error:
            _log.error("%s is removed, the engine kept its pin: %s", old.name, error)
        for superseded in gone:
            await self._shell.retire(superseded.key)
        return old

    async def revoke(
        self, alias_key: AliasKey, actor: str = OPERATOR, caller: str | None = None
    ) -> list[Revision]:
        """Take away every name of what an alias stands for, and end its requests; nothing publishes it again.

        caller: the tenant that asks, None for the operator; `forbidden` when names of other namespaces would
        go.
        """
        async with self._shell.alone():
            key = self._catalog.current(alias_key).key
            return await self._to_its_end(self._revoke(key, actor, caller))

    async def _revoke(self, key: str, actor: str, caller: str | None) -> list[Revision]:
        """Revoked is revoked, also where the catalog does not answer afterwards."""
        store, view = self._catalog.store, self._catalog.view
        gone = await self._shell.off_loop(lambda: store.revoke(key, actor, caller))
        await self._catch_up(key[:12], "revoked")
        for revision in gone:
            if view.now(revision.alias_key) == revision:  # the catalog had no answer
                self._catalog.gone(revision)
        await self.end(key, everywhere=caller is None)
        if key in self.held.failures:
            raise self.held.failures[key]
        return gone

    async def end(self, key: str, *, everywhere: bool) -> None:
        """End an adapter and every request on it, if the engine has it. Alone; refusals are kept in
        `held.failures`.

        everywhere: it is never registered again; otherwise a tenant ended it for itself, and a name of
        somebody else's keeps it.
        """
        if everywhere:
            self.controls.forbid(key)
        elif self._catalog.shares(key):
            return
        self.held.failures.pop(key, None)
        self.held.endings[key] += 1
        with self.held.leaving(key) as there:
            if there:
                try:
                    await self.controls.end(key)
                except LoraplexError as error:
                    self.held.failures[key] = error

    async def _catch_up(self, name: str, what: str) -> None:
        """See what others published before a change of our own; without an answer that change is
        seen alone.
        """
        try:
            await self._shell.look()
        except LoraplexError as error:
            _log.error("%s is %s; what others published is not seen yet: %s", name, what, error)

    # Residency

    async def pin(self, alias_key: AliasKey) -> None:
        """Keep an alias on the device, whatever it stands for; `pool_exhausted` where pins leave too
        little.
        """
        while True:
            revision = self._catalog.current(alias_key)
            with self.held.bound(revision.key):
                await self._shell.ready(revision)
                async with self._shell.alone():
                    key = self._catalog.current(alias_key).key
                    if key in self.held:  # else it was moved meanwhile, to what was never read here
                        await self._to_its_end(self.controls.pin(alias_key, key))
                        return

    async def unpin(self, alias_key: AliasKey) -> None:
        """Let an alias be evicted again."""
        async with self._shell.alone():
            self._catalog.current(alias_key)
            await self._to_its_end(self.controls.unpin(alias_key))

    async def prefetch(self, alias_key: AliasKey) -> None:
        """Load an alias on speculation; `pool_exhausted` where that would take what requests will want."""
        revision = self._catalog.current(alias_key)
        with self.held.bound(revision.key):
            await self._shell.ready(revision)
            await self.controls.prefetch(revision.key)

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        def begun(commit: Commit) -> Coroutine[Any, Any, T]:
            commit()
            return work

        return await self._shell.whole(begun)
