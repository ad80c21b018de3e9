"""Revisions that this process has not read: of an earlier run, of another server, and superseded ones that
are named again.

Each is read from its source when it is asked for, or one at a time in the background, by one task however
many ask; and it is served only if its digest is the recorded one. Never publishes. Specification: 0x01G;
rulings "Identity".
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from loraplex.adapters.lifecycle import Lifecycle
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.revision_texts import RevisionText
from loraplex.catalog.records import AliasKey, Revision
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.process.tasks import reported

_log: Final = logging.getLogger(__name__)


class Reading:
    """Has the engine know revisions of the catalog."""

    def __init__(
        self,
        life: Lifecycle,
        named: Callable[[str], bool],
        lock: asyncio.Lock,
        then: Callable[[Revision], Awaitable[None]],
    ) -> None:
        """named: whether a name stands for a digest. lock: held while names or registrations change.

        then: called after a revision was read in the background.
        """
        self._life = life
        self._named = named
        self._lock = lock
        self._then = then
        self._under_way: dict[tuple[AliasKey, int], asyncio.Task[None]] = {}
        self._unread: deque[Revision] = deque()
        self._reader: asyncio.Task[None] | None = None

    @property
    def background(self) -> list[asyncio.Task[None]]:
        """What reads in the background now."""
        return [] if self._reader is None else [self._reader]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Everything that reads now."""
        return [*self.background, *self._under_way.values()]

    async def ready(self, revision: Revision) -> RevisionText:
        """Have the engine know a revision, reading it first where this process never did; whose text it uses.

        Raises what its preparation raises; `adapter_source_changed` when the source holds something else by
        now, `adapter_base_mismatch` when it was published for another base; `adapter_not_found` when it was
        removed meanwhile, `adapter_revoked` when it was revoked.
        """
        key, held, texts = revision.key, self._life.held, self._life.texts
        which = (revision.alias_key, revision.revision)
        endings = held.endings[key]
        while True:
            text = texts.find(revision)
            if key in held and text is not None:
                return text
            task = self._under_way.get(which)
            if task is None:
                task = asyncio.create_task(self._get_ready(revision))
                self._under_way[which] = task
                task.add_done_callback(lambda done: self._got_ready(which, done))
            await asyncio.shield(task)
            if held.endings[key] != endings and not self._named(key):
                raise CallerError(
                    ErrorCode.ADAPTER_REVOKED, f"{revision.name} was revoked while it was read", param="model"
                )
            # where nobody holds it and no alias names it, reading it again would not end
            if key not in held and not self._named(key):
                raise CallerError(
                    ErrorCode.ADAPTER_NOT_FOUND,
                    f"{revision.name} was removed while it was read",
                    param="model",
                )

    def _got_ready(self, which: tuple[AliasKey, int], task: asyncio.Task[None]) -> None:
        self._under_way.pop(which, None)
        if not task.cancelled():
            task.exception()  # whoever waits hears it too; nobody may wait

    async def _get_ready(self, revision: Revision) -> None:
        with self._life.held.bound(revision.key):  # an image that is there stays until the lock is free
            known = self._life.held.known.get(revision.key)
            if known is not None and self._life.texts.find(revision) is not None:
                async with self._lock:
                    await self._life.take_up(known)
                return
            async with self._life.prepared(revision.source, revision.content) as prepared:
                _require_same(revision, prepared)
                self._life.note(revision, prepared)
                async with self._lock:
                    await self._life.take_up(prepared)

    def later(self, revisions: Iterable[Revision], moved: Sequence[Revision] = ()) -> None:
        """Queue revisions that were never read here. One at a time, so that a request never waits for many.

        moved: revisions after which `then` is due although another name may have had them read before.
        """
        self._unread += [revision for revision in revisions if revision.key not in self._life.held.known]
        self._unread += moved
        if self._unread and self._reader is None:
            self._reader = reported(
                asyncio.create_task(self._read_all()),
                _log,
                "adapters of the catalog are not read ahead any more",
            )

    async def _read_all(self) -> None:
        try:
            while self._unread:
                revision = self._unread.popleft()
                if not self._named(revision.key):
                    continue  # superseded meanwhile
                try:
                    await self.ready(revision)
                    await self._then(revision)
                except LoraplexError as error:
                    _log.warning("%s is in the catalog but cannot be served: %s", revision.name, error)
        finally:
            self._reader = None


def _require_same(revision: Revision, prepared: PreparedAdapter) -> None:
    """Raise unless what was read is what was published, for this base."""
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
