"""A server process of the tests and a client of it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.process import engines
from tests.server.tiny_server import free_port, write_model
from tests.waiting import LIMIT_S, pause

ROOT = Path(__file__).resolve().parents[2]


class Running:
    """A server process and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S)
        self.said: list[str] = []

    async def until_said(self, text: str) -> str:
        """Read the server's lines until one contains `text`."""
        assert self.process.stdout is not None
        while True:
            line = (await self.process.stdout.readline()).decode()
            assert line, f"the server ended without saying {text!r}: {self.said}"
            self.said.append(line)
            if text in line:
                return line

    async def ready(self) -> dict[str, Any]:
        """Wait until requests are taken; the engine's state."""
        await self.until_said("ready on")
        return dict((await self.http.get("/ready")).json())

    async def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask for the server's state until it is as wished."""
        while True:
            state = dict((await self.http.get("/ready")).json())
            if holds(state):
                return state
            await pause()

    async def ask(self, tokens: object, model: str = "") -> tuple[int, dict[str, Any]]:
        """Ask for an answer."""
        answer = await self.http.get(f"/ask?{tokens}&{model}")
        return answer.status_code, answer.json()


@asynccontextmanager
async def started(
    tmp_path: Path,
    builder: str = engines.ECHO,
    application: str = "bare",
    environment: dict[str, str] | None = None,
    **fields: Any,
) -> AsyncIterator[Running]:
    model = tmp_path / "tiny"
    if not model.exists():
        write_model(model)
    port = fields.setdefault("port", free_port())
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.server.bare_server",
        json.dumps({"model": str(model), "log_level": "error", **fields}),
        builder,
        str(tmp_path / "work"),
        application,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **(environment or {})},
    )
    running = Running(process, f"http://127.0.0.1:{port}")
    try:
        yield running
    finally:
        await running.http.aclose()
        if process.returncode is None:
            process.kill()
        await process.communicate()
