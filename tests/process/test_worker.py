"""Real worker processes: equal to a backend in the engine's process, replayable, mortal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engine.rig import Rig
from tests.process import backends
from tests.waiting import until, until_gone

from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.ports import Backend
from loraplex.engine.step import Engine
from loraplex.process.worker import PlanLog, ProcessBackend, read_log, replay

ROOT = Path(__file__).resolve().parents[2]
MEBIBYTE = 1 << 20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ProcessBackend]]:
    """Starts a worker and ends it after the test."""
    started: list[ProcessBackend] = []

    def make(builder: str, depth: int = 1) -> ProcessBackend:
        config = EngineConfig(model=str(tmp_path / "hanging"), images_dir=str(tmp_path), pipeline_depth=depth)
        started.append(ProcessBackend(config, builder))
        return started[-1]

    yield make
    for backend in started:
        backend.close()


class Recorder:
    """Notes what a backend is told and what it answers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.plans: list[bytes] = []
        self.results: list[bytes] = []

    def launch(self, plan: bytes) -> None:
        self.plans.append(plan)
        self._backend.launch(plan)

    def collect(self) -> bytes:
        self.results.append(self._backend.collect())
        return self.results[-1]


def serve(depth: int, backend: Backend | None) -> Recorder:
    """A session of the real control plane: adapters, a pool that is too small for all, answers checked."""
    rig = Rig(depth=depth)
    recorder = Recorder(backend or rig.device)
    rig.engine = Engine(rig.limits, recorder, rig.mailbox, rig.clock, rig.log)
    rig.register("a")
    rig.register("b")
    names = [f"r{k}" for k in range(12)]
    for k, name in enumerate(names):
        rig.submit(name, list(range(k, k + 5 + k)), adapter=(None, "a", "b")[k % 3], max_tokens=6 + k)
    rig.run()
    rig.assert_answered(*names)
    return recorder


@pytest.mark.parametrize("depth", [0, 1])
def test_a_worker_answers_as_a_backend_in_the_process_does_and_so_does_a_replay(
    start: Callable[..., ProcessBackend], depth: int, tmp_path: Path
) -> None:
    inline = serve(depth, None)
    log = PlanLog(tmp_path / "plans", start(backends.VIRTUAL, depth))
    worker = serve(depth, log)
    log.close()
    assert len(inline.plans) > 20
    assert worker.plans == inline.plans
    assert worker.results == inline.results
    assert list(read_log(tmp_path / "plans")) == inline.plans
    assert list(replay(tmp_path / "plans", Rig(depth=depth).device)) == inline.results
    assert list(replay(tmp_path / "plans", start(backends.VIRTUAL, depth))) == inline.results


def test_big_plans_and_big_results_do_not_wait_for_each_other(start: Callable[..., ProcessBackend]) -> None:
    backend = start(backends.OBEDIENT)
    for byte in b"abcd":  # nothing is collected meanwhile, and no pipe holds as much
        backend.launch(bytes([byte]) * MEBIBYTE)
    assert [backend.collect()[:2] for _ in range(4)] == [b"aa", b"bb", b"cc", b"dd"]


@pytest.mark.parametrize(
    ("builder", "code", "param", "text"),
    [
        (backends.REFUSING, ErrorCode.MODEL_UNSUPPORTED, "model", "the model is refused"),
        (backends.BREAKING, ErrorCode.INTERNAL, None, "KeyError: 'lost'"),
        (backends.DYING, ErrorCode.BACKEND_FAILED, None, "exit status 7"),
        ("tests.process.backends:none_such", ErrorCode.INTERNAL, None, "none_such"),
    ],
)
def test_a_worker_that_cannot_be_built_says_why_and_leaves_nothing(
    start: Callable[..., ProcessBackend], builder: str, code: ErrorCode, param: str | None, text: str
) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(LoraplexError) as failed:
        start(builder)
    assert (failed.value.code, failed.value.param) == (code, param)
    assert text in failed.value.message
    assert set(psutil.Process().children()) <= before


def _kill(backend: ProcessBackend) -> None:
    os.kill(backend.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (_kill, "SIGKILL"),
        (lambda backend: backend.launch(backends.DIE), "exit status 9"),
        (lambda backend: backend.launch(backends.RAISE), "exit status 1"),
    ],
)
def test_a_worker_that_died_is_a_typed_failure_of_every_later_call(
    start: Callable[..., ProcessBackend], end: Callable[[ProcessBackend], Any], how: str
) -> None:
    backend = start(backends.OBEDIENT)
    process = psutil.Process(backend.pid)
    backend.launch(b"x")
    assert backend.collect()[:1] == b"x"
    end(backend)
    for call in (backend.collect, lambda: backend.launch(b"y"), backend.collect):
        with pytest.raises(InternalFault) as failed:
            call()
        assert failed.value.code is ErrorCode.BACKEND_FAILED
        assert how in failed.value.message
    assert not process.is_running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_are_not_for_the_worker(
    start: Callable[..., ProcessBackend], number: signal.Signals
) -> None:
    backend = start(backends.OBEDIENT)
    os.kill(backend.pid, number)
    backend.launch(b"x")
    assert backend.collect()[:1] == b"x"


def test_a_worker_outlives_the_thread_that_started_it(start: Callable[..., ProcessBackend]) -> None:
    made: list[ProcessBackend] = []
    starter = threading.Thread(target=lambda: made.append(start(backends.OBEDIENT)))
    starter.start()
    starter.join()
    made[0].launch(b"x")
    assert made[0].collect()[:1] == b"x"


def test_closing_ends_a_worker_in_the_middle_of_a_step(
    start: Callable[..., ProcessBackend], tmp_path: Path
) -> None:
    backend = start(backends.OBEDIENT)
    process = psutil.Process(backend.pid)
    backend.launch(backends.HANG)
    until((tmp_path / "hanging").exists)
    backend.close()
    assert not process.is_running()
    backend.close()


PARENT = """
import sys, threading
sys.path[:0] = sys.argv[2:]
from loraplex.config import EngineConfig
from loraplex.process.worker import ProcessBackend
config = EngineConfig(model=sys.argv[1], images_dir="i")
backend = ProcessBackend(config, "tests.process.backends:build_obedient")
backend.launch(b"hang")
print(backend.pid, flush=True)
threading.Event().wait()
"""


def test_a_worker_dies_with_its_parent_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """The parent is a script without a main guard: the worker must not run it again."""
    script = tmp_path / "script.py"
    script.write_text(PARENT, encoding="utf-8")
    command = [sys.executable, str(script), str(tmp_path / "hanging"), str(ROOT / "src"), str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        until((tmp_path / "hanging").exists)
        parent.kill()
    until_gone(worker)


def test_a_log_that_is_cut_short_is_refused_where_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "plans"
    log = PlanLog(path, Rig().device)
    recorder = serve(1, None)
    log.launch(recorder.plans[0])
    first = path.stat().st_size  # on disk before the backend ran it
    log.launch(recorder.plans[1])
    log.close()
    whole = path.read_bytes()
    for size in (first, first + 2, first + 4, len(whole) - 1):
        path.write_bytes(whole[:size])
        plans = read_log(path)
        assert next(plans) == recorder.plans[0]
        if size == first:
            assert next(plans, None) is None
            continue
        with pytest.raises(InternalFault) as refused:
            next(plans)
        assert refused.value.code is ErrorCode.PLAN_MALFORMED
