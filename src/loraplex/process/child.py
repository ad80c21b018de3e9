"""A child process of ours: started, spoken to over its pipes, watched, ended. Both sides are here.

A child is `python -m MODULE` with the parent's import path. Messages are length-prefixed msgpack frames on its standard
input and output; what libraries print goes to standard error. Signals to a whole group (a terminal's interrupt, a
service manager's end) are the parent's to act on: the child ignores them, ends by `END_SIGNAL`, and does not outlive its
parent.

Never restarts anything and knows nothing of engines. Specification: rulings "Processes".
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
END_SIGNAL: Final = signal.SIGUSR1
"""Asks one child to end; a module that has something to finish handles it."""
_PARENT: Final = "LORAPLEX_PARENT_PID"


class ChildGone(Exception):
    """The child's end of its pipes is closed: it exits or has exited."""


def child_command(module: str) -> list[str]:
    """The command that runs `module` as a child."""
    return [sys.executable, "-m", module]


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A child's environment: this process's, its import path, `extra`, and who its parent is."""
    paths = [path for path in sys.path if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        **(extra or {}),
        _PARENT: str(os.getpid()),
    }


def frame(payload: bytes) -> bytes:
    """A payload as it travels over a pipe."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(pipe: BinaryIO) -> bytes:
    """The next payload of a pipe; raises `ChildGone` when the other side is gone."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise ChildGone
    (length,) = _LENGTH.unpack(header)
    payload = pipe.read(length)
    if len(payload) < length:
        raise ChildGone
    return payload


class Child:
    """The parent's side of one child process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @staticmethod
    async def start(module: str, *, environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m module`. environment: variables beside the parent's own."""
        process = await asyncio.create_subprocess_exec(
            *child_command(module), stdin=PIPE, stdout=PIPE, env=child_environment(environment)
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
        stdin.write(frame(msgspec.msgpack.encode(message)))
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
            self._process.send_signal(END_SIGNAL)
        try:
            async with asyncio.timeout(grace_s):
                return await self._process.wait()
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

    def __init__(self, *, tied: bool = True) -> None:
        """Takes the pipes over and sends stray prints to standard error.

        tied: the kernel ends this process when the thread that started it ends. A child that may be started by a
        thread which does not last is not tied: it reads all the time, and ends when there is no parent to read from.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._input: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        parent = int(os.environ.pop(_PARENT, "0"))
        if tied:
            _die_with(parent)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The parent's next message; raises `ChildGone`, from here the parent, when there will be none."""
        return decoder.decode(self.receive_bytes())

    def send(self, message: Any) -> None:
        """Send one message."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def receive_bytes(self) -> bytes:
        """The parent's next payload; raises `ChildGone` when there will be none."""
        return read_frame(self._input)

    def send_bytes(self, payload: bytes) -> None:
        """Send one payload."""
        self._output.write(frame(payload))
        self._output.flush()


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends; where no kernel does, watch for it."""
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
