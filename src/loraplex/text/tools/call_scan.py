"""The JSON object of one call, read as it comes.

Owns where the object ends, its name, and the text of its arguments just as it was written. Checks the
object's own structure and leaves what the arguments hold to the grammar.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

from loraplex.text.tools.tool_types import BLANKS

NAME_KEY: Final = "name"
_STRING_RUN: Final = re.compile(r'[^"\\]*')
_NESTED_RUN: Final = re.compile(r'[^"{}\[\]]*')
_SCALAR_RUN: Final = re.compile(r'[^,{}\[\]" \t\r\n]*')


class _At(Enum):
    BEGIN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE_BEGIN = auto()
    VALUE = auto()
    NEXT = auto()
    DONE = auto()
    FAILED = auto()


class CallScanner:
    """Reads `{"name": ..., ARGUMENTS_KEY: ...}`; further keys are passed over.

    began: the name is known. done: the object is complete. failed: what was read is no call.
    """

    def __init__(self, arguments_keys: tuple[str, ...]) -> None:
        self._arguments_keys = arguments_keys
        self._at = _At.BEGIN
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._has_arguments = False
        self._is_arguments = False
        self._name: str | None = None
        self._name_given = False
        self._arguments = ""

    @property
    def began(self) -> bool:
        """Whether the name is known."""
        return self._name is not None

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        """Whether what was read is no call."""
        return self._at is _At.FAILED

    def feed(self, text: str) -> int:
        """Read on; how many characters were taken, fewer than all where the object is complete or is none."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            at = self._step(text, at)
        return at

    def take(self) -> tuple[str | None, str]:
        """The name, once, as soon as it is known, and what the arguments gained since; nothing before the
        name.
        """
        if self._name is None:
            return None, ""
        name = None if self._name_given else self._name
        self._name_given = True
        arguments, self._arguments = self._arguments, ""
        return name, arguments

    def _step(self, text: str, at: int) -> int:
        if self._at in (_At.KEY, _At.VALUE):
            return self._run(text, at)
        character = text[at]
        if character in BLANKS:
            return at + 1
        match self._at, character:
            case _At.BEGIN, "{":
                self._at = _At.FIRST_KEY
            case _At.FIRST_KEY, '"':
                self._open_string(_At.KEY)
                return at + 1
            case ((_At.FIRST_KEY | _At.NEXT), "}"):
                self._finish()
                return at + 1 if self.done else at
            case _At.NEXT, ",":
                self._at = _At.FIRST_KEY
            case _At.COLON, ":":
                self._at = _At.VALUE_BEGIN
            case _At.VALUE_BEGIN, _:
                return self._begin_value(character, at)
            case _:
                self._at = _At.FAILED
                return at
        return at + 1

    def _open_string(self, state: _At) -> None:
        self._at, self._in_string, self._value, self._depth = state, True, '"', 0

    def _begin_value(self, character: str, at: int) -> int:
        self._is_arguments = self._key in self._arguments_keys and not self._has_arguments
        self._has_arguments |= self._is_arguments
        if character == '"':
            self._open_string(_At.VALUE)
            self._keep(character, fresh=True)
            return at + 1
        self._at, self._value, self._depth = _At.VALUE, "", 0
        return at

    def _keep(self, part: str, *, fresh: bool = False) -> None:
        """Add to the value: names and keys are kept whole, arguments are given out, the rest is
        passed over.
        """
        if self._at is _At.VALUE and self._is_arguments:
            self._arguments += part
        elif not fresh and (self._at is _At.KEY or self._key == NAME_KEY):
            self._value += part

    def _run(self, text: str, at: int) -> int:
        """One run of characters of a key or a value."""
        if self._in_string:
            return self._string_run(text, at)
        character = text[at]
        if character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
        elif character == '"' and self._depth:
            self._in_string = True
        else:
            return self._plain_run(text, at)
        self._keep(character)
        if not self._depth:
            self._close_value()
        return at + 1

    def _plain_run(self, text: str, at: int) -> int:
        found = (_NESTED_RUN if self._depth else _SCALAR_RUN).match(text, at)
        end = at if found is None else found.end()
        self._keep(text[at:end])
        if end < len(text) and not self._depth:  # a number or a word ends before what follows
            self._close_value()
        return end

    def _string_run(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._keep(text[at])
            return at + 1
        found = _STRING_RUN.match(text, at)
        end = at if found is None else found.end()
        if end == len(text):
            self._keep(text[at:end])
            return end
        self._keep(text[at : end + 1])
        if text[end] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            if not self._depth:
                self._close_value()
        return end + 1

    def _close_value(self) -> None:
        if self._at is _At.KEY:
            key = _text_of(self._value)
            self._key, self._at = key or "", _At.FAILED if key is None else _At.COLON
            return
        self._at = _At.NEXT
        if self._key == NAME_KEY and self._name is None:
            self._name = _text_of(self._value)
            if not self._name:
                self._name, self._at = None, _At.FAILED

    def _finish(self) -> None:
        self._at = _At.FAILED if self._name is None else _At.DONE
        if self.done and not self._has_arguments:
            self._arguments = "{}"


def _text_of(raw: str) -> str | None:
    """The text that a JSON string means; None for anything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
