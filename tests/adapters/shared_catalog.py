"""Servers that share a durable catalog, each with an engine and a preparation that stand in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.adapters.stand_ins import BASE_ABI, Engine, Preparing, artifact
from tests.waiting import LIMIT_S

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.artifact.identify import AdapterIdentity
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import RegisterAdapter
from loraplex.identity.digests import ALWAYS_ON, semantic_abi


class Reading(Preparing):
    """Counts what it reads. holds: what a source holds now, if not what it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.began = asyncio.Event()
        self.holds: dict[str, str] = {}
        self.base = BASE_ABI
        self.missing = False

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        self.read.append(source)
        self.began.set()
        await self.gate.wait()
        if self.missing:
            raise CallerError(ErrorCode.ADAPTER_SOURCE_MISSING, "it is gone", param="source")
        held = artifact(self.holds.get(source, source))
        name = semantic_abi(self.base, held, ALWAYS_ON)
        register = RegisterAdapter(0, name, name, 1, ((1, 1),), (0,), 1)
        return PreparedAdapter(
            AdapterIdentity(self.base, held, name), "lora", (1,), ("q",), 1, 1, 1, 1, 1, "", register
        )


class Server:
    """One server's part: engine, preparation, service over the shared catalog."""

    def __init__(self, url: str) -> None:
        self.engine, self.reading = Engine(), Reading()
        self.service = AdapterService(
            self.engine, AdapterCatalog(frozenset({"base"}), CatalogStore.open(url)), self.reading
        )


Test = Callable[[Callable[[], Server]], Awaitable[None]]


def run(tmp_path: Path, test: Test) -> None:
    async def bounded() -> None:
        servers: list[Server] = []

        def server() -> Server:
            servers.append(Server(f"sqlite:///{tmp_path / 'catalog.db'}"))
            return servers[-1]

        async with asyncio.timeout(LIMIT_S):
            try:
                await test(server)
            finally:
                for made in servers:
                    await made.service.close()

    asyncio.run(bounded())
