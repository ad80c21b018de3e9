"""Changes whose client goes away, and changes after whose commit something fails: made or not made, never
half.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.shared_catalog import Server, run
from tests.adapters.stand_ins import key, pins
from tests.catalog.names import named

from loraplex.adapters.unbroken import Unbroken
from loraplex.catalog.changes import Changes
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.messages import LoadAdapter, PinAdapter, RevokeAdapter

SILENT = CapacityError(ErrorCode.CATALOG_UNAVAILABLE, "the database does not answer")
DIED = CapacityError(ErrorCode.ENGINE_DIED, "the engine died")


class Held:
    """A store method that begins, is held in its thread, and does its work, or raises, when it is let go.

    after: raised once the work is done.
    """

    def __init__(self, patch: pytest.MonkeyPatch, name: str, *, hold: bool = True) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        real = getattr(CatalogStore, name)
        if not hold:
            self.go.set()

        def method(store: CatalogStore, *args: Any, **more: Any) -> Any:
            self.began.set()
            assert self.go.wait(60)
            return real(store, *args, **more)

        patch.setattr(CatalogStore, name, method)

    async def reached(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.began.wait, 60)


async def cancelled(task: asyncio.Task[Any]) -> bool:
    await asyncio.wait({task})
    return task.cancelled()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", ["add", "swap", "put"])
def test_a_client_that_goes_while_the_catalog_commits_leaves_a_whole_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, again: bool
) -> None:
    async def test(server: Callable[[], Server]) -> None:
        one = server()
        if mode != "add":
            await one.service.add(named("a"), "x")
            await one.service.pin(named("a"))
        store = Held(monkeypatch, "publish")
        task = asyncio.create_task(getattr(one.service, mode)(named("a"), "y"))
        await store.reached()
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
            if again:
                task.cancel()
        assert not task.done()  # the change lock stays with it
        store.go.set()
        assert await cancelled(task)
        revision = one.service.resolve("a")
        assert revision.key == key("y")
        assert one.service.catalog.store.revision(named("a"), revision.revision) == revision
        await one.service.settled()
        moved = [(key("x"), True), (key("y"), True), (key("x"), False)]
        assert pins(one.engine) == ([] if mode == "add" else moved)
        assert one.service.controls.pinned_key(named("a")) == (None if mode == "add" else key("y"))
        await one.service.swap(named("a"), "z")  # and the next change finds everything in order
        assert one.service.resolve("a").key == key("z")

    run(tmp_path, test)


@pytest.mark.parametrize("where", ["register", "load"])
def test_a_client_that_goes_before_the_commit_leaves_nothing(tmp_path: Path, where: str) -> None:
    async def test(server: Callable[[], Server]) -> None:
        one = server()
        await one.service.add(named("a"), "x")
        await one.service.pin(named("a"))
        call, reached = one.engine.call, asyncio.Event()
        forever = asyncio.Event()

        async def slow(message: Any) -> dict[str, Any]:
            answer = await call(message)
            if (
                isinstance(message, LoadAdapter) == (where == "load")
                and getattr(message, "pinned", None) is None
            ):
                reached.set()
                await forever.wait()
            return answer

        one.engine.call = slow  # type: ignore[method-assign]
        task = asyncio.create_task(one.service.swap(named("a"), "y"))
        await reached.wait()
        one.engine.call = call  # type: ignore[method-assign]
        task.cancel()
        assert await cancelled(task)
        assert one.service.resolve("a").key == key("x")
        assert one.service.catalog.store.history(named("a"))[0].revision == 1
        assert one.service.controls.pinned_key(named("a")) == key("x")
        if where == "load":
            assert one.engine.sent[-1] == ("-", key("y"))
            assert pins(one.engine)[1:] == [(key("y"), True), (key("y"), False)]
        assert (await one.service.swap(named("a"), "z")).revision == 2

    run(tmp_path, test)


def silence(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The catalog stops answering questions; returns what lets it speak again."""
    real = CatalogStore.changes

    def changes(store: CatalogStore, after: int = -1) -> Changes:
        raise SILENT

    monkeypatch.setattr(CatalogStore, "changes", changes)
    return lambda: monkeypatch.setattr(CatalogStore, "changes", real)


