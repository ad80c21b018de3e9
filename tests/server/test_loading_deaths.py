"""Deaths and ends while adapters load, in a whole server over a tiny model: loader, engine, server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.model.tiny import save
from tests.server.processes import Running, started
from tests.server.random_adapters import write_adapter
from tests.waiting import pause, run

from loraplex.process.engine_process import BUILDER

pytestmark = pytest.mark.e2e
ALIASES = tuple(f"a{k}" for k in range(6))


def child(of: int, module: str) -> int:
    """Process id of the descendant that runs a module of ours."""
    (pid,) = [
        p.pid for p in psutil.Process(of).children(recursive=True) if f"loraplex.{module}" in p.cmdline()
    ]
    return int(pid)


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[Running]:
    save("llama", tmp_path / "base")
    for seed, alias in enumerate(ALIASES):
        write_adapter(tmp_path / "served" / alias, seed)
    options: dict[str, Any] = {
        "dtype": "float32",
        "pool_gb": 0.002,
        "host_gb": 0.01,
        "drain_s": 1.0,
        "adapter_dirs": [str(tmp_path / "served")],
    }
    async with started(tmp_path, BUILDER, "real", model=str(tmp_path / "base"), **options) as server:
        await server.until_said("ready on")
        yield server


async def ask(server: Running, alias: str) -> httpx.Response:
    body = {"model": alias, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    return await server.http.post("/v1/completions", json=body)


async def tokens(server: Running) -> dict[str, Any]:
    answers = await asyncio.gather(*(ask(server, alias) for alias in ALIASES))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return {
        alias: answer.json()["choices"][0]["token_ids"]
        for alias, answer in zip(ALIASES, answers, strict=True)
    }


async def make_cold(server: Running) -> None:
    """Push every adapter back to the disk store."""
    for share, host in ((0, 0), (1, 0.01)):
        answer = await server.http.put("/v1/limits", json={"pool_share": share, "host_gb": host})
        assert answer.status_code == 200, answer.text


def test_deaths_while_adapters_load(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server:
            right = await tokens(server)
            engine = child(server.process.pid, "process.engine_process")

            # The loader dies with fetches in hand: they fail, are asked for again, and every request is
            # answered.
            await make_cold(server)
            loader = child(engine, "images.loader_process")
            os.kill(loader, signal.SIGSTOP)
            asked = [asyncio.ensure_future(ask(server, alias)) for alias in ALIASES]
            while (await server.http.get("/v1/residency")).json()["host"]["fetching"] < len(ALIASES):
                await pause()
            os.kill(loader, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == list(right.values())
            assert child(engine, "images.loader_process") != loader

            # The engine dies with loads under way: open requests end typed, and a new one has its adapters
            # back.
            await make_cold(server)
            assert (await server.http.post("/v1/adapters/a0/pin")).status_code == 200
            os.kill(child(engine, "images.loader_process"), signal.SIGSTOP)
            asked = [asyncio.ensure_future(ask(server, alias)) for alias in ALIASES[1:]]
            while (await server.http.get("/v1/residency")).json()["requests"]["live"] < len(asked):
                await pause()
            os.kill(engine, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            assert {answer.json()["error"]["code"] for answer in answers} <= {
                "engine_died",
                "engine_unavailable",
            }
            while (await server.http.get("/ready")).status_code != 200:
                await pause()
            assert await tokens(server) == right
            assert (await server.http.get("/v1/adapters/a0")).json()["pinned"]

            # The server is told to end with loads under way: it ends them, and itself, in order.
            await server.http.post("/v1/adapters/a0/unpin")
            await make_cold(server)
            engine = child(server.process.pid, "process.engine_process")
            os.kill(child(engine, "images.loader_process"), signal.SIGSTOP)
            asked = [asyncio.ensure_future(ask(server, alias)) for alias in ALIASES]
            while (await server.http.get("/v1/residency")).json()["requests"]["live"] < len(asked):
                await pause()
            server.process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*asked)
            assert {answer.json()["error"]["code"] for answer in answers} == {"shutting_down"}
            assert await server.process.wait() == 0
            assert not [p for p in psutil.process_iter() if p.pid == engine]

    run(test)
