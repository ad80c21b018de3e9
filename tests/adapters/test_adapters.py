"""Adapters by name: what is published, what the engine is told and when, and what failures leave behind."""

from __future__ import annotations

import asyncio

import pytest
from tests.adapters.stand_ins import Engine, Preparing, key, run
from tests.catalog.names import named
from tests.waiting import LIMIT_S

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault


def test_two_names_of_one_artifact_leave_with_the_last() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x#1")
        await service.add(named("b"), "x#2")
        assert engine.sent == [("+", key("x"))]
        await service.remove(named("a"))
        await service.settled()
        assert engine.sent == [("+", key("x"))]
        await service.swap(named("b"), "y")
        await service.settled()
        assert engine.sent == [("+", key("x")), ("+", key("y")), ("-", key("x"))]
        await service.swap(named("b"), "y#again")
        await service.settled()
        assert service.resolve("b").revision == 3
        assert len(engine.sent) == 3

    run(test)


def test_swap_does_not_wait_for_the_old_one_to_drain() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        with service.bind("a") as bound:
            new = await service.swap(named("a"), "y")
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
        await service.add(named("a"), "x")
        with service.bind("a"):
            await service.remove(named("a"))
            await service.add(named("b"), "x")
        await service.settled()
        assert engine.sent == [("+", key("x"))]
        with service.bind("b"):
            await service.remove(named("b"))
            await service.add(named("b"), "x")
            await service.remove(named("b"))
        await service.settled()
        assert engine.sent == [("+", key("x")), ("-", key("x"))]

    run(test)


def test_registration_after_removal_is_sent_after_it() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        engine.answer.clear()
        await service.remove(named("a"))
        await engine.until(2)
        adding = asyncio.ensure_future(service.add(named("a"), "x"))
        await engine.until(3)
        engine.answer.set()
        assert (await adding).revision == 2
        assert [kind for kind, _ in engine.sent] == ["+", "-", "+"]

    run(test)


def test_failures_before_publication_change_nothing() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        generation = service.generation
        engine.refuse[key("y")] = CapacityError(ErrorCode.POOL_EXHAUSTED, "full")
        for change in (
            service.swap(named("a"), "y"),
            service.put(named("a"), "y"),
            service.add(named("b"), "y"),
            service.put(named("b"), "y"),
        ):
            with pytest.raises(CapacityError):
                await change
        assert [r.name for r in service] == ["a@1"]
        assert service.generation == generation
        engine.refuse.clear()
        assert (await service.put(named("a"), "y")).name == "a@2"

    run(test)


def test_races_for_one_name_have_one_winner() -> None:
    async def test(service: AdapterService, engine: Engine, preparing: Preparing) -> None:
        preparing.gate.clear()
        adds = [asyncio.ensure_future(service.add(named("a"), f"x{n}")) for n in range(3)]
        await asyncio.sleep(0)
        preparing.gate.set()
        results = await asyncio.gather(*adds, return_exceptions=True)
        assert sum(isinstance(result, CallerError) for result in results) == 2
        preparing.gate.clear()
        swaps = [asyncio.ensure_future(service.swap(named("a"), f"y{n}", expected=1)) for n in range(3)]
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
            (service.add(named("base"), "x"), ErrorCode.ADAPTER_EXISTS),
            (service.put(named("base"), "x"), ErrorCode.ADAPTER_EXISTS),
            (service.put(named("a b"), "x"), ErrorCode.INVALID_REQUEST),
            (service.swap(named("a"), "x"), ErrorCode.ADAPTER_NOT_FOUND),
            (service.put(named("a"), "x", expected=1), ErrorCode.ADAPTER_NOT_FOUND),
            (service.remove(named("a")), ErrorCode.ADAPTER_NOT_FOUND),
            (service.describe(named("a")), ErrorCode.ADAPTER_NOT_FOUND),
        ):
            with pytest.raises(CallerError) as caught:
                await change
            assert caught.value.code is code
        assert engine.sent == []

    run(test)


def test_restore_registers_everything_and_reports_what_it_could_not() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        await service.add(named("b"), "x")
        await service.add(named("c"), "y")
        engine.sent.clear()
        engine.refuse[key("y")] = CallerError(ErrorCode.ADAPTER_TOO_LARGE, "too large")
        failed = await service.restore()
        assert {alias: error.code for alias, error in failed.items()} == {"c": ErrorCode.ADAPTER_TOO_LARGE}
        assert engine.sent == [("+", key("x")), ("+", key("y"))]

    run(test)


def test_a_removal_that_the_engine_refuses_is_kept_for_the_operator() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        engine.refuse[key("x")] = CapacityError(ErrorCode.ENGINE_DIED, "gone")
        await service.remove(named("a"))
        await service.settled()
        assert service.retire_failures[key("x")].code is ErrorCode.ENGINE_DIED

    run(test)


def test_images_go_with_the_last_revision_that_names_them() -> None:
    reclaimed: list[str] = []

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine, preparing = Engine(), Preparing()
            service = AdapterService(engine, AdapterCatalog(), preparing, reclaimed.append)
            await service.add(named("a"), "one")
            await service.add(named("b"), "one")
            await service.swap(named("a"), "two")
            await service.settled()
            assert reclaimed == []  # b still names it
            await service.remove(named("b"))
            await service.settled()
            assert reclaimed == [key("one")]
            preparing.gate.clear()
            again = asyncio.create_task(service.add(named("c"), "two"))
            await asyncio.sleep(0)
            await service.remove(named("a"))
            await service.settled()
            assert reclaimed == [key("one")]  # a preparation may have found the image in the store
            preparing.gate.set()
            await again
            assert reclaimed == [key("one")]
            engine.refuse[key("three")] = InternalFault(ErrorCode.COPY_CHECKSUM, "damaged")
            with pytest.raises(InternalFault):
                await service.add(named("d"), "three")
            assert reclaimed == [key("one"), key("three")]
            await service.close()

    asyncio.run(scenario())
