"""The one life of a child process, from its parent's side: started, greeted, spoken to over its pipes,
watched, ended.

A child is an interpreter that runs a module behind `child_boot.py`, which ties it to this process: it never
outlives it. It is greeted with one order and answers that it is ready, or with the typed error for which it
is not. It ignores signals to the group, is asked to end by `END_SIGNAL`, and is killed when it does not end
within a grace.

`Child` waits in an event loop, `BlockingChild` in its caller's thread; nothing else tells them apart. Never
restarts anything and knows nothing of engines. The child's own side is `process/parent.py`. Specification:
rulings "Processes".
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import msgspec

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.process.pipe import (
    HEADER_BYTES,
    Failed,
    Frames,
    PipeClosed,
    frame,
    frame_length,
    read_frame,
)

T = TypeVar("T")

BOOT: Final = Path(__file__).with_name("child_boot.py")
END_SIGNAL: Final = signal.SIGUSR1
"""Asks one child to end; it ends a process that has nothing to finish, and one that has handles it."""
GRACE_S: Final = 5.0
"""How long a child that has closed its pipe may take to exit."""
_READ_BYTES: Final = 1 << 16


def _command(python: str | None, watch: str, target: str) -> list[str]:
    return [python or sys.executable, str(BOOT), str(os.getpid()), watch, target]


def _watch() -> str:
    """What ties a child: the kernel counts the thread that started it as its parent, and only the main one
    lasts.
    """
    return "thread" if threading.current_thread() is threading.main_thread() else "process"


def _environment(defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """A child's environment: this process's and its import path. defaults: for what this process does not
    set.
    """
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {**(defaults or {}), **os.environ, "PYTHONPATH": path}


def _not_started(name: str, error: OSError) -> InternalFault:
    return InternalFault(ErrorCode.BACKEND_FAILED, f"{name} could not be started: {error}")


def _ended_early(name: str, code: int) -> InternalFault:
    return InternalFault(ErrorCode.BACKEND_FAILED, f"{name} ended while it started: {describe_exit(code)}")


def describe_exit(code: int) -> str:
    """An exit status for people."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Child:
    """A child whose parent waits in an event loop. name: what people call it, as the subject of a
    sentence.
    """

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name

    @staticmethod
    async def start(module: str, name: str, *, defaults: Mapping[str, str] | None = None) -> Child:
        """Start a child that runs `module`; raises `backend_failed` when the system refuses.

        defaults: environment variables that hold where this process does not set them.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(None, _watch(), module), stdin=PIPE, stdout=PIPE, env=_environment(defaults)
            )
        except OSError as error:
            raise _not_started(name, error) from error
        return Child(process, name)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def greet(self, order: msgspec.Struct, answers: msgspec.msgpack.Decoder[T | Failed]) -> T:
        """Send the order, wait for the answer.

        Raises the error that the child reports, or `backend_failed` when it ended without a word.
        """
        try:
            await self.send(order)
            answer = await self.receive(answers)
        except PipeClosed:
            raise _ended_early(self._name, await self.ended()) from None
        if isinstance(answer, Failed):
            await self.ended()
            raise answer.error
        return answer

    async def send(self, message: Any) -> None:
        """Send one message; raises `PipeClosed`."""
        stdin = self._process.stdin
        if stdin is None:
            raise PipeClosed
        stdin.write(frame(msgspec.msgpack.encode(message)))
        try:
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PipeClosed from error

    async def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The child's next message; raises `PipeClosed` when there will be none."""
        stdout = self._process.stdout
        if stdout is None:
            raise PipeClosed
        try:
            payload = await stdout.readexactly(frame_length(await stdout.readexactly(HEADER_BYTES)))
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise PipeClosed from error
        return decoder.decode(payload)

    async def wait(self) -> int:
        """Exit status, once it has exited."""
        return await self._process.wait()

    def kill(self) -> None:
        """Kill it, and wait for nothing."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace_s: float) -> int:
        """Ask it to end, wait, then kill it; its exit status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(END_SIGNAL)
        return await self.ended(grace_s)

    async def ended(self, grace_s: float = GRACE_S) -> int:
        """Exit status of a child that ends; one that does not within the grace is killed."""
        try:
            async with asyncio.timeout(grace_s):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()


