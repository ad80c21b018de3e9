"""Pins that follow their alias, shadow copies before publication, revocation, limits; and what failures
leave.
"""

from __future__ import annotations

import pytest
from tests.adapters.stand_ins import Engine, Preparing, key, pins, run
from tests.catalog.names import named

from loraplex.adapters.manager import AdapterService
from loraplex.core.errors import CallerError, CapacityError, ErrorCode
from loraplex.core.messages import LoadAdapter, PinAdapter, RevokeAdapter, SetLimits

FULL = CapacityError(ErrorCode.POOL_EXHAUSTED, "no room beside the old revision")


def test_the_new_revision_is_beside_the_old_one_before_the_alias_moves() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        await service.swap(named("a"), "y")
        loads = [m for m in engine.asked if isinstance(m, LoadAdapter)]
        assert [(m.key, m.beside) for m in loads] == [(key("y"), key("x"))]

    run(test)


def test_a_swap_without_room_is_refused_and_leaves_nothing_unless_it_drains() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        await service.pin(named("a"))

        call = engine.call

        async def full(message: object) -> dict[str, object]:
            answer = await call(message)
            if isinstance(message, LoadAdapter):
                raise FULL
            return answer

        engine.call = full  # type: ignore[method-assign]
        with pytest.raises(CapacityError, match="no room"):
            await service.swap(named("a"), "y")
        assert service.resolve("a").revision == 1
        assert engine.sent == [("+", key("x")), ("+", key("y")), ("-", key("y"))]
        assert pins(engine) == [(key("x"), True), (key("y"), True), (key("y"), False)]
        assert (await service.swap(named("a"), "y", drain=True)).revision == 2
        assert pins(engine)[3:] == [(key("x"), False), (key("y"), True)]
        await service.settled()
        assert engine.sent[-1] == ("-", key("x"))

    run(test)


@pytest.mark.parametrize("drain", [False, True])
def test_what_the_engine_refuses_after_a_publication_does_not_undo_it(
    drain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        await service.pin(named("a"))
        call = engine.call

        async def refusing(message: object) -> dict[str, object]:
            answer = await call(message)
            if isinstance(message, PinAdapter) and message.pinned is drain:
                raise FULL
            return answer

        engine.call = refusing  # type: ignore[method-assign]
        new = await service.swap(named("a"), "y", drain=drain)
        assert service.resolve("a") == new
        assert service.catalog.store.revision(named("a"), 2) == new
        await service.settled()
        assert engine.sent == [("+", key("x")), ("+", key("y")), ("-", key("x"))]
        assert service.controls.pinned(named("a")) is not drain
        assert "could not follow" in caplog.text

    run(test)


def test_a_pin_follows_its_alias_and_ends_with_it() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        await service.add(named("b"), "x")
        await service.pin(named("a"))
        await service.pin(named("a"))
        await service.pin(named("b"))
        assert pins(engine) == [(key("x"), True)] * 2  # once for each name
        await service.swap(named("a"), "y")
        assert pins(engine)[2:] == [(key("y"), True), (key("x"), False)]
        await service.swap(named("a"), "y#same")
        await service.remove(named("a"))
        assert pins(engine)[4:] == [(key("y"), False)]
        await service.unpin(named("b"))
        await service.unpin(named("b"))
        assert pins(engine)[5:] == [(key("x"), False)]

    run(test)


def test_revocation_takes_every_name_and_is_remembered() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        for alias in ("a", "b"):
            await service.add(named(alias), "x")
        await service.add(named("c"), "y")
        await service.pin(named("b"))
        assert {revision.name for revision in await service.revoke(named("a"))} == {"a@1", "b@1"}
        assert [m.key for m in engine.asked if isinstance(m, RevokeAdapter)] == [key("x")]
        assert [revision.name for revision in service] == ["c@1"]
        for change in (
            service.add(named("a"), "x"),
            service.swap(named("c"), "x"),
            service.put(named("d"), "x"),
        ):
            with pytest.raises(CallerError) as refused:
                await change
            assert refused.value.code is ErrorCode.ADAPTER_REVOKED
        assert (await service.add(named("a"), "z")).name == "a@2"

    run(test)


def test_a_restarted_engine_gets_limits_and_pins_back() -> None:
    async def test(service: AdapterService, engine: Engine, _: Preparing) -> None:
        await service.add(named("a"), "x")
        await service.add(named("b"), "y")
        await service.pin(named("a"))
        await service.pin(named("b"))
        await service.controls.set_limits(adapter_pages=7)
        await service.controls.set_limits(host_bytes=9)
        engine.asked.clear()
        engine.refuse[key("y")] = CapacityError(ErrorCode.POOL_EXHAUSTED, "not now")
        assert set(await service.restore()) == {"b"}
        assert [m for m in engine.asked if isinstance(m, SetLimits)] == [SetLimits(0, 7, None, 9)]
        assert pins(engine) == [(key("x"), True), (key("y"), True)]
        assert service.controls.pinned(named("a"))
        assert not service.controls.pinned(named("b"))

    run(test)
