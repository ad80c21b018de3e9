"""Processes that prepare adapters: equal to preparation here, bounded in time and memory, replaceable, gone
at the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from tests.adapters import deadly
from tests.artifact.tiny import write_base, write_lora
from tests.catalog.remotes import WebServer
from tests.waiting import LIMIT_S, pid_of, run, until_gone

from loraplex.adapters import prepare_pool
from loraplex.adapters.prepare import prepare_adapter
from loraplex.adapters.prepare_pool import PreparePool
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import BaseModel, describe_base
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.limits import MAX_DOWNLOADS
from loraplex.images.disk_store import ImageStore


def serve(folder: Path, test: Callable[[PreparePool, BaseModel], Awaitable[None]]) -> None:
    """Run a test over a pool in `folder`, which is closed afterwards."""

    async def bounded() -> None:
        (folder / "base").mkdir()
        base = describe_base(write_base(folder / "base"), Dtype.FLOAT32, 4)
        pool = PreparePool(base, folder / "there", folder / "artifacts")
        try:
            await test(pool, base)
        finally:
            await pool.close()

    run(bounded)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children obey the sources of `deadly`."""
    monkeypatch.setattr(prepare_pool, "MODULE", deadly.MODULE)


def test_preparation_in_a_process_equals_preparation_here(tmp_path: Path) -> None:
    adapter = write_lora(tmp_path / "adapter")

    async def test(pool: PreparePool, base: BaseModel) -> None:
        prepared = await pool(str(adapter))
        assert prepared == prepare_adapter(adapter, base, ImageStore(tmp_path / "here"))
        assert [p.name for p in (tmp_path / "there").iterdir()] == [
            p.name for p in (tmp_path / "here").iterdir()
        ]
        with pytest.raises(CallerError) as caught:
            await pool(str(tmp_path / "nothing"))
        assert caught.value.code is ErrorCode.ADAPTER_SOURCE_MISSING
        os.kill(pid_of(pool._here), signal.SIGKILL)
        assert await pool(str(adapter)) == prepared  # begun again in another child

    serve(tmp_path, test)


async def refusal(pool: PreparePool, source: str) -> LoraplexError:
    with pytest.raises(LoraplexError) as caught:
        await pool(source)
    return caught.value


@pytest.mark.usefixtures("hostile")
def test_a_preparation_that_no_child_survives_ends_typed(tmp_path: Path) -> None:
    adapter = str(write_lora(tmp_path / "adapter"))

    async def test(pool: PreparePool, base: BaseModel) -> None:
        assert (await refusal(pool, deadly.DIE)).code is ErrorCode.ADAPTER_LOAD_FAILED
        assert (await pool(adapter)).method == "lora"

    serve(tmp_path, test)


@pytest.mark.usefixtures("hostile")
def test_a_preparation_beyond_its_bound_of_memory_ends_typed_and_its_child_goes_on(tmp_path: Path) -> None:
    adapter = str(write_lora(tmp_path / "adapter"))

    async def test(pool: PreparePool, base: BaseModel) -> None:
        assert (await pool(adapter)).method == "lora"
        before = pid_of(pool._here)
        limit = psutil.Process(before).rlimit(psutil.RLIMIT_DATA)[0]
        assert limit == prepare_pool.memory_bound()
        error = await refusal(pool, deadly.GREEDY)
        assert error.code is ErrorCode.ADAPTER_TOO_COSTLY
        assert f"{limit >> 20} MiB" in error.message
        assert (await pool(adapter)).method == "lora"
        assert pool._here.pid == before

    serve(tmp_path, test)


@pytest.mark.usefixtures("hostile")
def test_a_preparation_beyond_its_bound_of_time_ends_typed_with_its_child(tmp_path: Path) -> None:
    adapter = str(write_lora(tmp_path / "adapter"))

    async def test(pool: PreparePool, base: BaseModel) -> None:
        await pool(adapter)
        first = psutil.Process(pid_of(pool._here))
        pool._here.bound_s = 0.05
        error = await refusal(pool, deadly.NEVER)
        assert error.code is ErrorCode.ADAPTER_TOO_COSTLY
        assert "0.05 s" in error.message
        pool._here.bound_s = LIMIT_S
        assert (await pool(adapter)).method == "lora"
        await asyncio.to_thread(until_gone, first)

    serve(tmp_path, test)


@pytest.mark.usefixtures("hostile")
def test_a_preparation_whose_caller_is_gone_ends_and_holds_up_no_other(tmp_path: Path) -> None:
    adapter = str(write_lora(tmp_path / "adapter"))

    async def test(pool: PreparePool, base: BaseModel) -> None:
        await pool(adapter)
        first = psutil.Process(pid_of(pool._here))
        left = asyncio.ensure_future(pool(deadly.NEVER))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(pool(adapter))
        await asyncio.sleep(0)
        left.cancel()
        assert (await waiting).method == "lora"
        assert left.cancelled()
        await asyncio.to_thread(until_gone, first)

    serve(tmp_path, test)


def test_sources_that_do_not_answer_hold_up_nothing_that_is_here(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "adapter")
    with WebServer() as web:
        web.publish(folder, "/a")
        answering, silent = threading.Event(), threading.Event()

        def wait(part: bytes) -> list[bytes]:
            answering.set()
            silent.wait()
            return [part]

        async def test(pool: PreparePool, base: BaseModel) -> None:
            stored = await pool(f"{web.url}/a")
            web.body = wait
            web.publish(folder, "/b")
            slow = [asyncio.ensure_future(pool(f"{web.url}/b")) for _ in range(MAX_DOWNLOADS + 1)]
            await asyncio.to_thread(answering.wait)
            here = await pool(str(folder))
            assert here.identity == stored.identity
            assert (await pool(f"{web.url}/a", stored.content)).content == stored.content
            assert not any(task.done() for task in slow)
            silent.set()
            assert {(await task).content for task in slow} == {stored.content}
            # the same source at once is downloaded once
            assert len(web.bytes_asked("/b/adapter_model.safetensors")) == 1

        try:
            serve(tmp_path, test)
        finally:
            silent.set()


def test_a_preparation_in_hand_does_not_hold_up_the_end(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "adapter")

    async def test(pool: PreparePool, base: BaseModel) -> None:
        await asyncio.gather(pool(str(tmp_path / "nothing")), return_exceptions=True)
        process = psutil.Process(pid_of(pool._here))
        process.suspend()  # whatever it is given now, it does not finish
        waiting = [asyncio.ensure_future(pool(str(folder))) for _ in range(4)]
        await asyncio.sleep(0)
        await pool.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {end.code for end in ends if isinstance(end, LoraplexError)} == {ErrorCode.SHUTTING_DOWN}
        assert all(isinstance(end, LoraplexError) for end in ends)
        await asyncio.to_thread(until_gone, process)

    serve(tmp_path, test)
