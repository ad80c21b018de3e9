"""Locks by name: they exclude across processes, and their files are gone when nobody uses them."""

from __future__ import annotations

import fcntl
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.waiting import until

from loraplex.catalog.locks import FileLocks

CONTEXT = multiprocessing.get_context("forkserver")
NAMES = ("a", "b")
TURNS = 300
PROCESSES = 4


def take_turns(folder: str, books: str, seed: int) -> None:
    """Count in a file under a lock, in two writes that nobody may come between; read it under a
    shared one.
    """
    locks = FileLocks(Path(folder))
    for turn in range(TURNS):
        name = NAMES[(turn + seed) % len(NAMES)]
        book = Path(books) / name
        with locks.held(name):
            count = int(book.read_text())
            book.write_text("")
            book.write_text(str(count + 1))
        with locks.held(name, shared=True):
            assert int(book.read_text()) > 0
        with locks.attempt(name) as alone:
            if alone:
                book.write_text(str(int(book.read_text())))


def hold_for_ever(folder: str, locked: str) -> None:
    with FileLocks(Path(folder)).held("a"):
        Path(locked).touch()
        signal.pause()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path / "locks"


def test_processes_take_turns_and_leave_nothing(tmp_path: Path, folder: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("0")
    processes = [
        CONTEXT.Process(target=take_turns, args=(str(folder), str(tmp_path), seed))
        for seed in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert sum(int((tmp_path / name).read_text()) for name in NAMES) == PROCESSES * TURNS
    assert not list(folder.iterdir())


def test_what_a_killed_process_leaves_is_removed_and_what_is_held_stays(tmp_path: Path, folder: Path) -> None:
    process = CONTEXT.Process(target=hold_for_ever, args=(str(folder), str(tmp_path / "locked")))
    process.start()
    until(lambda: (tmp_path / "locked").exists() or not process.is_alive())
    assert process.is_alive()
    locks = FileLocks(folder)
    locks.sweep()
    with locks.attempt("a") as alone:
        assert not alone
    assert [path.name for path in folder.iterdir()] == ["a"]
    process.kill()
    process.join()
    assert [path.name for path in folder.iterdir()] == ["a"]
    locks.sweep()
    assert not list(folder.iterdir())


def test_the_last_of_those_who_share_removes_the_file(folder: Path) -> None:
    locks = FileLocks(folder)
    with ExitStack() as first:
        first.enter_context(locks.held("a", shared=True))
        with locks.held("a", shared=True), locks.attempt("a") as alone:
            assert not alone
        assert [path.name for path in folder.iterdir()] == ["a"]
        with locks.attempt("a") as alone:
            assert not alone
    assert not list(folder.iterdir())


def interposed(monkeypatch: pytest.MonkeyPatch, how: int, act: Callable[[int], None]) -> None:
    """Have `act` happen before the first lock of the kind `how`, once."""
    real, acted = fcntl.flock, list[int]()

    def flock(fd: int, kind: int) -> None:
        if kind == how and not acted:
            acted.append(kind)
            act(fd)
        real(fd, kind)

    monkeypatch.setattr("loraplex.catalog.locks.fcntl.flock", flock)


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_went_between_opening_and_locking_is_not_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    locks = FileLocks(folder)

    def others(_: int) -> None:
        with locks.held("a"):
            pass
        assert not list(folder.iterdir())

    interposed(monkeypatch, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, others)
    with locks.held("a", shared=shared), locks.attempt("a") as alone:
        assert not alone


def test_a_shared_lock_that_was_lost_at_its_end_takes_nobody_elses_file_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = FileLocks(folder)
    with ExitStack() as other, ExitStack() as own:
        own.enter_context(locks.held("a", shared=True))

        def others(fd: int) -> None:
            fcntl.flock(fd, fcntl.LOCK_UN)  # what a conversion may come to between its two halves
            with locks.held("a"):
                pass
            other.enter_context(locks.held("a"))

        interposed(monkeypatch, fcntl.LOCK_EX | fcntl.LOCK_NB, others)
        own.close()
        with locks.attempt("a") as alone:
            assert not alone
    assert not list(folder.iterdir())


def test_an_error_inside_lets_go(folder: Path) -> None:
    locks = FileLocks(folder)
    for context in (locks.held("a"), locks.held("a", shared=True), locks.attempt("a")):
        with pytest.raises(RuntimeError), context:
            raise RuntimeError
        assert not list(folder.iterdir())
