"""What operators ask of residency by alias: pins that follow it, prefetch, the end of what was revoked,
limits.

Keeps what an engine forgets when it restarts: pins and limits are given back by `restore`.

Never decides who is evicted and never touches a catalog. Specification: 0x07G, 0x07J; rulings "Leases".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from loraplex.catalog.records import AliasKey
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.messages import (
    EngineCall,
    PinAdapter,
    PrefetchAdapter,
    RevokeAdapter,
    SetLimits,
)

_log: Final = logging.getLogger(__name__)
_GONE: Final = (ErrorCode.ENGINE_DIED, ErrorCode.ENGINE_UNAVAILABLE)
"""What is said for an engine that died or was stopped: its successor knows nothing and gets it from
`restore`.
"""
_HAS_NONE: Final = (ErrorCode.ADAPTER_NOT_FOUND, *_GONE)
"""What an engine says that does not have an adapter, or that is gone with all of them."""


class EngineCalls(Protocol):
    """The part of an engine client that adapter administration uses."""

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """Send a call and wait for its reply; the client numbers it. Raises the typed error of the reply."""
        ...


class ResidencyControls:
    """Pins by alias, limits, and what was revoked, of one server. Called from one event loop."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._pins: dict[AliasKey, str] = {}
        self._owed: set[AliasKey] = set()
        self._limits = SetLimits(0)
        self._revoked: set[str] = set()

    def pinned_key(self, alias_key: AliasKey) -> str | None:
        """What the alias's pin holds, None without one."""
        return self._pins.get(alias_key)

    def pinned(self, alias_key: AliasKey) -> bool:
        """Whether the alias has a pin."""
        return alias_key in self._pins

    async def pin(self, alias_key: AliasKey, key: str) -> None:
        """Pin what an alias stands for; twice is once. Raises `pool_exhausted` where pins leave too
        little.
        """
        if self._pins.get(alias_key) != key:
            await self._engine.call(PinAdapter(0, key, True))
            self._pins[alias_key] = key
        self._owed.discard(alias_key)

    async def pin_kept(self, alias_key: AliasKey, key: str) -> None:
        """`pin`, where an engine that is gone does not take the pin with it: the next one is told of it by
        `restore`.
        """
        try:
            await self.pin(alias_key, key)
        except LoraplexError as error:
            if error.code not in _GONE:
                raise
            self._pins[alias_key] = key
            self._owed.discard(alias_key)

    async def unpin(self, alias_key: AliasKey) -> None:
        """Take the alias's pin away, if it has one. An engine that is gone has none any more."""
        self._owed.discard(alias_key)
        key = self._pins.pop(alias_key, None)
        if key is not None:
            try:
                await self._engine.call(PinAdapter(0, key, False))
            except LoraplexError as error:
                if error.code not in _GONE:
                    raise

    async def prefetch(self, key: str) -> None:
        """Load on speculation; `pool_exhausted` where that would take what requests will want."""
        await self._engine.call(PrefetchAdapter(0, key))

    def forbid(self, key: str) -> None:
        """Never let this server register an adapter again, and forget its pins."""
        self._revoked.add(key)
        self._forget_pins(key)

    async def end(self, key: str) -> None:
        """End an adapter and every request on it. An engine that has no such adapter is done with it."""
        self._forget_pins(key)
        try:
            await self._engine.call(RevokeAdapter(0, key))
        except LoraplexError as error:
            if error.code not in _HAS_NONE:
                raise

    def _forget_pins(self, key: str) -> None:
        self._pins = {alias_key: pinned for alias_key, pinned in self._pins.items() if pinned != key}

    def forbidden(self, key: str) -> bool:
        """Whether an adapter was revoked, as far as this server knows."""
        return key in self._revoked

    def require_not_revoked(self, key: str) -> None:
        """Raise `adapter_revoked` for what was revoked."""
        if key in self._revoked:
            raise CallerError(
                ErrorCode.ADAPTER_REVOKED,
                f"adapter {key[:12]} was revoked; publish a corrected revision",
                param="source",
            )

    async def set_limits(
        self,
        adapter_pages: int | None = None,
        resident_adapters: int | None = None,
        host_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Change limits, None leaves one as it is; all of them, and what is above them still."""
        answer = await self._engine.call(SetLimits(0, adapter_pages, resident_adapters, host_bytes))
        old = self._limits
        self._limits = SetLimits(
            0,
            old.adapter_pages if adapter_pages is None else adapter_pages,
            old.resident_adapters if resident_adapters is None else resident_adapters,
            old.host_bytes if host_bytes is None else host_bytes,
        )
        return answer

    async def move_pin(self, alias_key: AliasKey, key: str) -> None:
        """The pin of an alias that stands for something else by now goes there. What the engine refuses is
        logged.
        """
        with _logged(alias_key):
            await self.unpin(alias_key)
        with _logged(alias_key):
            await self.pin_kept(alias_key, key)

    async def pin_moved(self, alias_key: AliasKey, key: str) -> None:
        """The alias stands for an adapter that was pinned for it already: the pin of the old one ends."""
        old = self._pins.get(alias_key)
        self._pins[alias_key] = key
        self._owed.discard(alias_key)
        if old is not None:
            with _logged(alias_key):
                await self._engine.call(PinAdapter(0, old, False))

    async def owe_pin(self, alias_key: AliasKey) -> None:
        """Somebody else moved an alias: its pin leaves the old revision now, and takes the new one when that
        is read.
        """
        with _logged(alias_key):
            await self.unpin(alias_key)
        self._owed.add(alias_key)

    async def pay_pin(self, alias_key: AliasKey, key: str) -> None:
        """The new revision was read: it is pinned, if a pin is owed to its alias still."""
        if alias_key in self._owed:
            await self.pin_kept(alias_key, key)

    async def restore(self) -> None:
        """Give limits and pins to an engine that has started anew; a pin that it refuses is logged
        and lost.
        """
        if self._limits != SetLimits(0):
            await self._engine.call(self._limits)
        pins, self._pins = self._pins, {}
        for alias_key, key in pins.items():
            with _logged(alias_key):
                await self.pin_kept(alias_key, key)


@contextmanager
def _logged(alias_key: AliasKey) -> Iterator[None]:
    """What the engine refuses is logged, and the pin is lost."""
    try:
        yield
    except LoraplexError as error:
        _log.error("the pin of adapter %s could not follow: %s", alias_key.alias, error)
