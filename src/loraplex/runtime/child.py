"""A child process of ours: started, spoken to over its pipes, watched, ended. Both sides are here.

A child is `python -m MODULE` with the parent's import path. Messages are length-prefixed msgpack frames on its standard
input and output; what libraries print goes to standard error. It ignores the terminal's interrupt, leaves the signal to
end to its module, and dies with its parent.

Never restarts anything and knows nothing of engines. Specification: DESIGN 4 "Processes".
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import struct
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_PR_SET_PDEATHSIG: Final = 1
_PARENT: Final = "LORAPLEX_PARENT_PID"
MAX_FRAME_BYTES: Final = 64 << 20


class ChildGone(Exception):
    """The child's end of its pipes is closed: it exits or has exited."""


class Child:
    """The parent's side of one child process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @staticmethod
    async def start(module: str, *, environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module`. environment: variables beside the parent's own."""
        paths = [path for path in sys.path if path]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            **(environment or {}),
            _PARENT: str(os.getpid()),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, stdin=PIPE, stdout=PIPE, env=env
        )
        return Child(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self._process.returncode

    async def send(self, message: Any) -> None:
        """Send one message; raises `ChildGone`."""
        stdin = self._process.stdin
        if stdin is None:
            raise ChildGone
        payload = msgspec.msgpack.encode(message)
        stdin.write(_LENGTH.pack(len(payload)) + payload)
        try:
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChildGone from error

    async def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The child's next message; raises `ChildGone` when there will be none."""
        stdout = self._process.stdout
        if stdout is None:
            raise ChildGone
        try:
            (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
            payload = await stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise ChildGone from error
        return decoder.decode(payload)

    async def wait(self) -> int:
        """Exit status, once it has exited."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, wait, then end it; its exit status."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            return await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            return await self._process.wait()


def describe_exit(code: int) -> str:
    """An exit status for people."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Parent:
    """The child's side: its pipes to the parent. Make it first thing in the child."""

    def __init__(self) -> None:
        """Takes the pipes over, sends stray prints to standard error, and ties this process's life to the parent's."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._input: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        _die_with_parent()

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The parent's next message; raises `ChildGone`, from here the parent, when there will be none."""
        header = self._input.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            raise ChildGone
        (length,) = _LENGTH.unpack(header)
        payload = self._input.read(length)
        if len(payload) < length:
            raise ChildGone
        return decoder.decode(payload)

    def send(self, message: Any) -> None:
        """Send one message."""
        payload = msgspec.msgpack.encode(message)
        self._output.write(_LENGTH.pack(len(payload)) + payload)
        self._output.flush()


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends; where no kernel does, watch for it."""
    parent = int(os.environ.pop(_PARENT, "0"))
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it ended before the kernel knew
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    stop = threading.Event()
    while os.getppid() == parent:
        stop.wait(0.5)
    os._exit(1)
