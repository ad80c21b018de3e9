"""Logging: one line for each event, for people or as JSON. Values go in as fields of the record, never into
the text.

Prompt text is never a field unless the operator asked for it. Specification: rulings "Processes".
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Final, TextIO

import msgspec

FIELDS: Final = "loraplex_fields"


def fields(**values: Any) -> dict[str, Any]:
    """`extra=` of a logging call: structured values of the line. Those that are None are left out."""
    return {FIELDS: {name: value for name, value in values.items() if value is not None}}


def _time(record: logging.LogRecord) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{stamp}.{int(record.msecs):03d}Z"


def _text(value: Any) -> str:
    """A value in a line for people: what could break the line is quoted and escaped."""
    plain = str(value)
    if plain and plain.isprintable() and not set(plain) & set(' "='):
        return plain
    return msgspec.json.encode(_encodable(plain)).decode()


def _encodable(text: str) -> str:
    """A path that is not UTF-8 comes as half surrogates, which nobody can write."""
    return text.encode("utf-8", "backslashreplace").decode()


class PlainFormatter(logging.Formatter):
    """`time level message name=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        values = getattr(record, FIELDS, {})
        pairs = "".join(f" {name}={_text(value)}" for name, value in values.items())
        message = _encodable(record.getMessage()).replace("\n", "\\n").replace("\r", "\\r")
        line = f"{_time(record)} {record.levelname.lower()} {message}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, logger, message, the fields, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
            **{
                name: _encodable(value) if isinstance(value, str) else value
                for name, value in getattr(record, FIELDS, {}).items()
            },
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Send everything of this process at `level` and above to `stream`, standard error by default."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if as_json else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
