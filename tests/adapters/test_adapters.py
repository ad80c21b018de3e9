"""Adapters by name: what is published, what the engine is told and when, and what failures leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from tests.adapters.deadly import die
from tests.adapters.stand_ins import Engine, Preparing, key, run
from tests.artifact.tiny import write_base, write_lora
from tests.catalog.remotes import WebServer
from tests.waiting import LIMIT_S

from loraplex.adapters import prepare_pool
from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.adapters.prepare import prepare_adapter
from loraplex.adapters.prepare_pool import PreparePool
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import describe_base
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.limits import MAX_DOWNLOADS
from loraplex.images.disk_store import ImageStore


def test_two_names_of_one_artifact_leave_with_the_last() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x#1")
        await service.add("b", "x#2")
        assert engine.sent == [("+", key("x"))]
        await service.remove("a")
        await service.settled()
        assert engine.sent == [("+", key("x"))]
        await service.swap("b", "y")
        await service.settled()
        assert engine.sent == [("+", key("x")), ("+", key("y")), ("-", key("x"))]
        await service.swap("b", "y#again")
        await service.settled()
        assert service.resolve("b").revision == 3
        assert len(engine.sent) == 3

    run(test)


def test_swap_does_not_wait_for_the_old_one_to_drain() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x")
        with service.bind("a") as bound:
            new = await service.swap("a", "y")
            assert (bound.revision, new.revision) == (1, 2)
            with service.bind("a@2") as again:
                assert again.key == key("y")
            await asyncio.sleep(0)
            assert ("-", key("x")) not in engine.sent
        await service.settled()
        assert engine.sent[-1] == ("-", key("x"))

    run(test)


def test_a_name_that_comes_back_cancels_the_retirement() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x")
        with service.bind("a"):
            await service.remove("a")
            await service.add("b", "x")
        await service.settled()
        assert engine.sent == [("+", key("x"))]
        with service.bind("b"):
            await service.remove("b")
            await service.add("b", "x")
            await service.remove("b")
        await service.settled()
        assert engine.sent == [("+", key("x")), ("-", key("x"))]

    run(test)


def test_registration_after_removal_is_sent_after_it() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x")
        engine.answer.clear()
        await service.remove("a")
        await engine.until(2)
        adding = asyncio.ensure_future(service.add("a", "x"))
        await engine.until(3)
        engine.answer.set()
        assert (await adding).revision == 2
        assert [kind for kind, _ in engine.sent] == ["+", "-", "+"]

    run(test)


def test_failures_before_publication_change_nothing() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x")
        generation = service.generation
        engine.refuse[key("y")] = CapacityError(ErrorCode.POOL_EXHAUSTED, "full")
        for change in (
            service.swap("a", "y"),
            service.put("a", "y"),
            service.add("b", "y"),
            service.put("b", "y"),
        ):
            with pytest.raises(CapacityError):
                await change
        assert [r.name for r in service] == ["a@1"]
        assert service.generation == generation
        engine.refuse.clear()
        assert (await service.put("a", "y")).name == "a@2"

    run(test)


def test_races_for_one_name_have_one_winner() -> None:
    async def test(service: AdapterService, engine: Engine, preparing: Preparing) -> None:
        preparing.gate.clear()
        adds = [asyncio.ensure_future(service.add("a", f"x{n}")) for n in range(3)]
        await asyncio.sleep(0)
        preparing.gate.set()
        results = await asyncio.gather(*adds, return_exceptions=True)
        assert sum(isinstance(result, CallerError) for result in results) == 2
        preparing.gate.clear()
        swaps = [asyncio.ensure_future(service.swap("a", f"y{n}", 1)) for n in range(3)]
        await asyncio.sleep(0)
        preparing.gate.set()
        results = await asyncio.gather(*swaps, return_exceptions=True)
        codes = [result.code for result in results if isinstance(result, CallerError)]
        assert codes == [ErrorCode.ADAPTER_REVISION_CONFLICT] * 2
        await service.settled()
        assert [kind for kind, _ in engine.sent] == ["+", "+", "-"]

    run(test)


def test_names_are_checked_before_anything_is_read() -> None:
    async def test(service: AdapterService, engine: Engine, preparing: Preparing) -> None:
        preparing.gate.clear()
        for change, code in (
            (service.add("base", "x"), ErrorCode.ADAPTER_EXISTS),
            (service.put("base", "x"), ErrorCode.ADAPTER_EXISTS),
            (service.put("a b", "x"), ErrorCode.INVALID_REQUEST),
            (service.swap("a", "x"), ErrorCode.ADAPTER_NOT_FOUND),
            (service.put("a", "x", 1), ErrorCode.ADAPTER_NOT_FOUND),
            (service.remove("a"), ErrorCode.ADAPTER_NOT_FOUND),
            (service.describe("a"), ErrorCode.ADAPTER_NOT_FOUND),
        ):
            with pytest.raises(CallerError) as caught:
                await change
            assert caught.value.code is code
        assert engine.sent == []

    run(test)


def test_restore_registers_everything_and_reports_what_it_could_not() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x")
        await service.add("b", "x")
        await service.add("c", "y")
        engine.sent.clear()
        engine.refuse[key("y")] = CallerError(ErrorCode.ADAPTER_TOO_LARGE, "too large")
        failed = await service.restore()
        assert {alias: error.code for alias, error in failed.items()} == {"c": ErrorCode.ADAPTER_TOO_LARGE}
        assert engine.sent == [("+", key("x")), ("+", key("y"))]

    run(test)


def test_a_removal_that_the_engine_refuses_is_kept_for_the_operator() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add("a", "x")
        engine.refuse[key("x")] = CapacityError(ErrorCode.ENGINE_DIED, "gone")
        await service.remove("a")
        await service.settled()
        assert service.retire_failures[key("x")].code is ErrorCode.ENGINE_DIED

    run(test)


def test_preparation_in_a_process_equals_preparation_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    base = describe_base(write_base(tmp_path / "base"), Dtype.FLOAT32, 4)
    adapter = write_lora(tmp_path / "adapter")
    pool = PreparePool(base, tmp_path / "there")

    async def test() -> None:
        prepared = await pool(str(adapter))
        assert prepared == prepare_adapter(adapter, base, ImageStore(tmp_path / "here"))
        assert [p.name for p in (tmp_path / "there").iterdir()] == [
            p.name for p in (tmp_path / "here").iterdir()
        ]
        with pytest.raises(CallerError) as caught:
            await pool(str(tmp_path / "nothing"))
        assert caught.value.code is ErrorCode.ADAPTER_SOURCE_MISSING
        assert pool._here.pool is not None
        (process,) = pool._here.pool._processes.values()
        process.kill()
        process.join()
        assert await pool(str(adapter)) == prepared  # begun again in another child
        monkeypatch.setattr(prepare_pool, "_prepare", die)
        with pytest.raises(InternalFault) as fault:
            await pool(str(adapter))  # every child dies of it
        assert fault.value.code is ErrorCode.ADAPTER_LOAD_FAILED
        monkeypatch.undo()
        assert await pool(str(adapter)) == prepared

    try:
        asyncio.run(test())
    finally:
        pool.close()


def test_sources_that_do_not_answer_hold_up_nothing_that_is_here(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = describe_base(write_base(tmp_path / "base"), Dtype.FLOAT32, 4)
    pool = PreparePool(base, tmp_path / "there", tmp_path / "artifacts")
    folder = write_lora(tmp_path / "adapter")
    with WebServer() as web:
        web.publish(folder, "/a")
        answering, silent = threading.Event(), threading.Event()

        def wait(part: bytes) -> list[bytes]:
            answering.set()
            silent.wait()
            return [part]

        async def test() -> None:
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
            asyncio.run(test())
        finally:
            silent.set()
            pool.close()


def test_a_preparation_in_hand_does_not_hold_up_the_end(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = describe_base(write_base(tmp_path / "base"), Dtype.FLOAT32, 4)
    pool = PreparePool(base, tmp_path / "there")
    folder = write_lora(tmp_path / "adapter")

    async def test() -> None:
        await asyncio.gather(pool(str(tmp_path / "nothing")), return_exceptions=True)
        assert pool._here.pool is not None
        (process,) = pool._here.pool._processes.values()
        os.kill(process.pid, signal.SIGSTOP)  # whatever it is given now, it does not finish
        waiting = [asyncio.ensure_future(pool(str(folder))) for _ in range(4)]
        await asyncio.sleep(0)
        pool.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {end.code for end in ends if isinstance(end, LoraplexError)} == {ErrorCode.SHUTTING_DOWN}
        assert all(isinstance(end, LoraplexError) for end in ends)
        # A stopped process ends of SIGKILL alone. Its exit status goes to whichever thread asks first, here or the
        # pool's own, so it is the end itself that is waited for.
        assert wait([process.sentinel]), "the process that prepared was left behind"

    asyncio.run(test())


def test_images_go_with_the_last_revision_that_names_them() -> None:
    reclaimed: list[str] = []

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine, preparing = Engine(), Preparing()
            service = AdapterService(engine, AdapterCatalog(), preparing, reclaimed.append)
            await service.add("a", "one")
            await service.add("b", "one")
            await service.swap("a", "two")
            await service.settled()
            assert reclaimed == []  # b still names it
            await service.remove("b")
            await service.settled()
            assert reclaimed == [key("one")]
            preparing.gate.clear()
            again = asyncio.create_task(service.add("c", "two"))
            await asyncio.sleep(0)
            await service.remove("a")
            await service.settled()
            assert reclaimed == [key("one")]  # a preparation may have found the image in the store
            preparing.gate.set()
            await again
            assert reclaimed == [key("one")]
            engine.refuse[key("three")] = InternalFault(ErrorCode.COPY_CHECKSUM, "damaged")
            with pytest.raises(InternalFault):
                await service.add("d", "three")
            assert reclaimed == [key("one"), key("three")]
            await service.close()

    asyncio.run(scenario())
