"""A server's life as a process: start, signals, a killed engine, adapters of the command line, refusals to
start.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.process import engines
from tests.server.processes import started
from tests.server.tiny_server import write_adapter
from tests.waiting import pause, run, until_gone

pytestmark = pytest.mark.e2e


def test_it_serves_adapters_and_drains(tmp_path: Path) -> None:
    async def test() -> None:
        write_adapter(tmp_path / "one", seed=1)
        write_adapter(tmp_path / "many" / "two", seed=2)
        write_adapter(tmp_path / "many" / "three", seed=3, rank=4)
        (tmp_path / "many" / "broken").mkdir()
        (tmp_path / "many" / "broken" / "adapter_config.json").write_text("{}")
        sources = {"adapters": [["one", str(tmp_path / "one")]], "adapter_dirs": [str(tmp_path / "many")]}
        async with started(tmp_path, drain_s=60, **sources) as server:
            await server.until_said("adapter broken is not served")
            await server.until_said("models: tiny, one, three, two")
            assert await server.ask("7,8") == (200, {"tokens": [7, 8, 7, 8, 7], "end": "length"})
            status, answer = await server.ask("7,8", "one@1")
            assert (status, answer["end"]) == (200, "length")
            assert answer["tokens"] != [7, 8, 7, 8, 7]
            assert await server.ask("7", "four") == (404, {"code": "model_not_found"})
            pending = asyncio.ensure_future(server.ask(f"{engines.PAUSED},5"))
            await server.until(lambda state: state["open"] == 1)
            server.process.send_signal(signal.SIGTERM)
            await server.until(lambda state: state["phase"] == "draining")
            assert await server.ask("7,8") == (503, {"code": "shutting_down"})
            (tmp_path / "go").touch()  # the paused request may go on
            assert (await pending)[1]["end"] == "length"
            assert await server.process.wait() == 0
            assert list((tmp_path / "work").iterdir()) == []

    run(test)


def test_what_does_not_finish_in_time_is_ended_and_the_exit_is_clean(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(tmp_path, drain_s=0.05) as server:
            engine = psutil.Process((await server.ready())["pid"])
            pending = asyncio.ensure_future(server.ask(engines.MUTE))
            await server.until(lambda state: state["open"] == 1)
            server.process.send_signal(signal.SIGTERM)
            assert await pending == (200, {"tokens": [], "end": "shutting_down"})
            assert await server.process.wait() == 0
            assert not engine.is_running()

    run(test)


def test_a_second_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(tmp_path, drain_s=3600) as server:
            engine = psutil.Process((await server.ready())["pid"])
            pending = asyncio.ensure_future(server.ask(engines.MUTE))
            await server.until(lambda state: state["open"] == 1)
            server.process.send_signal(signal.SIGINT)
            await server.until(lambda state: state["phase"] == "draining")
            server.process.send_signal(signal.SIGINT)
            assert await server.process.wait() == 130
            with pytest.raises(httpx.HTTPError):
                await pending
            await asyncio.to_thread(until_gone, engine)

    run(test)


def test_a_killed_engine_is_replaced_and_gets_its_adapters_back(tmp_path: Path) -> None:
    async def test() -> None:
        source = write_adapter(tmp_path / "one", seed=1)
        async with started(tmp_path, adapters=[["one", str(source)]]) as server:
            before = (await server.ready())["pid"]
            expected = await server.ask("7,8", "one")
            pending = asyncio.ensure_future(server.ask(engines.MUTE))
            await server.until(lambda state: state["open"] == 1)
            os.kill(before, signal.SIGKILL)
            assert (await pending)[1]["end"] == "engine_died"
            status = 503
            while status == 503:
                await pause()
                status, answer = await server.ask("7,8", "one")
            assert (status, answer) == expected
            assert (await server.until(lambda state: True))["pid"] != before

    run(test)


def test_a_signal_while_it_starts_ends_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with started(tmp_path, engines.NEVER) as server:
            await server.until_said("starting the engine")
            answer = await server.http.get("/ready")  # it listens before it can serve
            assert (answer.status_code, answer.json()["phase"]) == (503, "starting")
            assert await server.ask("7") == (503, {"code": "engine_unavailable"})
            server.process.send_signal(signal.SIGTERM)
            assert await server.process.wait() == 0

    run(test)


@pytest.mark.parametrize("fault", ["adapter", "engine", "port"])
def test_what_keeps_it_from_serving_is_said_and_typed(tmp_path: Path, fault: str) -> None:
    async def refused(builder: str, code: str, **fields: Any) -> None:
        async with started(tmp_path, builder, **fields) as server:
            _, errors = await server.process.communicate()
            assert server.process.returncode == 2, errors.decode()
            assert f"[{code}]" in errors.decode().splitlines()[-1]

    async def test() -> None:
        match fault:
            case "adapter":
                sources = [["one", str(tmp_path / "nowhere")]]
                await refused(engines.ECHO, "adapter_source_missing", adapters=sources)
            case "engine":
                await refused(engines.REFUSING, "model_unsupported")
            case "port":
                async with started(tmp_path) as other:
                    await other.ready()
                    await refused(engines.ECHO, "config_invalid", port=int(other.url.rpartition(":")[2]))

    run(test)
