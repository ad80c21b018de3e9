"""Adapters of a durable catalog: what an earlier run or another server published, read again and held to its
digest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.shared_catalog import Server, run
from tests.adapters.stand_ins import key
from tests.catalog.names import named

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.catalog.database import Database
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.messages import PinAdapter, RevokeAdapter


async def refused(code: ErrorCode, server: Server, name: str) -> None:
    with pytest.raises(LoraplexError) as caught:
        async with server.service.serving(name):
            pytest.fail("it must not be served")
    assert caught.value.code is code


def test_a_restart_serves_what_was_published_and_reads_it_once(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        before = server()
        await before.service.add(named("a"), "x")
        await before.service.swap(named("a"), "y")
        await before.service.add(named("b"), "z")
        await before.service.remove(named("b"))
        after = server()
        assert [r.name for r in after.service] == ["a@2"]
        assert after.engine.sent == []
        await asyncio.gather(*(enter(after, "a") for _ in range(5)))
        assert after.reading.read == ["y"]
        assert after.engine.sent == [("+", key("y"))]
        await refused(ErrorCode.MODEL_NOT_FOUND, after, "b")

    run(tmp_path, test)


def test_a_superseded_revision_is_read_again_where_it_was_never_read_and_leaves_with_its_requests(
    tmp_path: Path,
) -> None:
    async def test(server: Callable[[], Server]) -> None:
        before = server()
        await before.service.add(named("a"), "x")
        await before.service.swap(named("a"), "y")
        after = server()
        async with AsyncExitStack() as held_together:
            serving = (after.service.serving(name) for name in ("a@1", "a@1", "a", "a@1"))
            served = await asyncio.gather(*map(held_together.enter_async_context, serving))
            assert [revision.name for revision, _ in served] == ["a@1", "a@1", "a@2", "a@1"]
            assert sorted(after.reading.read) == ["x", "y"]
        await after.service.settled()
        assert sorted(after.engine.sent) == sorted([("+", key("x")), ("-", key("x")), ("+", key("y"))])
        async with after.service.serving("a@1") as (held, _):
            await after.service.swap(named("a"), "z")  # the name moves on; what the request is bound to stays
            assert held.key == key("x")
            assert ("-", key("x")) not in after.engine.sent[3:]
        await after.service.settled()
        assert after.engine.sent[-1] == ("-", key("x"))
        other = server()
        await other.service.swap(named("a"), "x")  # and by the name again: it is current, and stays
        await refused(ErrorCode.MODEL_NOT_FOUND, after, "a@5")
        assert await enter(after, "a@1") == "a@1"
        await after.service.settled()
        assert after.engine.sent[-1] != ("-", key("x"))
        await other.service.revoke(named("a"))
        await refused(
            ErrorCode.MODEL_NOT_FOUND, after, "a@2"
        )  # the revocation took the name, and its history with it

    run(tmp_path, test)


async def enter(server: Server, name: str) -> str:
    async with server.service.serving(name) as (revision, _):
        return revision.name


def test_the_background_reads_everything_and_what_cannot_be_read_is_refused_alone(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        before = server()
        for alias, source in (("a", "x"), ("b", "y"), ("c", "z")):
            await before.service.add(named(alias), source)
        after = server()
        after.reading.holds["y"] = "something else"
        after.service.begin()
        await after.service.settled()
        assert {k for _, k in after.engine.sent} == {key("x"), key("z")}
        await refused(ErrorCode.ADAPTER_SOURCE_CHANGED, after, "b")
        assert await enter(after, "c") == "c@1"
        after.reading.holds.clear()  # the source is what it was again
        assert await enter(after, "b") == "b@1"

    run(tmp_path, test)


def test_another_base_or_a_source_that_is_gone_is_refused(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        await server().service.add(named("a"), "x")
        other = server()
        other.reading.base = "b" * 64
        await refused(ErrorCode.ADAPTER_BASE_MISMATCH, other, "a")
        other.reading.missing = True
        await refused(ErrorCode.ADAPTER_SOURCE_MISSING, other, "a")
        assert other.engine.sent == []

    run(tmp_path, test)


def test_servers_see_publications_swaps_and_removals_of_each_other(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        await here.service.add(named("a"), "x")
        assert await enter(there, "a") == "a@1"  # a name that is not known is looked up before it is refused
        await there.service.swap(named("a"), "y", expected=1)
        with pytest.raises(CallerError) as caught:
            await here.service.swap(named("a"), "z", expected=1)
        assert caught.value.code is ErrorCode.ADAPTER_REVISION_CONFLICT
        await here.service.settled()
        assert here.engine.sent[-1] == ("-", key("z"))  # the loser's artifact leaves the engine again
        await here.service.refresh()
        await here.service.settled()
        assert {("-", key("x")), ("+", key("y"))} <= set(here.engine.sent)
        assert await enter(here, "a") == "a@2"
        await there.service.remove(named("a"))
        following = asyncio.create_task(here.service.follow(every_s=0))
        await here.engine.until(len(here.engine.sent) + 1)
        following.cancel()
        assert here.engine.sent[-1] == ("-", key("y"))
        await refused(ErrorCode.MODEL_NOT_FOUND, here, "a")

    run(tmp_path, test)


def test_a_tenants_revocation_reaches_other_servers_and_leaves_others_their_own(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        for name in ("a", "b"):
            await here.service.add(named(name, "acme"), name)
        await there.service.refresh()
        await there.service.settled()
        await here.service.revoke(named("a", "acme"), "acme admin", "acme")
        await here.service.revoke(named("b", "acme"), "acme admin", "acme")
        await here.service.add(
            named("c", "globex"), "b"
        )  # the same bytes, by somebody else, before the other server looks
        await there.service.refresh()
        for each, ended in ((here, ["a", "b"]), (there, ["a"])):
            assert [m.key for m in each.engine.asked if isinstance(m, RevokeAdapter)] == list(map(key, ended))
            async with each.service.serving("c", "globex") as (revision, _):
                assert revision.key == key("b")
            with pytest.raises(CallerError) as caught:
                await each.service.add(named("d", "acme"), "b")
            assert caught.value.code is ErrorCode.ADAPTER_REVOKED
        await there.service.add(named("d", "globex"), "a")

    run(tmp_path, test)


def test_a_revocation_reaches_servers_whose_engine_lacks_the_adapter(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        for alias in ("a", "b", "c", "d"):
            await here.service.add(named(alias), alias)
        await there.service.refresh()
        await there.service.settled()
        there.service.catalog.store.revoke(key("a"))
        late = server()  # knows b to d, and has none of them with its engine
        await there.service.revoke(named("b"))
        await late.service.refresh()
        assert not any(isinstance(m, RevokeAdapter) for m in late.engine.asked)
        here.engine.refuse[key("a")] = CallerError(ErrorCode.ADAPTER_NOT_FOUND, "it was removed")
        here.engine.refuse[key("b")] = CapacityError(ErrorCode.ENGINE_DIED, "gone")
        here.engine.refuse[key("c")] = InternalFault(ErrorCode.INTERNAL, "it would not")
        with pytest.raises(InternalFault):
            await here.service.revoke(named("c"))
        assert set(here.service.retire_failures) == {key("c")}
        await there.service.revoke(named("d"))
        await here.service.refresh()
        revoked = [m.key for m in here.engine.asked if isinstance(m, RevokeAdapter)]
        assert sorted(revoked) == sorted(key(name) for name in "abcd")
        assert list(here.service) == []
        for name in "abcd":
            with pytest.raises(CallerError) as caught:
                await here.service.add(named(name), name)
            assert caught.value.code is ErrorCode.ADAPTER_REVOKED

    run(tmp_path, test)


def pins(server: Server) -> Counter[str]:
    """Pins that the engine holds, by key."""
    held: Counter[str] = Counter()
    for message in server.engine.asked:
        if isinstance(message, PinAdapter):
            held[message.key] += 1 if message.pinned else -1
    return +held


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("seen_first", [False, True])
def test_a_servers_own_swap_keeps_its_pin(tmp_path: Path, drain: bool, seen_first: bool) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        await here.service.add(named("a"), "x")
        await here.service.add(named("same"), "x")
        await here.service.pin(named("a"))
        await here.service.pin(named("same"))
        if seen_first:  # whoever follows the catalog sees the publication before the swap itself does
            off_loop = here.service.off_loop

            async def slow(work: Callable[[], Any]) -> Any:
                result = await off_loop(work)
                if isinstance(result, tuple):
                    here.service.off_loop = off_loop  # type: ignore[method-assign]
                    await here.service.look()
                return result

            here.service.off_loop = slow  # type: ignore[method-assign,assignment]
        else:
            await there.service.add(named("b"), "z")
        await here.service.swap(named("a"), "y", drain=drain)
        await here.service.settled()
        assert pins(here) == {key("y"): 1, key("x"): 1}
        await there.service.refresh()
        await there.service.swap(named("a"), "w")
        await here.service.refresh()
        await here.service.settled()
        assert pins(here) == {key("w"): 1, key("x"): 1}

    run(tmp_path, test)


@pytest.mark.parametrize("known", [True, False])
def test_a_pin_follows_to_a_revision_that_another_name_has_too(tmp_path: Path, known: bool) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        await here.service.add(named("a"), "x")
        await here.service.pin(named("a"))
        await (here if known else there).service.add(named("b"), "y")
        await there.service.refresh()
        await there.service.swap(named("a"), "y")
        await here.service.refresh()
        await here.service.settled()
        assert pins(here) == {key("y"): 1}
        await there.service.swap(
            named("a"), "x"
        )  # back to what it was, which is read once more or still here
        await here.service.refresh()
        await here.service.settled()
        assert pins(here) == {key("x"): 1}

    run(tmp_path, test)


@pytest.mark.parametrize("end", ["unpin", "remove"])
def test_a_pin_that_was_given_up_does_not_come_back(tmp_path: Path, end: str) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        await here.service.add(named("a"), "x")
        await here.service.pin(named("a"))
        await there.service.refresh()
        await there.service.swap(named("a"), "y")
        here.reading.missing = True  # the new revision cannot take the pin yet
        await here.service.refresh()
        await here.service.settled()
        await (here.service.unpin(named("a")) if end == "unpin" else here.service.remove(named("a")))
        here.reading.missing = False
        await there.service.refresh()
        await there.service.put(named("a"), "v")
        await here.service.refresh()
        await here.service.settled()
        assert await enter(here, "a") == "a@3"
        assert pins(here) == {}

    run(tmp_path, test)


def test_a_revision_superseded_elsewhere_lives_as_long_as_it_is_bound(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        await here.service.add(named("a"), "x")
        await there.service.refresh()
        async with here.service.serving("a") as (bound, _):
            await there.service.swap(named("a"), "y")
            await here.service.refresh()
            assert bound.name == "a@1"
            assert ("-", key("x")) not in here.engine.sent
        await here.service.settled()
        assert ("-", key("x")) in here.engine.sent

    run(tmp_path, test)


def test_a_revision_superseded_while_it_is_read_is_served_to_its_request_and_leaves(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        await here.service.add(named("a"), "x")
        await there.service.refresh()
        there.reading.gate.clear()
        reading = asyncio.create_task(enter(there, "a"))
        await there.reading.began.wait()
        await here.service.swap(named("a"), "y")
        refresh = asyncio.create_task(there.service.refresh())
        await refresh
        there.reading.gate.set()
        assert await reading == "a@1"
        await there.service.settled()
        assert [e for e in there.engine.sent if e[1] == key("x")] == [("+", key("x")), ("-", key("x"))]

    run(tmp_path, test)


def test_a_restarted_engine_gets_back_what_this_server_knows(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        first = server()
        await first.service.add(named("a"), "x")
        await first.service.add(named("b"), "y")
        after = server()
        await enter(after, "a")
        after.engine.sent.clear()
        after.engine.refuse[key("x")] = CapacityError(ErrorCode.ENGINE_DIED, "again")
        assert set(await after.service.restore()) == {"a"}
        after.engine.refuse.clear()
        after.engine.sent.clear()
        assert await after.service.restore() == {}
        assert after.engine.sent == [("+", key("x"))]
        assert after.reading.read == ["x"]
        assert await enter(after, "b") == "b@1"

    run(tmp_path, test)


def test_the_command_line_is_applied_once(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        from loraplex.server.administration.register import COMMAND_LINE

        service = server().service
        mine = await service.add(named("a"), "x", actor=COMMAND_LINE)
        assert await service.put_unless(named("a"), "x", mine, actor=COMMAND_LINE) == mine
        swapped = await service.swap(named("a"), "y")
        assert await service.put_unless(named("a"), "x", mine, actor=COMMAND_LINE) == swapped
        await service.remove(named("a"))
        assert await service.put_unless(named("a"), "x", mine, actor=COMMAND_LINE) is None
        new = await service.put_unless(named("a"), "z", mine, actor=COMMAND_LINE)
        assert new is not None
        assert (new.name, new.key, new.actor) == ("a@3", key("z"), COMMAND_LINE)

    run(tmp_path, test)


def test_a_catalog_that_is_silent_is_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Callable[[], Server]) -> None:
        here, there = server(), server()
        asked = asyncio.Event()
        store = here.service.catalog.store
        real = store.changes

        def silent(after: int) -> None:
            loop.call_soon_threadsafe(asked.set)
            raise CapacityError(ErrorCode.CATALOG_UNAVAILABLE, "gone")

        loop = asyncio.get_running_loop()
        store.changes = silent  # type: ignore[method-assign,assignment]
        following = asyncio.create_task(here.service.follow(every_s=0))
        await asked.wait()
        store.changes = real  # type: ignore[method-assign]
        await there.service.add(named("a"), "x")
        await here.engine.until(1)
        following.cancel()
        assert [r.name for r in here.service] == ["a@1"]
        assert caplog.text.count("the catalog is not followed") == 1

    run(tmp_path, test)


def test_an_in_memory_catalog_is_nobody_elses(tmp_path: Path) -> None:
    assert not AdapterCatalog().shared
    assert not AdapterCatalog(store=CatalogStore(Database("sqlite:///:memory:"))).shared
    assert AdapterCatalog(store=CatalogStore.open(f"sqlite:///{tmp_path / 'x'}")).shared
