"""The child's side of a child process: its pipes to the parent, and the life that it leads there.

A child receives one order, does its work, and exits. What keeps it from that is reported as a typed `Failed`,
and a parent that is gone ends it. Never decides what the work is. Specification: rulings "Processes".
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

from loraplex.core.errors import LoraplexError
from loraplex.process.logs import configure_logging
from loraplex.process.pipe import Failed, PipeClosed, frame, read_frame

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


class Parent:
    """The pipes to the parent. What libraries print goes to standard error."""

    def __init__(self) -> None:
        """Takes standard input and output over."""
        self._input: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._output: BinaryIO = os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The parent's next message; raises `PipeClosed` when there will be none."""
        return decoder.decode(self.receive_bytes())

    def send(self, message: Any) -> None:
        """Send one message."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def receive_bytes(self) -> bytes:
        """The parent's next payload; raises `PipeClosed` when there will be none."""
        return read_frame(self._input)

    def send_bytes(self, payload: bytes) -> None:
        """Send one payload."""
        self._output.write(frame(payload))
        self._output.flush()


def run_child(order: type[T], work: Callable[[Parent, T], int]) -> int:
    """A child's whole life; its exit status.

    order: type of the first message. work: called with it; what it raises is logged and reported as `Failed`.
    """
    parent = Parent()
    configure_logging("warning", as_json=False)
    try:
        return work(parent, parent.receive(msgspec.msgpack.Decoder(order)))
    except (PipeClosed, BrokenPipeError):
        return 0
    except Exception as error:  # noqa: BLE001 - the process's boundary: its parent hears typed why it ends
        if isinstance(error, LoraplexError):
            _log.error("%s", error)
        else:
            _log.exception("the process failed")
        with suppress(OSError):
            parent.send(Failed.of(error))
        return 1


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
