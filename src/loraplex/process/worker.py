"""A backend in a process of its own that gets nothing but packed plans; and the log of plans, with its
replay.

Plans cross as their packed bytes, results come back as theirs. Adapter images are found by the digest that
the plan names, in the image store; nothing else is shared. So a log of plans is all that it takes to run a
session again.

Specification: architecture "The plan", rulings "Tests" (no decorative plan).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.ports import Backend
from loraplex.process.child import BlockingChild, describe_exit
from loraplex.process.pipe import PipeClosed, frame, read_frame
from loraplex.process.worker_process import REPORT_DECODER, RUNNER, WorkerStart

MODULE: Final = "loraplex.process.worker_process"
STOP_GRACE_S: Final = 3.0
"""How long a worker may take to end when its pipe is closed: shorter than its engine is given."""


class ProcessBackend:
    """`core.ports.Backend` over a child process that owns weights, pool and runner.

    Once the child has died, every call raises `backend_failed` with its exit status.
    """

    def __init__(self, config: EngineConfig, builder: str = RUNNER, base_abi: str | None = None) -> None:
        """Starts the child and waits until its backend is built; raises the typed error that this ended with.

        builder: `module:function` that makes the child's backend from `config`. base_abi: H_base, if it is
        known.
        """
        self._child = BlockingChild.start(MODULE, "the worker process")
        try:
            self._child.greet(WorkerStart(config, builder, base_abi), REPORT_DECODER)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def launch(self, plan: bytes) -> None:
        """Send a packed plan."""
        try:
            self._child.send_bytes(plan)
        except PipeClosed as error:
            raise self._gone() from error

    def collect(self) -> bytes:
        """The oldest outstanding result; blocks for it."""
        try:
            return self._child.receive_bytes()
        except PipeClosed as error:
            raise self._gone() from error

    def close(self) -> None:
        """End the child, with the step that it may be in."""
        self._child.stop(STOP_GRACE_S)

    def _gone(self) -> LoraplexError:
        # If it lives, it is of no use: a plan or a result is lost.
        how = describe_exit(self._child.ended(STOP_GRACE_S))
        return InternalFault(ErrorCode.BACKEND_FAILED, f"the worker process is gone: {how}")


class PlanLog:
    """A backend that writes every plan to a file before it passes it on: the plan that broke a backend is
    there.
    """

    def __init__(self, path: Path, backend: Backend) -> None:
        self._file = path.open("wb")
        self._backend = backend

    def launch(self, plan: bytes) -> None:
        """Log, then launch."""
        self._file.write(frame(plan))
        self._file.flush()
        self._backend.launch(plan)

    def collect(self) -> bytes:
        """Result of the oldest plan."""
        return self._backend.collect()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def read_log(path: Path) -> Iterator[bytes]:
    """Packed plans of a log, in order; `plan_malformed` where it is cut short."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            try:
                yield read_frame(file)
            except PipeClosed:
                raise InternalFault(
                    ErrorCode.PLAN_MALFORMED, f"the plan log {path.name} is cut short"
                ) from None


def replay(path: Path, backend: Backend) -> Iterator[bytes]:
    """Run a log of plans again on a fresh backend; yields the packed result of each."""
    for plan in read_log(path):
        backend.launch(plan)
        yield backend.collect()
