"""What other servers publish into a shared catalog, seen here: names move at once, their consequences follow
in order.

`look` never waits for the engine, so that a name is never older than the database's last answer. What a look
means for pins and for revoked adapters is queued, and done while nobody else changes names or registrations.

Specification: 0x07F, 0x07I; rulings "Leases".
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.lifecycle import Lifecycle
from loraplex.adapters.reading import Reading
from loraplex.adapters.retiring import Retirement
from loraplex.catalog.changes import Changes
from loraplex.catalog.records import AliasKey, Revision
from loraplex.core.errors import LoraplexError
from loraplex.process.tasks import reported

_log: Final = logging.getLogger(__name__)
FOLLOW_EVERY_S: Final = 0.5
"""How often a shared catalog is asked whether others published: how long a removal elsewhere may go unseen.
"""


class Following:
    """Keeps a catalog's view in step with its database, and pins and revocations in step with the view."""

    def __init__(
        self,
        catalog: AdapterCatalog,
        life: Lifecycle,
        reading: Reading,
        retirement: Retirement,
        lock: asyncio.Lock,
        changes: Callable[[int], Awaitable[Changes]],
    ) -> None:
        """lock: held while names or registrations change. changes: what the database has after a
        generation.
        """
        self._catalog = catalog
        self._life = life
        self._reading = reading
        self._retirement = retirement
        self._lock = lock
        self._changes = changes
        self._moved: deque[AliasKey] = deque()
        self._revoked: deque[tuple[str, bool]] = deque()
        self._follower: asyncio.Task[None] | None = None
        self._settler: asyncio.Task[None] | None = None

    @property
    def background(self) -> list[asyncio.Task[None]]:
        """What settles consequences now."""
        return [] if self._settler is None else [self._settler]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Everything that follows or settles now."""
        return [*self.background, *([] if self._follower is None else [self._follower])]

    async def look(self) -> None:
        """See what others published: names, now; superseded adapters leave, and new ones are read, in the
        background.
        """
        before = {revision.key for revision in self._catalog}
        view = self._catalog.view
        changes = await self._changes(view.generation)
        for key in changes.revoked:
            self._life.controls.forbid(key)
        ended = {*changes.revoked, *changes.revoked_at_home}
        for superseded in view.apply(changes):
            if superseded.key not in ended:  # those do not wait for their requests
                self._retirement.later(superseded.key)
            self._moved.append(superseded.alias_key)
        self._revoked += [(key, True) for key in changes.revoked]
        self._revoked += [(key, False) for key in changes.revoked_at_home]
        for error in changes.damaged_grants:
            _log.error("an authorisation record is ignored: %s", error)
        self._reading.later(revision for revision in self._catalog if revision.key not in before)
        if (self._moved or self._revoked) and self._settler is None:
            self._settler = reported(
                asyncio.create_task(self._settle()), _log, "pins and revocations no longer follow the catalog"
            )

    async def refresh(self) -> None:
        """`look`, and wait for its consequences."""
        await self.look()
        if self._settler is not None:
            await asyncio.shield(self._settler)

    async def _settle(self) -> None:
        try:
            async with self._lock:
                while self._moved or self._revoked:
                    if self._moved:
                        await self._follow_pin(self._moved.popleft())
                    else:
                        key, everywhere = self._revoked.popleft()
                        await self._life.end(key, everywhere=everywhere)
                        failure = self._life.held.failures.get(key)
                        if failure is not None:
                            _log.error("revoking %s was refused by the engine: %s", key[:12], failure)
        finally:
            self._settler = None

    async def _follow_pin(self, alias_key: AliasKey) -> None:
        """Somebody else moved an alias: its pin leaves the old revision and, once the new one is read, takes
        that.
        """
        current, controls = self._catalog.view.now(alias_key), self._life.controls
        if controls.pinned_key(alias_key) in (None, None if current is None else current.key):
            return
        await controls.owe_pin(alias_key)
        if current is not None:
            self._reading.later((), [current])

    async def pin_again(self, revision: Revision) -> None:
        """A revision that was read in the background takes the pin of its alias, if somebody else had moved
        that.
        """
        async with self._lock:
            if self._catalog.view.now(revision.alias_key) == revision:
                await self._life.controls.pay_pin(revision.alias_key, revision.key)

    async def follow(self, every_s: float = FOLLOW_EVERY_S) -> None:
        """Keep seeing what other servers publish, until cancelled. A catalog that does not answer is asked
        again.
        """
        silent = False
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
                silent = False
            except LoraplexError as error:
                if not silent:
                    _log.error("the catalog is not followed: %s", error)
                silent = True

    def begin(self) -> None:
        """Follow a shared catalog in the background."""
        self._follower = reported(
            asyncio.create_task(self.follow()), _log, "the catalog is no longer followed"
        )
