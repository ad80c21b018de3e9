"""What an adapter service stands between, in tests: an engine and a preparation that only record and
answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from tests.waiting import LIMIT_S

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.artifact.identify import AdapterIdentity
from loraplex.core.errors import LoraplexError
from loraplex.core.messages import PinAdapter, RegisterAdapter, RemoveAdapter
from loraplex.identity.digests import ALWAYS_ON, semantic_abi


class Engine:
    """Records calls. refuse: raised instead of an answer, by key or kind."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.asked: list[Any] = []
        self.refuse: dict[str, LoraplexError] = {}
        self.answer = asyncio.Event()
        self.answer.set()
        self._called = asyncio.Event()

    async def until(self, count: int) -> None:
        while len(self.sent) < count:
            self._called.clear()
            await self._called.wait()

    async def call(self, message: Any) -> dict[str, Any]:
        key = getattr(message, "key", "")
        if isinstance(message, (RegisterAdapter, RemoveAdapter)):
            self.sent.append(("+" if isinstance(message, RegisterAdapter) else "-", key))
        self.asked.append(message)
        self._called.set()
        await self.answer.wait()
        if key in self.refuse:
            raise self.refuse[key]
        return {"pages": {"page_bytes": 1}, "adapters": []}


BASE_ABI = "ba5e" * 16


def artifact(source: str) -> str:
    return hashlib.sha256(source.partition("#")[0].encode()).hexdigest()


def key(source: str) -> str:
    return semantic_abi(BASE_ABI, artifact(source), ALWAYS_ON)


class Preparing:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, source: str) -> PreparedAdapter:
        await self.gate.wait()
        name = key(source)
        return PreparedAdapter(
            AdapterIdentity(BASE_ABI, artifact(source), name),
            "lora",
            (1,),
            ("q",),
            1,
            1,
            1,
            1,
            1,
            "",
            RegisterAdapter(0, name, name, 1, ((1, 1),), (0,), 1),
        )


def run(test: Callable[[AdapterService, Engine, Preparing], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine, preparing = Engine(), Preparing()
            service = AdapterService(engine, AdapterCatalog(frozenset({"base"})), preparing)
            await test(service, engine, preparing)
            await service.close()

    asyncio.run(bounded())


def pins(engine: Engine) -> list[tuple[str, bool]]:
    return [(m.key, m.pinned) for m in engine.asked if isinstance(m, PinAdapter)]
