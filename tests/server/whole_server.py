"""A whole server with text over an engine, and an openai client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
from tests.process import engines
from tests.server.processes import Running, started
from tests.server.tiny_server import write_model
from tests.text.tiny_text import byte_tokenizer, write_folder
from tests.waiting import pause

BASE = "tiny"


class Whole:
    """A server with text, and an openai client of it."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.openai = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def live(self) -> int:
        """Requests that the engine holds, or whose pages it has still to let go of."""
        figures = (await self.server.http.get("/v1/residency")).json()
        pages = figures["pages"]
        return int(figures["requests"]["live"] or (pages["kv"] + pages["reserved"] and 1))

    async def idle(self) -> None:
        """Wait until the engine holds none."""
        while await self.live():
            await pause()

    async def stream(self, prompt: list[int], max_tokens: int, **options: Any) -> Any:
        """Begin a streamed completion."""
        return await self.openai.completions.create(
            model=BASE, prompt=prompt, max_tokens=max_tokens, stream=True, **options
        )

    @property
    def engine(self) -> int:
        """Process id of the engine: the server's child that is one."""
        children = psutil.Process(self.server.process.pid).children()
        (pid,) = [child.pid for child in children if "loraplex.process.engine_process" in child.cmdline()]
        return int(pid)


@asynccontextmanager
async def whole(tmp_path: Path, builder: str = engines.ECHO, **fields: Any) -> AsyncIterator[Whole]:
    write_folder(write_model(tmp_path / BASE), byte_tokenizer())
    async with started(tmp_path, builder, "real", **fields) as server:
        await server.until_said("ready on")
        client = Whole(server)
        try:
            yield client
        finally:
            await client.openai.close()