@pytest.mark.parametrize("what", ["remove", "revoke", "swap"])
def test_a_change_that_was_made_is_reported_made_where_the_catalog_falls_silent_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another server published in between, and what it published cannot be read: our own change is seen all
    the same.
    """

    async def test(server: Callable[[], Server]) -> None:
        one, other = server(), server()
        await one.service.add(named("a"), "x")
        await one.service.add(named("also"), "x")
        await other.service.add(named("b"), "y")
        speak = silence(monkeypatch)
        if what == "swap":
            assert (await one.service.swap(named("a"), "z")).revision == 2
            assert one.service.resolve("a").key == key("z")
        else:
            await getattr(one.service, what)(named("a"))
            with pytest.raises(LoraplexError) as caught:
                one.service.resolve("a")
            assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
        if what == "revoke":
            assert [m.key for m in one.engine.asked if isinstance(m, RevokeAdapter)] == [key("x")]
            with pytest.raises(LoraplexError):
                one.service.resolve("also")
        else:
            assert one.service.resolve("also").key == key("x")
        assert "not seen yet" in caplog.text
        speak()
        await one.service.refresh()
        await one.service.settled()
        assert one.service.resolve("b").key == key("y")
        assert one.service.generation == one.service.catalog.store.generation()
        assert {r.name for r in one.service} == {r.name for r in server().service}

    run(tmp_path, test)


@pytest.mark.parametrize("error", [DIED, InternalFault(ErrorCode.LEASE_UNDERFLOW, "it has none")])
def test_a_removal_stands_whatever_the_engine_says_of_the_pin(tmp_path: Path, error: LoraplexError) -> None:
    async def test(server: Callable[[], Server]) -> None:
        one = server()
        await one.service.add(named("a"), "x")
        await one.service.pin(named("a"))
        one.engine.refuse[key("x")] = error
        assert (await one.service.remove(named("a"))).revision == 1
        assert not one.service.controls.pinned(named("a"))
        with pytest.raises(LoraplexError):
            one.service.resolve("a")

    run(tmp_path, test)


def test_a_client_that_goes_while_its_removal_commits_leaves_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Callable[[], Server]) -> None:
        one = server()
        await one.service.add(named("a"), "x")
        await one.service.pin(named("a"))
        store = Held(monkeypatch, "remove")
        task = asyncio.create_task(one.service.remove(named("a")))
        await store.reached()
        task.cancel()
        store.go.set()
        assert await cancelled(task)
        assert pins(one.engine)[-1] == (key("x"), False)
        await one.service.settled()
        assert one.engine.sent[-1] == ("-", key("x"))

    run(tmp_path, test)


@pytest.mark.parametrize("dies_at", ["unpin", "pin"])
def test_a_draining_swap_keeps_its_pin_where_the_engine_dies_in_the_middle(
    tmp_path: Path, dies_at: str
) -> None:
    async def test(server: Callable[[], Server]) -> None:
        one = server()
        await one.service.add(named("a"), "x")
        await one.service.pin(named("a"))
        call, dead = one.engine.call, False

        async def dying(message: Any) -> dict[str, Any]:
            nonlocal dead
            answer = await call(message)
            dead |= isinstance(message, PinAdapter) and message.pinned == (dies_at == "pin")
            if dead:
                raise DIED
            return answer

        one.engine.call = dying  # type: ignore[method-assign]
        assert (await one.service.swap(named("a"), "y", drain=True)).revision == 2
        one.engine.call = call  # type: ignore[method-assign]
        one.engine.asked.clear()
        assert await one.service.restore() == {}
        assert pins(one.engine) == [(key("y"), True)]
        assert one.service.controls.pinned_key(named("a")) == key("y")

    run(tmp_path, test)


def test_pins_outlive_an_engine_that_dies_while_it_is_given_them_back(tmp_path: Path) -> None:
    async def test(server: Callable[[], Server]) -> None:
        one = server()
        for alias, source in (("a", "x"), ("b", "y")):
            await one.service.add(named(alias), source)
            await one.service.pin(named(alias))
        one.engine.refuse = {key("x"): DIED, key("y"): DIED}
        await one.service.restore()
        one.engine.refuse = {}
        one.engine.asked.clear()
        await one.service.restore()
        assert pins(one.engine) == [(key("x"), True), (key("y"), True)]

    run(tmp_path, test)


def test_work_is_undone_before_its_commit_and_finished_after_it() -> None:
    async def test() -> None:
        for commits in (False, True):
            change, begun, done = Unbroken(), asyncio.Event(), asyncio.Event()
            seen: list[str] = []

            async def work(
                change: Unbroken = change,
                begun: asyncio.Event = begun,
                done: asyncio.Event = done,
                seen: list[str] = seen,
                commits: bool = commits,
            ) -> int:
                if commits:
                    change.commit()
                begun.set()
                try:
                    await done.wait()
                except asyncio.CancelledError:
                    seen.append("undone")
                    raise
                seen.append("finished")
                return 3

            task = asyncio.create_task(change.run(work()))
            await begun.wait()
            task.cancel()
            await asyncio.sleep(0)
            done.set()
            assert await cancelled(task)
            assert seen == ["finished" if commits else "undone"]

    asyncio.run(test())
