"""Ends of connections, children and servers: what is let go of at once, and what the next start finds."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from tests.catalog.remotes import WebServer
from tests.process import engines
from tests.server.processes import Running, started
from tests.server.tiny_server import write_adapter
from tests.server.whole_server import BASE, whole
from tests.waiting import LIMIT_S, run, until_gone

pytestmark = pytest.mark.e2e
BODY = json.dumps({"model": BASE, "prompt": [70, 71], "max_tokens": 3}).encode()


def head(length: int, *more: str) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {length}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def connect(server: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer with a length."""
    status = int((await reader.readline()).split(b" ")[1])
    headers = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    return status, headers, await reader.readexactly(int(headers["content-length"]))


def test_a_drain_waits_for_nobody_who_does_not_ask(tmp_path: Path) -> None:
    """Idle connections close, half-sent requests are refused, half-sent headers are dropped; running streams
    go on.
    """

    async def test() -> None:
        async with whole(tmp_path, drain_s=60) as client:
            idle, half, begun = [await connect(client.server) for _ in range(3)]
            idle[1].write(head(len(BODY)) + BODY)
            assert (await read_answer(idle[0]))[0] == 200
            half[1].write(head(len(BODY)) + BODY[:-4])
            begun[1].write(b"POST /v1/comple")
            stream = await client.stream([70, 71], 300, stream_options={"include_usage": True})
            await anext(stream)
            client.server.process.send_signal(signal.SIGTERM)
            status, headers, body = await read_answer(half[0])
            assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
            assert headers["connection"] == "close"
            assert int(headers["retry-after"]) >= 1
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == 300
            assert await client.server.process.wait() == 0
            for reader, writer in (idle, half, begun):
                assert await reader.read() == b""
                writer.close()

    run(test)


def test_a_change_that_waits_for_its_source_hears_of_the_end(tmp_path: Path) -> None:
    answering, over = threading.Event(), threading.Event()

    def wait(part: bytes) -> list[bytes]:
        answering.set()
        over.wait()
        return [part]

    async def test(web: WebServer) -> None:
        cache = {"LORAPLEX_CACHE": str(tmp_path / "cache")}
        async with started(
            tmp_path, application="real", environment=cache, adapter_dirs=[web.url], drain_s=0.05
        ) as server:
            await server.until_said("ready on")
            change = asyncio.create_task(
                server.http.put("/v1/adapters/a", json={"source": f"{web.url}/a"}, timeout=LIMIT_S)
            )
            await asyncio.to_thread(answering.wait)
            server.process.send_signal(signal.SIGTERM)
            answer = await change
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert await server.process.wait() == 0
            assert server.process.stderr is not None
            assert b"Traceback" not in await server.process.stderr.read()

    with WebServer() as web:
        web.publish(write_adapter(tmp_path / "one"), "/a")
        web.body = wait
        try:
            run(lambda: test(web))
        finally:
            over.set()


def test_a_server_that_is_killed_takes_its_children_along_and_leaves_nothing_for_long(tmp_path: Path) -> None:
    short = tempfile.mkdtemp(prefix="lp")  # addresses of sockets have little room
    root = Path(short) / f"loraplex-{os.getuid()}"
    source = str(write_adapter(tmp_path / "one"))

    async def test() -> None:
        async with started(
            tmp_path, application="real", environment={"TMPDIR": short}, adapters=[["one", source]]
        ) as server:
            await server.until_said("ready on")
            (left,) = root.iterdir()
            (images,) = (tmp_path / "work").iterdir()
            assert list(left.iterdir())
            assert list(images.iterdir())
            children = psutil.Process(server.process.pid).children(recursive=True)
            assert len([child for child in children if "engine_process" in " ".join(child.cmdline())]) == 1
            server.process.kill()
            await server.process.wait()
            await asyncio.to_thread(until_gone, *children)
            assert left.exists()
        async with started(tmp_path, application="real", environment={"TMPDIR": short}) as server:
            await server.until_said("ready on")
            assert not left.exists()
            assert not images.exists()
            server.process.send_signal(signal.SIGTERM)
            assert await server.process.wait() == 0
        assert list(root.iterdir()) == []
        assert list((tmp_path / "work").iterdir()) == []

    try:
        run(test)
    finally:
        shutil.rmtree(short)


def test_a_killed_loader_fails_the_load_in_hand_and_nothing_else(tmp_path: Path) -> None:
    async def test() -> None:
        for seed, name in enumerate(("one", "two")):
            write_adapter(tmp_path / "adapters" / name, seed=seed)
        async with whole(tmp_path, engines.VIRTUAL, adapter_dirs=[str(tmp_path / "adapters")]) as client:
            server = psutil.Process(client.server.process.pid)
            (loader,) = [
                child
                for child in server.children()
                if "loraplex.adapters.prepare_process" in " ".join(child.cmdline())
            ]
            stream = await client.stream([70, 71], 400)
            await anext(stream)
            source = {"source": str(tmp_path / "adapters" / "two")}
            loader.suspend()  # a load that takes its time
            load = asyncio.ensure_future(client.server.http.put("/v1/adapters/three", json=source))
            loader.kill()
            answer = await load
            if answer.status_code != 201:  # it had not begun: the next loader took it
                assert answer.json()["error"]["code"] == "adapter_load_failed"
                answer = await client.server.http.put("/v1/adapters/three", json=source)
            assert answer.status_code == 201
            assert answer.json()["tensors_applied"] == answer.json()["tensors_total"]
            rest = [chunk async for chunk in stream]
            assert rest[-1].choices[0].finish_reason == "length"
            served = await client.openai.completions.create(model="three", prompt=[70], max_tokens=3)
            assert served.system_fingerprint is not None
            assert served.system_fingerprint.startswith("three@1:")

    run(test)
