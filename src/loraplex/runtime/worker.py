"""A backend in a process of its own that gets nothing but packed plans; and the log of plans, with its replay.

Plans cross as their packed bytes, results come back as theirs. Adapter images are found by the digest that the plan
names, in the image store; nothing else is shared. So a log of plans is all that it takes to run a session again.

Specification: DESIGN 3 (what crosses between the towers), DESIGN 8 ("No decorative plan").
"""

from __future__ import annotations

import multiprocessing
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError, error_for
from loraplex.core.ports import Backend

_LENGTH: Final = struct.Struct("<I")
_READY: Final = b"ready"
_CLOSE: Final = b""


class ProcessBackend:
    """`core.ports.Backend` over a spawned process that owns weights, pool and runner."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the worker and waits until its model is loaded; raises the typed error that it ended with."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(config, child), daemon=True, name="loraplex-worker"
        )
        self._process.start()
        child.close()
        answer = self._receive()
        if answer != _READY:
            code, _, message = answer.decode("utf-8").partition(": ")
            raise error_for(ErrorCode(code), message)

    def launch(self, plan: bytes) -> None:
        """Send a packed plan."""
        try:
            self._pipe.send_bytes(plan)
        except OSError as error:
            raise InternalFault(ErrorCode.BACKEND_FAILED, f"the worker process is gone: {error}") from error

    def collect(self) -> bytes:
        """The oldest outstanding result; blocks for it."""
        return self._receive()

    def close(self) -> None:
        """End the worker."""
        if self._process.is_alive():
            try:
                self._pipe.send_bytes(_CLOSE)
            except OSError:
                self._process.terminate()
        self._process.join()
        self._pipe.close()

    def _receive(self) -> bytes:
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise InternalFault(ErrorCode.BACKEND_FAILED, "the worker process died") from error


def _serve(config: EngineConfig, pipe: Connection) -> None:
    from loraplex.runtime.build import describe_model, engine_limits, make_runner

    try:
        base = describe_model(config)
        runner = make_runner(config, base, engine_limits(config, base))
    except LoraplexError as error:
        pipe.send_bytes(f"{error.code.value}: {error.message}".encode())
        return
    pipe.send_bytes(_READY)
    while plan := pipe.recv_bytes():
        runner.launch(plan)
        pipe.send_bytes(runner.collect())


class PlanLog:
    """A backend that writes every plan to a file before it passes it on."""

    def __init__(self, path: Path, backend: Backend) -> None:
        self._file = path.open("wb")
        self._backend = backend

    def launch(self, plan: bytes) -> None:
        """Log, then launch."""
        self._file.write(_LENGTH.pack(len(plan)))
        self._file.write(plan)
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
