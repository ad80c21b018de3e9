"""The shipping application in a server process: what clients see of killed engines, drains, and clients that
misbehave.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import openai
import psutil
import pytest
from tests.process import engines
from tests.server.processes import ROOT
from tests.server.tiny_server import write_adapter
from tests.server.whole_server import BASE, whole
from tests.waiting import pause, run

pytestmark = pytest.mark.e2e


def test_a_killed_engine_ends_streams_with_an_error_and_serves_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with whole(tmp_path) as client:
            stream = await client.stream([70, 71], 1_000_000)
            await anext(stream)
            os.kill(client.engine, signal.SIGKILL)
            with pytest.raises(openai.APIError) as died:
                async for _ in stream:
                    pass
            assert died.value.code == "engine_died"
            status = 503
            while status == 503:
                await pause()
                status = (await client.server.http.get("/ready")).status_code
            assert (await client.stream([70, 71], 3)) is not None
            answer = await client.openai.completions.create(model=BASE, prompt=[70, 71], max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4

    run(test)


def test_the_engine_s_events_are_figures_that_outlive_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with whole(tmp_path, engines.VIRTUAL) as client:

            async def ended() -> float:
                """Requests that the engine ended at their length."""
                text = (await client.server.http.get("/metrics")).text
                name = 'loraplex_engine_requests_ended_total{reason="length"} '
                return sum(
                    float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
                )

            async def ask_until(count: int) -> None:
                await client.openai.completions.create(model=BASE, prompt=[70, 71], max_tokens=4)
                await counted(count)

            async def counted(count: int) -> None:
                while await ended() < count:
                    await pause()
                assert await ended() == count

            await ask_until(1)
            await ask_until(2)
            os.kill(client.engine, signal.SIGKILL)
            body, status = {"model": BASE, "prompt": [70, 71], "max_tokens": 4}, 503
            while status == 503:  # what is answered again, another engine answers
                await pause()
                status = (await client.server.http.post("/v1/completions", json=body)).status_code
            assert status == 200
            await counted(3)

    run(test)


def test_a_drain_lets_streams_finish(tmp_path: Path) -> None:
    async def test() -> None:
        async with whole(tmp_path, drain_s=60) as client:
            stream = await client.stream([70, 71], 300, stream_options={"include_usage": True})
            await anext(stream)
            client.server.process.send_signal(signal.SIGTERM)
            usage = None
            async for chunk in stream:
                usage = chunk.usage or usage
            assert usage is not None
            assert usage.completion_tokens == 300
            assert await client.server.process.wait() == 0

    run(test)


def test_a_signal_to_every_process_drains_too(tmp_path: Path) -> None:
    """Service managers and shells signal a whole group: the engine must go on until the server ends it."""

    async def test() -> None:
        async with whole(tmp_path, drain_s=60) as client:
            stream = await client.stream([70, 71], 300, stream_options={"include_usage": True})
            await anext(stream)
            server = psutil.Process(client.server.process.pid)
            for process in [*server.children(recursive=True), server]:
                process.send_signal(signal.SIGTERM)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == 300
            assert await client.server.process.wait() == 0

    run(test)


def test_a_client_that_stops_reading_loses_its_request_and_nobody_waits(tmp_path: Path) -> None:
    async def test() -> None:
        async with whole(tmp_path) as client:
            body = json.dumps(
                {"model": BASE, "prompt": [70, 71], "max_tokens": 1_000_000, "stream": True, "logprobs": 20}
            ).encode()
            host, port = "127.0.0.1", int(client.server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(host, port, limit=1024)
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            assert b"200 OK" in await reader.readline()  # and from here on nothing is read
            while await client.live():
                answer = await client.openai.completions.create(model=BASE, prompt=[70, 71], max_tokens=50)
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 50
            writer.transport.abort()

    run(test)


def test_a_client_that_leaves_costs_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with whole(tmp_path) as client:
            streams = [await client.stream([engines.ONCE, 71], 1_000_000) for _ in range(4)]
            for stream in streams:
                await anext(stream)
            assert await client.live() == 4
            await streams[0].close()
            while await client.live() > 3:
                await pause()
            for stream in streams[1:]:
                await stream.close()
            waiting = asyncio.ensure_future(
                client.openai.completions.create(model=BASE, prompt=[engines.MUTE, 1], max_tokens=1_000_000)
            )
            while not await client.live():
                await pause()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await client.idle()

    run(test)


def test_adapters_over_the_command_line(tmp_path: Path) -> None:
    async def test() -> None:
        for seed, name in enumerate(("one", "two")):
            write_adapter(tmp_path / "adapters" / name, seed=seed, rank=seed + 2)
        async with whole(tmp_path, adapter_dirs=[str(tmp_path / "adapters")]) as client:

            async def command(*words: str) -> tuple[int, str]:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "loraplex.cli", "adapters", *words, "--url", client.server.url),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                )
                out, _ = await process.communicate()
                assert process.returncode is not None
                return process.returncode, out.decode()

            source = str(tmp_path / "adapters" / "two")
            assert (await command("add", "three", source))[0] == 0
            assert (await command("add", "three", source))[1].rstrip().endswith("[adapter_exists]")
            before = json.loads((await command("show", "one"))[1])
            assert (before["revision"], before["tensors_applied"], before["tensors_total"]) == (1, 4, 4)
            assert "one@2" in (await command("swap", "one", source))[1]
            status, text = await command("swap", "one", source, "--expected", "1")
            assert (status, text.rstrip().endswith("[adapter_revision_conflict]")) == (2, True)
            after = json.loads((await command("show", "one"))[1])
            assert (after["revision"], after["semantic_digest"] != before["semantic_digest"]) == (2, True)
            assert (await command("remove", "three"))[0] == 0
            listed = json.loads((await command("list", "--json"))[1])
            assert [item["alias"] for item in listed] == ["one", "two"]

    run(test)
