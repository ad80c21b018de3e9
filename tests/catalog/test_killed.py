"""kill -9 at every point of every operation: the catalog is as before it or as after it, and works on."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.catalog import killed, postgres
from tests.catalog.conftest import Opener
from tests.catalog.make import draft
from tests.catalog.names import named
from tests.waiting import until

from loraplex.catalog.audit import audit
from loraplex.catalog.changes import Mode
from loraplex.catalog.records import Grant, Right
from loraplex.catalog.store import CatalogStore

CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    CONTEXT.set_forkserver_preload(["tests.catalog.killed"])


def killed_at(url: str, operation: str, at: int) -> bool:
    """Whether the process was killed; otherwise it finished before that point."""
    process = CONTEXT.Process(target=killed.run, args=(url, operation, at))
    process.start()
    process.join()
    code = process.exitcode
    process.close()
    assert code in (0, -signal.SIGKILL)
    return code != 0


def state(store: CatalogStore) -> Any:
    found = store.changes()
    return (
        found.generation,
        sorted(found.aliases, key=lambda s: s.alias_key),
        found.grants,
        store.publications(),
    )


def without_times(value: Any) -> Any:
    generation, names, grants, log = value
    return (
        generation,
        [
            (n.alias_key.alias, n.last, None if n.current is None else (n.current.name, n.current.key))
            for n in names
        ],
        sorted((g.tenant, g.rights) for g in grants),
        [(p.generation, p.kind, p.alias, p.revision) for p in log],
    )


def filled(store: CatalogStore) -> None:
    store.publish(draft("a", 1), Mode.ADD)
    store.publish(draft("b", 2), Mode.ADD)
    store.grant(Grant("default", "a", "globex", (Right.USE,)))


def every_point(tmp_path: Path, operation: str, opened: Any) -> tuple[int, int]:
    """Kill at each point in turn, each on a fresh catalog; (points, of which the change had happened)."""
    done = CatalogStore.open()
    filled(done)
    before = without_times(state(done))
    killed.OPERATIONS[operation](done)
    after = without_times(state(done))
    at, happened = 0, 0
    while True:
        at += 1
        url, store = opened(at)
        filled(store)
        was_killed = killed_at(url, operation, at)
        now = without_times(state(store))
        assert now in (before, after), f"{operation} killed at {at}"
        assert audit(store).problems == ()
        happened += now == after
        store.publish(draft("a", 9), Mode.PUT)
        store.close()
        if not was_killed:
            return at - 1, happened - 1


@pytest.mark.parametrize("operation", killed.OPERATIONS)
def test_sqlite_is_before_or_after(tmp_path: Path, operation: str) -> None:
    def opened(number: int) -> tuple[str, CatalogStore]:
        url = f"sqlite:///{tmp_path / f'{number}.db'}"
        return url, CatalogStore.open(url)

    points, happened = every_point(tmp_path, operation, opened)
    print(f"{operation}: killed at {points} points, {happened} after the commit")
    assert points >= 8
    assert happened >= 1


@pytest.mark.long
@pytest.mark.parametrize("operation", ["swap", "remove", "grant"])
def test_postgresql_is_before_or_after(tmp_path: Path, postgres_server: str, operation: str) -> None:
    databases = []

    def opened(number: int) -> tuple[str, CatalogStore]:
        context = postgres.database(postgres_server, f"killed_{operation}_{number}")
        databases.append(context)
        url = context.__enter__()
        return url, CatalogStore.open(url)

    points, happened = every_point(tmp_path, operation, opened)
    for context in databases:
        context.__exit__(None, None, None)
    assert points >= 8
    assert happened >= 1


def _busy(url: str, seed: int) -> None:
    """Changes a catalog until it is killed."""
    store = CatalogStore.open(url)
    rng = random.Random(seed)
    while True:
        alias = rng.choice("abc")
        if rng.random() < 0.2 and any(
            s.alias_key.alias == alias and s.current is not None for s in store.changes().aliases
        ):
            store.remove(named(alias))
        else:
            store.publish(draft(alias, rng.randrange(9)), Mode.PUT)


@pytest.mark.long
def test_killed_in_full_flight(opened: Opener, catalog_url: str) -> None:
    """Two busy processes, one of them killed whenever the log has grown a little: the log never has a gap."""
    watcher = opened()
    seen = 0
    for seed in range(30):
        process = CONTEXT.Process(target=_busy, args=(catalog_url, seed))
        process.start()
        goal = seen + 1 + seed % 7
        until(lambda goal=goal: watcher.generation() >= goal)
        generation = watcher.generation()
        process.kill()
        process.join()
        seen = watcher.generation()
        assert seen >= generation
        assert audit(watcher).problems == ()
    assert [p.generation for p in watcher.publications()] == list(range(1, min(seen, 1000) + 1))
