"""What crosses the pipes between a parent and its child: length-prefixed frames, and the failure that a child
reports.

Owns the form of a frame. Knows neither side's life. Specification: rulings "Processes".
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Final

import msgspec

from loraplex.core.errors import ErrorCode, LoraplexError, error_for

_LENGTH: Final = struct.Struct("<I")


class PipeClosed(Exception):
    """The other side has closed its pipe: it ends or has ended."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """What the child was to do failed. One that cannot go on exits after this."""

    code: str
    message: str
    param: str | None = None

    @staticmethod
    def of(error: Exception) -> Failed:
        """A typed error as it is; any other one is a fault of ours."""
        if isinstance(error, LoraplexError):
            return Failed(error.code.value, _sendable(error.message), error.param)
        return Failed(ErrorCode.INTERNAL.value, _sendable(f"{type(error).__name__}: {error}"))

    @property
    def error(self) -> LoraplexError:
        """The error, on the other side."""
        return error_for(ErrorCode(self.code), self.message, param=self.param)


def _sendable(text: str) -> str:
    """A text that may name a file whose name is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def frame(payload: bytes) -> bytes:
    """A payload as it travels."""
    return _LENGTH.pack(len(payload)) + payload


def read_frame(pipe: BinaryIO) -> bytes:
    """The next payload of a pipe; raises `PipeClosed` when there will be none."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise PipeClosed
    (length,) = _LENGTH.unpack(header)
    payload = pipe.read(length)
    if len(payload) < length:
        raise PipeClosed
    return payload


class Frames:
    """Cuts what arrives piece by piece into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order."""
        self._buffer += data
        payloads: list[bytes] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return payloads


def frame_length(header: bytes) -> int:
    """Bytes of the payload behind a header of `HEADER_BYTES`."""
    length: int = _LENGTH.unpack(header)[0]
    return length


HEADER_BYTES: Final = _LENGTH.size
