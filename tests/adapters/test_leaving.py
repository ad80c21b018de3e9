"""Adapters on their way out that are asked for once more, and answers that come when what was asked of has
changed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.adapters.stand_ins import Engine, Preparing, key, run
from tests.catalog.names import named
from tests.waiting import LIMIT_S

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import LoadAdapter, RegisterAdapter, RemoveAdapter


class Slow(Engine):
    """An engine in which the first message of a kind waits for `go`."""

    def __init__(self, kind: type, key: str) -> None:
        super().__init__()
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._kind, self._key = kind, key

    async def call(self, message: Any) -> dict[str, Any]:
        answer = await super().call(message)
        if isinstance(message, self._kind) and message.key == self._key and not self.reached.is_set():
            self.reached.set()
            await self.go.wait()
        return answer


async def turns(count: int = 20) -> None:
    """Let everything that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_is_served_again_while_it_leaves_leaves_once_more() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine = Slow(RemoveAdapter, key("x"))
            service = AdapterService(engine, AdapterCatalog(), Preparing())
            await service.add(named("a"), "x")
            await service.swap(named("a"), "y")
            await engine.reached.wait()  # the removal of a@1 is under way
            async with service.serving("a@1") as (revision, _):
                assert revision.key == key("x")
                engine.go.set()
                await turns()
                assert [kind for kind, of in engine.sent if of == key("x")] == ["+", "-", "+"]
            await service.settled()
            assert [kind for kind, of in engine.sent if of == key("x")] == ["+", "-", "+", "-"]
            await service.close()

    asyncio.run(scenario())


def test_an_image_outlives_whoever_waits_to_register_it() -> None:
    reclaimed: list[str] = []

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine = Slow(RemoveAdapter, key("x"))
            service = AdapterService(engine, AdapterCatalog(), Preparing(), reclaimed.append)
            await service.add(named("a"), "x")
            await service.add(named("b"), "v")
            await service.swap(named("a"), "y")
            await engine.reached.wait()
            call, swapping, free = engine.call, asyncio.Event(), asyncio.Event()

            async def held_by_a_swap(message: Any) -> dict[str, Any]:
                answer = await call(message)
                if isinstance(message, LoadAdapter):
                    swapping.set()
                    await free.wait()
                if isinstance(message, RegisterAdapter):
                    assert message.kernel_digest not in reclaimed, "registered without an image"
                return answer

            engine.call = held_by_a_swap  # type: ignore[method-assign]
            swap = asyncio.create_task(service.swap(named("b"), "w"))
            await swapping.wait()

            async def ask() -> str:
                async with service.serving("a@1") as (revision, _):
                    return revision.name

            asking = asyncio.create_task(ask())
            await turns()
            await service.off_loop(lambda: None)  # behind the look-up of a@1
            await turns()
            assert service._life.held.is_bound(key("x"))
            engine.go.set()  # the removal ends while the change lock is the swap's
            await turns()
            free.set()
            await swap
            assert await asking == "a@1"
            await service.settled()
            assert engine.sent[-1] == ("-", key("x")) or ("-", key("x")) in engine.sent[-2:]
            assert sorted(reclaimed) == sorted([key("x"), key("v")])
            await service.close()

    asyncio.run(scenario())


def test_a_registration_whose_client_goes_is_taken_back() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine = Slow(RegisterAdapter, key("x"))
            service = AdapterService(engine, AdapterCatalog(), Preparing())
            task = asyncio.create_task(service.add(named("a"), "x"))
            await engine.reached.wait()
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            assert engine.sent == [("+", key("x")), ("-", key("x"))]
            await service.close()

    asyncio.run(scenario())


def test_what_is_revoked_while_it_is_registered_does_not_stay() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S):
            engine = Slow(RegisterAdapter, key("x"))
            service = AdapterService(engine, AdapterCatalog(), Preparing())
            adding = asyncio.create_task(service.add(named("a"), "x"))
            await engine.reached.wait()
            service.controls.forbid(key("x"))  # another server's revocation was seen
            engine.go.set()
            with pytest.raises(CallerError) as caught:
                await adding
            assert caught.value.code is ErrorCode.ADAPTER_REVOKED
            assert engine.sent == [("+", key("x")), ("-", key("x"))]
            await service.close()

    asyncio.run(scenario())


def test_a_restarted_engine_gets_back_what_requests_hold_of_superseded_revisions() -> None:
    async def test(service: AdapterService, engine: Engine, preparing: Preparing) -> None:
        for source in ("x", "y", "z"):
            await service.put(named("a"), source)
            if source != "z":
                await service.settled()
        await service.add(named("b"), "v")
        async with service.serving("a@1") as (revision, _), service.serving("b") as (removed, _):
            await service.remove(named("b"))
            await turns()
            engine.sent.clear()
            assert await service.restore() == {}
            held = {key("z"), revision.key, removed.key}
            assert sorted(engine.sent) == sorted(("+", of) for of in held)
            service.controls.forbid(removed.key)
            engine.sent.clear()
            assert await service.restore() == {}
            assert sorted(engine.sent) == sorted(("+", of) for of in held - {removed.key})
            engine.refuse[revision.key] = CallerError(ErrorCode.ADAPTER_TOO_LARGE, "too large")
            assert set(await service.restore()) == {revision.key[:12]}
            engine.refuse.clear()
            await service.restore()
            engine.sent.clear()
        await service.settled()
        assert engine.sent == [("-", key("x"))]

    run(test)


def test_a_pin_goes_to_what_the_alias_stands_for_when_its_turn_comes() -> None:
    async def test(service: AdapterService, engine: Engine, preparing: Preparing) -> None:
        await service.add(named("a"), "x")
        await asyncio.gather(service.swap(named("a"), "y"), service.pin(named("a")))
        assert service.controls.pinned_key(named("a")) == key("y")
        await service.settled()
        assert engine.sent[-1] == ("-", key("x"))

    run(test)
