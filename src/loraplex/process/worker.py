"""A backend in a process of its own that gets nothing but packed plans; and the log of plans, with its replay.

Plans cross as their packed bytes, results come back as theirs. Adapter images are found by the digest that the plan
names, in the image store; nothing else is shared. So a log of plans is all that it takes to run a session again.

Specification: architecture "The plan", rulings "Tests" (no decorative plan).
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.ports import Backend
from loraplex.process.building import Failed
from loraplex.process.child import (
    ChildGone,
    child_command,
    child_environment,
    describe_exit,
    frame,
    read_frame,
)
from loraplex.process.worker_process import REPORT_DECODER, RUNNER, WorkerStart

_LENGTH: Final = struct.Struct("<I")
MODULE: Final = "loraplex.process.worker_process"
STOP_GRACE_S: Final = 3.0
"""How long a worker may take to end when its pipe is closed: shorter than its engine is given."""


class ProcessBackend:
    """`core.ports.Backend` over a child process that owns weights, pool and runner.

    Once the child has died, every call raises `backend_failed` with its exit status.
    """

    def __init__(self, config: EngineConfig, builder: str = RUNNER, base_abi: str | None = None) -> None:
        """Starts the child and waits until its backend is built; raises the typed error that this ended with.

        builder: `module:function` that makes the child's backend from `config`. base_abi: H_base, if it is known.
        """
        self._process = subprocess.Popen(
            child_command(MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        self._to = cast(BinaryIO, self._process.stdin)
        self._from = cast(BinaryIO, self._process.stdout)
        try:
            self._send(msgspec.msgpack.encode(WorkerStart(config, builder, base_abi)))
            report = REPORT_DECODER.decode(self._receive())
            if isinstance(report, Failed):
                raise report.error
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def launch(self, plan: bytes) -> None:
        """Send a packed plan."""
        self._send(plan)

    def collect(self) -> bytes:
        """The oldest outstanding result; blocks for it."""
        return self._receive()

    def close(self) -> None:
        """End the child, with the step that it may be in."""
        self._end()
        self._from.close()

    def _end(self) -> int:
        with suppress(BrokenPipeError):
            self._to.close()
        try:
            return self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _send(self, payload: bytes) -> None:
        try:
            self._to.write(frame(payload))
            self._to.flush()
        except (OSError, ValueError) as error:  # ValueError: its pipe is closed
            raise self._gone() from error

    def _receive(self) -> bytes:
        try:
            return read_frame(self._from)
        except (ChildGone, OSError, ValueError) as error:
            raise self._gone() from error

    def _gone(self) -> LoraplexError:
        how = describe_exit(self._end())  # if it lives, it is of no use: a plan or a result is lost
        return InternalFault(ErrorCode.BACKEND_FAILED, f"the worker process is gone: {how}")


class PlanLog:
    """A backend that writes every plan to a file before it passes it on: the plan that broke a backend is there."""

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
        while head := file.read(_LENGTH.size):
            size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
            plan = file.read(size) if size >= 0 else b""
            if len(plan) != size:
                raise InternalFault(ErrorCode.PLAN_MALFORMED, f"the plan log {path.name} is cut short")
            yield plan


def replay(path: Path, backend: Backend) -> Iterator[bytes]:
    """Run a log of plans again on a fresh backend; yields the packed result of each."""
    for plan in read_log(path):
        backend.launch(plan)
        yield backend.collect()