class BlockingChild:
    """A child whose parent waits in the thread that calls. name: what people call it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, *, group: bool) -> None:
        self._process = process
        self._name = name
        self._group = group
        self._to = cast("BinaryIO", process.stdin)
        self._from = cast("BinaryIO", process.stdout)
        self._frames = Frames()

    @staticmethod
    def start(module: str, name: str) -> BlockingChild:
        """Start a child that runs `module`; raises `backend_failed` when the system refuses."""
        return BlockingChild._started(_command(None, _watch(), module), name, _environment())

    @staticmethod
    def start_script(python: Path, script: Path, name: str) -> BlockingChild:
        """Start a script under another interpreter, in a process group that ends with it. What it prints is
        lost.
        """
        return BlockingChild._started(_command(str(python), "group", str(script)), name, None)

    @staticmethod
    def _started(command: list[str], name: str, environment: dict[str, str] | None) -> BlockingChild:
        """environment: of one of ours; None for a script, which has this process's and a group of its own."""
        script = environment is None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if script else None,
                env=environment,
                start_new_session=script,
            )
        except OSError as error:
            raise _not_started(name, error) from error
        return BlockingChild(process, name, group=script)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def greet(self, order: msgspec.Struct, answers: msgspec.msgpack.Decoder[T | Failed]) -> T:
        """Send the order, wait for the answer.

        Raises the error that the child reports, or `backend_failed` when it ended without a word.
        """
        try:
            self.send(order)
            answer = answers.decode(self.receive_bytes())
        except PipeClosed:
            raise _ended_early(self._name, self.ended()) from None
        if isinstance(answer, Failed):
            self.ended()
            raise answer.error
        return answer

    def send(self, message: Any) -> None:
        """Send one message; raises `PipeClosed`."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, payload: bytes) -> None:
        """Send one payload; raises `PipeClosed`."""
        try:
            self._to.write(frame(payload))
            self._to.flush()
        except (OSError, ValueError) as error:  # ValueError: this side has closed it
            raise PipeClosed from error

    def receive_bytes(self) -> bytes:
        """The child's next payload; raises `PipeClosed` when there will be none. Goes with no `poll`."""
        try:
            return read_frame(self._from)
        except (OSError, ValueError) as error:
            raise PipeClosed from error

    def poll(self, wait_s: float) -> list[bytes]:
        """The payloads that have arrived, waiting for the first; raises `PipeClosed` when there will
        be none.
        """
        descriptor = self._from.fileno()
        if not select.select([descriptor], [], [], wait_s)[0]:
            return []
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            raise PipeClosed
        return self._frames.add(data)

    def kill(self) -> None:
        """Kill it, with its group where it leads one, and wait for nothing."""
        self._signal(signal.SIGKILL)

    def stop(self, grace_s: float = GRACE_S) -> int:
        """Ask it to end, wait, then kill it; its exit status."""
        self._signal(END_SIGNAL)
        return self.ended(grace_s)

    def ended(self, grace_s: float = GRACE_S) -> int:
        """Exit status of a child that ends; one that does not within the grace is killed. Its pipes are
        closed.
        """
        with suppress(BrokenPipeError):
            self._to.close()
        try:
            if self._group:
                self._end_group(grace_s)
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._from.close()
        return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """Nothing reaps the child before `ended`, so its number is its own until then."""
        if self._process.returncode is None:
            (os.killpg if self._group else os.kill)(self._process.pid, number)

    def _end_group(self, grace_s: float) -> None:
        """Wait for the leader without reaping it, then kill what it has left."""
        if self._process.returncode is None:
            handle = os.pidfd_open(self._process.pid)
            select.select([handle], [], [], grace_s)
            os.close(handle)
            self.kill()
