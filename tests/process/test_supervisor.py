"""Real engine processes: started, served by, killed, broken, restarted, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.process import engines
from tests.process.asking import read_all, submit
from tests.waiting import pid_of, run, until_gone

from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError
from loraplex.core.messages import Ended, Inspect, Tokens
from loraplex.process.child import Child
from loraplex.process.client import EngineClient
from loraplex.process.engine_process import REPORT_DECODER, EngineReady, EngineStart
from loraplex.process.logs import FIELDS
from loraplex.process.supervisor import MODULE, EngineStatus, EngineSupervisor, Patience, pause_s
from loraplex.sim.tokens import expected_tokens

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def served(
    folder: Path, builder: str = engines.ECHO, **options: Any
) -> AsyncIterator[tuple[EngineSupervisor, EngineClient]]:
    client = EngineClient(buffer_tokens=1 << 40)  # how quickly the tests read is not what they are about
    config = EngineConfig(model=str(folder), images_dir=str(folder))
    supervisor = EngineSupervisor(
        config, client, builder=builder, log_level="critical", pause=lambda failures: 0.0, **options
    )
    try:
        await supervisor.start()
        yield supervisor, client
    finally:
        await supervisor.stop()
        await client.close()


def test_the_real_control_plane_answers_over_the_wire(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, engines.VIRTUAL) as (supervisor, client):
            assert supervisor.ready
            assert supervisor.info["vocab_size"] == engines.VOCAB
            prompts = {f"r{k}": list(range(k + 1, 40 + k)) for k in range(20)}
            groups = {name: client.submit([submit(name, prompt)]) for name, prompt in prompts.items()}
            for name, prompt in prompts.items():
                tokens, ended = await read_all(groups[name])
                assert tokens == expected_tokens(np.array(prompt, dtype=np.int32), 0, 8, engines.VOCAB)
                assert ended.finish_reason == "length"
            refused = await read_all(client.submit([submit("x", [engines.VOCAB])]))
            assert refused[1].code == "token_out_of_range"
            figures = await client.call(Inspect(0))
            assert figures["requests"]["live"] == 0
            assert figures["pages"]["kv"] == 0

    run(test)


def test_an_engine_that_refuses_to_start_says_why(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(CallerError) as refused:
            async with served(tmp_path, engines.REFUSING):
                pass
        assert (refused.value.code, refused.value.param) == (ErrorCode.MODEL_UNSUPPORTED, "model")

    run(test)


def test_a_builder_that_does_not_exist_is_our_fault(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(LoraplexError) as failed:
            async with served(tmp_path, "tests.process.engines:none_such"):
                pass
        assert failed.value.code is ErrorCode.INTERNAL

    run(test)


async def _break(supervisor: EngineSupervisor, client: EngineClient, how: str) -> None:
    match how:
        case "killed":
            os.kill(pid_of(supervisor), signal.SIGKILL)
        case "exits":
            client.submit([submit("bad", [engines.DIE])])
        case "raises":
            client.submit([submit("bad", [engines.RAISE])])


@pytest.mark.parametrize("how", ["killed", "exits", "raises"])
def test_when_an_engine_dies_open_requests_end_and_another_one_serves(tmp_path: Path, how: str) -> None:
    async def test() -> None:
        restored: list[dict[str, Any]] = []
        async with served(tmp_path) as (supervisor, client):

            async def restore() -> None:
                assert not supervisor.ready
                restored.append(await client.call(Inspect(0)))

            supervisor.restore = restore
            first = supervisor.pid
            group = client.submit([submit("a", [engines.MUTE]), submit("b", [1, 2], max_tokens=10**6)])
            assert await group.read()
            call = asyncio.ensure_future(client.call(Inspect(0)))
            await call
            await _break(supervisor, client, how)
            ends: dict[int, str | None] = {}
            while not group.done:
                ends |= {index: m.code for index, m in await group.read() if isinstance(m, Ended)}
            assert ends == {0: "engine_died", 1: "engine_died"}
            assert not supervisor.ready
            with pytest.raises(CapacityError) as unavailable:
                supervisor.require_ready()
            assert unavailable.value.code is ErrorCode.ENGINE_UNAVAILABLE
            await supervisor.until(EngineStatus.READY)
            assert supervisor.pid != first
            assert supervisor.restarts == 1
            (figures,) = restored
            assert (figures["adapters"], figures["requests"]["live"]) == (
                [],
                0,
            )  # nothing sent to the dead reached the living
            tokens, ended = await read_all(client.submit([submit("a", [4, 5], max_tokens=3)]))
            assert (tokens, ended.finish_reason) == ([4, 5, 4], "length")

    run(test)


def test_an_engine_that_dies_while_it_gets_its_adapters_back_is_replaced_too(tmp_path: Path) -> None:
    async def test() -> None:
        attempts: list[int] = []
        async with served(tmp_path) as (supervisor, client):

            async def restore() -> None:
                attempts.append(pid_of(supervisor))
                if len(attempts) < 3:
                    client.submit([submit("bad", [engines.DIE])])
                    await asyncio.Event().wait()

            supervisor.restore = restore
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await supervisor.until(EngineStatus.RESTARTING)
            await supervisor.until(EngineStatus.READY)
            assert len(set(attempts)) == 3
            assert supervisor.pid == attempts[-1]

    run(test)


def test_an_engine_that_cannot_be_started_again_at_once_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with served(tmp_path) as (supervisor, client):
            interpreter, pauses = sys.executable, []

            def pause(failures: int) -> float:
                if len(pauses) == 3:
                    monkeypatch.setattr(sys, "executable", interpreter)
                pauses.append(failures)
                return 0.0

            supervisor._pause = pause
            monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await supervisor.until(EngineStatus.RESTARTING)
            await supervisor.until(EngineStatus.READY)
            assert pauses == [1, 2, 3, 4]
            assert (await read_all(client.submit([submit("a", [7], max_tokens=2)])))[0] == [7, 7]

    run(test)


def test_a_restart_that_takes_too_long_is_ended_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        patience = Patience(restart_least_s=2.0, restart_times=0.0)
        async with served(tmp_path, engines.SLOW_AGAIN, patience=patience) as (supervisor, client):
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await supervisor.until(EngineStatus.RESTARTING)
            await supervisor.until(EngineStatus.READY)
            assert (await read_all(client.submit([submit("a", [7], max_tokens=2)])))[0] == [7, 7]
            assert supervisor.restarts == 1

    run(test)
    assert "not ready within 2 s" in caplog.text


def test_an_engine_that_is_silent_while_it_gets_its_adapters_back_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        patience = Patience(ask_every_s=0.001, stalled_after_s=0.2, given_up_after_s=0.2)
        attempts: list[int] = []
        async with served(tmp_path / "m", patience=patience) as (supervisor, client):

            async def restore() -> None:
                attempts.append(pid_of(supervisor))
                if len(attempts) == 1:
                    client.submit([submit("bad", [engines.HANG])])
                    await asyncio.Event().wait()

            supervisor.restore = restore
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await supervisor.until(EngineStatus.RESTARTING)
            await supervisor.until(EngineStatus.READY)
            assert len(set(attempts)) == 2

    run(test)


def test_a_restart_says_where_its_time_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with served(tmp_path) as (supervisor, _):
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await supervisor.until(EngineStatus.RESTARTING)
            await supervisor.until(EngineStatus.READY)

    run(test)
    (record,) = [record for record in caplog.records if "ready again" in record.message]
    times = getattr(record, FIELDS)
    parts = [times[name] for name in ("before_s", "process_s", "build_s", "restore_s")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(times["down_s"], abs=0.03)


def test_pauses_between_restarts_are_bounded() -> None:
    assert [pause_s(failures) for failures in range(1, 8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert pause_s(10_000) == 4.0


def test_a_question_that_ends_typed_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        asked, enough = 0, asyncio.Event()
        patience = Patience(ask_every_s=0.001, stalled_after_s=3600, given_up_after_s=3600)
        async with served(tmp_path, patience=patience) as (supervisor, client):

            async def call(message: object) -> dict[str, Any]:
                nonlocal asked
                asked += 1
                if asked == 3:
                    enough.set()
                raise CapacityError(ErrorCode.ENGINE_UNAVAILABLE, "this server could not keep up")

            monkeypatch.setattr(client, "call", call)
            await enough.wait()
            assert supervisor.ready

    run(test)


def test_an_engine_that_does_not_answer_is_not_ready_until_it_does(tmp_path: Path) -> None:
    async def test() -> None:
        patience = Patience(ask_every_s=0.001, stalled_after_s=0.05, given_up_after_s=3600)
        async with served(tmp_path / "m", patience=patience) as (supervisor, client):
            group = client.submit([submit("a", [engines.HANG, 1], max_tokens=2)])
            await supervisor.until(EngineStatus.STALLED)
            assert not supervisor.ready
            (tmp_path / "go").touch()
            await supervisor.until(EngineStatus.READY)
            assert (await read_all(group))[0] == [engines.HANG, 1]
            assert supervisor.restarts == 0

    run(test)


def test_an_engine_that_never_answers_again_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        patience = Patience(ask_every_s=0.001, stalled_after_s=0.5, given_up_after_s=0.05)
        async with served(tmp_path / "m", patience=patience) as (supervisor, client):
            first = supervisor.pid
            group = client.submit([submit("a", [engines.HANG, 1])])
            assert (await read_all(group))[1].code == "engine_died"
            await supervisor.until(EngineStatus.READY)
            assert supervisor.pid != first

    run(test)


@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_engine_and_worker_die_together_and_others_serve(tmp_path: Path, victim: str) -> None:
    async def test() -> None:
        async with served(tmp_path, engines.SPLIT) as (supervisor, client):
            engine, worker = psutil.Process(supervisor.pid), psutil.Process(supervisor.info["worker"])
            group = client.submit([submit("a", [1, 2], max_tokens=30_000)])
            assert isinstance((await group.read())[0][1], Tokens)
            os.kill(engine.pid if victim == "engine" else worker.pid, signal.SIGKILL)
            assert (await read_all(group))[1].code == "engine_died"
            await supervisor.until(EngineStatus.READY)
            await asyncio.to_thread(until_gone, engine, worker)
            assert supervisor.info["worker"] != worker.pid
            second = psutil.Process(supervisor.info["worker"])
            tokens, _ = await read_all(client.submit([submit("a", [1, 2])]))
            assert tokens == expected_tokens(np.array([1, 2], dtype=np.int32), 0, 8, engines.VOCAB)
        await asyncio.to_thread(until_gone, second)

    run(test)


def test_stopping_ends_the_process_and_what_was_open(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as (supervisor, client):
            process = psutil.Process(supervisor.pid)
            group = client.submit([submit("a", [engines.MUTE])])
            await client.call(Inspect(0))
            await supervisor.stop()
            assert [m.code for _, m in await group.read()] == ["shutting_down"]  # type: ignore[union-attr]
            assert not process.is_running()
            assert supervisor.state is EngineStatus.STOPPED

    run(test)


def test_an_engine_that_is_asked_to_end_ends_in_order(tmp_path: Path) -> None:
    async def test() -> None:
        child = await Child.start(MODULE, "the engine's process")
        config = EngineConfig(model="m", images_dir=str(tmp_path))
        await child.send(EngineStart(config, f"ipc://{tmp_path / 's'}", engines.ECHO))
        assert isinstance(await child.receive(REPORT_DECODER), EngineReady)
        assert await child.stop(60) == 0

    run(test)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_is_not_for_the_engine(tmp_path: Path, number: signal.Signals) -> None:
    async def test() -> None:
        async with served(tmp_path) as (supervisor, client):
            os.kill(pid_of(supervisor), number)
            tokens, _ = await read_all(client.submit([submit("a", [7], max_tokens=2)]))
            assert tokens == [7, 7]
            assert supervisor.restarts == 0

    run(test)


PARENT = """
import asyncio, os, sys
sys.path[:0] = sys.argv[2:]
from loraplex.config import EngineConfig
from loraplex.process.client import EngineClient
from loraplex.process.logs import FIELDS
from loraplex.process.supervisor import EngineSupervisor

async def main():
    supervisor = EngineSupervisor(
        EngineConfig(model="m", images_dir=sys.argv[1]),
        EngineClient(),
        builder="tests.process.engines:build_echo",
    )
    await supervisor.start()
    print(supervisor.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_an_engine_dies_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(ROOT / "src"), str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    until_gone(engine)
