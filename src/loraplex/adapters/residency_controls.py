"""What operators ask of residency by alias: pins that follow it, prefetch, the shadow copy of a swap, revocation, limits.

Keeps what an engine forgets when it restarts: pins and limits are given back by `restore`. A swap of an adapter that is
on the device copies the new revision beside the old one before the alias moves; without room it is refused with the
shortfall, unless it was asked to drain: then the alias moves at once, its new requests queue, and the new revision loads
into what the old one leaves.

Never decides who is evicted and never touches a catalog. Specification: 0x07G, 0x07J; rulings "Leases".
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, Protocol

from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.messages import (
    EngineCall,
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    RevokeAdapter,
    SetLimits,
)

_log: Final = logging.getLogger(__name__)
_GONE: Final = (ErrorCode.ENGINE_DIED, ErrorCode.ENGINE_UNAVAILABLE)
"""What is said for an engine that died or was stopped: its successor knows nothing and gets it from `restore`."""
_HAS_NONE: Final = (ErrorCode.ADAPTER_NOT_FOUND, *_GONE)
"""What an engine says that does not have an adapter, or that is gone with all of them."""
Name = tuple[str, str]
"""Namespace and alias."""


class EngineCalls(Protocol):
    """The part of an engine client that adapter administration uses."""

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """Send a call and wait for its reply; the client numbers it. Raises the typed error of the reply."""
        ...


class ResidencyControls:
    """Pins by alias, limits, and what was revoked, of one server. Called from one event loop."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._pins: dict[Name, str] = {}
        self._limits = SetLimits(0)
        self._revoked: set[str] = set()

    def pinned_key(self, name: Name) -> str | None:
        """What the alias's pin holds, None without one."""
        return self._pins.get(name)

    def pinned(self, name: Name) -> bool:
        """Whether the alias has a pin."""
        return name in self._pins

    async def pin(self, name: Name, key: str) -> None:
        """Pin what an alias stands for; twice is once. Raises `pool_exhausted` where pins leave too little."""
        if self._pins.get(name) != key:
            await self._engine.call(PinAdapter(0, key, True))
            self._pins[name] = key

    async def pin_kept(self, name: Name, key: str) -> None:
        """`pin`, where an engine that is gone does not take the pin with it: the next one is told of it by `restore`."""
        try:
            await self.pin(name, key)
        except LoraplexError as error:
            if error.code not in _GONE:
                raise
            self._pins[name] = key

    async def unpin(self, name: Name) -> None:
        """Take the alias's pin away, if it has one. An engine that is gone has none any more."""
        key = self._pins.pop(name, None)
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

    async def revoke(self, key: str) -> None:
        """`end` an adapter and `forbid` it."""
        self.forbid(key)
        await self.end(key)

    async def end(self, key: str) -> None:
        """End an adapter and every request on it. An engine that has no such adapter is done with it."""
        self._forget_pins(key)
        try:
            await self._engine.call(RevokeAdapter(0, key))
        except LoraplexError as error:
            if error.code not in _HAS_NONE:
                raise

    def _forget_pins(self, key: str) -> None:
        self._pins = {name: pinned for name, pinned in self._pins.items() if pinned != key}

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

    @asynccontextmanager
    async def swapping(self, name: Name, old: str, new: str, *, drain: bool) -> AsyncIterator[None]:
        """Around the publication of `new` in place of `old`: shadow copy and pin before, the old pin's end after.

        When the publication fails, nothing of the new one stays pinned. Once it is made nothing undoes it: what the engine
        refuses afterwards is logged. drain: ask for nothing beside the old revision.
        """
        if old == new:
            yield
            return
        pinned = name in self._pins
        if not drain:
            if pinned:
                await self._engine.call(PinAdapter(0, new, True))
            try:
                await self._engine.call(LoadAdapter(0, new, beside=old))
                yield
            except BaseException:
                if pinned:
                    with suppress(LoraplexError):
                        await self._engine.call(PinAdapter(0, new, False))
                raise
            if pinned:
                held, self._pins[name] = self._pins.get(name), new
                if held == old:  # else whoever saw the publication first took that pin away
                    with _logged(name):
                        await self._engine.call(PinAdapter(0, old, False))
            return
        yield
        if pinned:
            with _logged(name):
                await self.unpin(name)
            with _logged(name):
                await self.pin_kept(name, new)

    async def restore(self) -> None:
        """Give limits and pins to an engine that has started anew; a pin that it refuses is logged and lost."""
        if self._limits != SetLimits(0):
            await self._engine.call(self._limits)
        pins, self._pins = self._pins, {}
        for name, key in pins.items():
            with _logged(name):
                await self.pin_kept(name, key)


@contextmanager
def _logged(name: Name) -> Iterator[None]:
    """What the engine refuses is logged, and the pin is lost."""
    try:
        yield
    except LoraplexError as error:
        _log.error("the pin of adapter %s could not follow: %s", name[1], error)
