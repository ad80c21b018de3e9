"""From an answer's text to what is said and what is called, piece by piece.

Owns what is held back: the beginning of a mark, a call whose name is not known yet, white space that may lie
beside a call. What comes out depends on the text only, not on how it was split. Never judges arguments: the
grammar did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

from loraplex.text.tools.call_scan import CallScanner
from loraplex.text.tools.tool_types import BLANKS, CallDelta


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Where calls begin and end in a form.

    begin: text that opens calls anywhere, or nothing. leading: an object at the beginning of an answer opens
    them too. head: stands between `begin` and the first call. between: stands between two calls. end: closes
    the calls. arguments_keys: under which of its keys an object holds arguments. inside: further marks.
    """

    begin: str
    leading: bool = False
    head: str = ""
    between: str = ""
    end: str = ""
    arguments_keys: tuple[str, ...] = ("arguments",)
    inside: tuple[str, ...] = ()

    @property
    def texts(self) -> frozenset[str]:
        """Texts that the parser must see, also where one is a special token."""
        return frozenset(filter(None, (self.begin, self.end, *self.inside)))


class Scanner(Protocol):
    """Reads one call as it comes: what `CallScanner` is to one that is a JSON object."""

    @property
    def began(self) -> bool:
        """Whether the name is known."""
        ...

    @property
    def done(self) -> bool:
        """Whether the call is complete."""
        ...

    @property
    def failed(self) -> bool:
        """Whether what was read is no call."""
        ...

    def feed(self, text: str) -> int:
        """Read on; how many characters were taken, fewer than all where the call is complete or is none."""
        ...

    def take(self) -> tuple[str | None, str]:
        """The name, once, as soon as it is known, and what the arguments gained since."""
        ...


class _In(Enum):
    START = auto()
    TEXT = auto()
    HEAD = auto()
    CALL = auto()
    AFTER = auto()


class CallParser:
    """One answer. calls: how many began."""

    def __init__(
        self, marks: CallMarks, new_id: Callable[[], str], new_scanner: Callable[[], Scanner] | None = None
    ) -> None:
        """new_scanner: for each call; one of a JSON object where it is left out."""
        self.calls = 0
        self._marks = marks
        self._new_scanner = new_scanner or partial(CallScanner, marks.arguments_keys)
        self._new_id = new_id
        self._in = _In.START if marks.leading else _In.TEXT
        self._buffer = ""
        self._blank = ""
        self._said = False
        self._raw = ""
        """The opening of a call whose name is not known yet: text after all, if it is none."""
        self._scanner: Scanner = self._new_scanner()
        self._out: list[str | CallDelta] = []

    def push(self, text: str) -> list[str | CallDelta]:
        """What is certain after `text`: text that is said, and what calls get."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[str | CallDelta]:
        """What was still held back; nothing follows. A call that is cut off stays as far as it came."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[str | CallDelta]:
        while self._step(final):
            pass
        if final:
            if not self.calls:
                self._out.append(self._blank)
            self._blank = ""
        out, self._out = self._out, []
        return [part for part in out if part != ""]

    def _step(self, final: bool) -> bool:
        """Do what the buffer decides; whether anything moved."""
        match self._in:
            case _In.START:
                return self._start(final)
            case _In.TEXT:
                return self._text(final)
            case _In.HEAD:
                return self._head(final)
            case _In.CALL:
                return self._call(final)
            case _In.AFTER:
                return self._after(final)

    def _start(self, final: bool) -> bool:
        rest = self._buffer.lstrip(BLANKS)
        if not rest and not final:
            return False
        if rest.startswith("{"):
            self._blank, self._buffer = self._buffer[: len(self._buffer) - len(rest)], rest
            self._open("", _In.CALL)
        else:
            self._in = _In.TEXT
        return True

    def _text(self, final: bool) -> bool:
        begin, buffer = self._marks.begin, self._buffer
        at = buffer.find(begin) if begin else -1
        if at >= 0:
            self._say(buffer[:at])
            self._buffer = buffer[at + len(begin) :]
            self._open(begin, _In.HEAD)
            return True
        kept = 0 if final and not self.calls else begun(buffer, begin)
        self._say(buffer[: len(buffer) - kept])
        self._buffer = buffer[len(buffer) - kept :]
        return False

    def _open(self, raw: str, state: _In) -> None:
        self._raw, self._in = raw, state
        self._scanner = self._new_scanner()

    def _head(self, final: bool) -> bool:
        head = self._marks.head
        rest = self._buffer.lstrip(BLANKS)
        if rest or not head:
            taken = len(self._buffer) - len(rest)
            if not final and head.startswith(rest) and rest != head:
                return False
            if not rest.startswith(head):
                return self._no_call(cut=head.startswith(rest))
            self._raw += self._buffer[:taken] + head
            self._buffer = rest[len(head) :]
            self._in = _In.CALL
            return True
        return self._no_call(cut=True) if final else False

    def _no_call(self, *, cut: bool) -> bool:
        """What was taken for a call's opening is text. cut: the answer ended in it; behind another call that
        is no part of what was said.
        """
        if cut and self.calls:
            self._buffer = ""
        else:
            self._say(self._raw)
        self._raw, self._in = "", _In.TEXT
        return True

    def _call(self, final: bool) -> bool:
        scanner = self._scanner
        taken = scanner.feed(self._buffer)
        if not scanner.began:
            self._raw += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        self._give()
        if scanner.done:
            self._in = _In.AFTER
        elif scanner.failed or final:
            if not scanner.began:
                return self._no_call(cut=not scanner.failed)
            self._in = _In.TEXT
        return scanner.done or scanner.failed

    def _give(self) -> None:
        name, arguments = self._scanner.take()
        if name is not None:
            self._raw = ""
            self._out.append(CallDelta(self.calls, self._new_id(), name, arguments))
            self.calls += 1
        elif arguments:
            self._out.append(CallDelta(self.calls - 1, None, None, arguments))

    def _after(self, final: bool) -> bool:
        """Behind a call: its end, another call, or text."""
        marks, rest = self._marks, self._buffer.lstrip(BLANKS)
        known = [mark for mark in (marks.end, marks.between) if mark]
        if not final and (not rest or any(len(rest) < len(m) and m.startswith(rest) for m in known)):
            return False
        if marks.end and rest.startswith(marks.end):
            self._buffer, self._in = rest[len(marks.end) :], _In.TEXT
        elif marks.between and rest.startswith(marks.between):
            self._buffer = rest[len(marks.between) :]
            self._open(marks.between, _In.CALL)
        elif not known and rest.startswith("{"):
            self._buffer = rest
            self._open("", _In.CALL)
        else:
            self._in = _In.TEXT
        return True

    def _say(self, text: str) -> None:
        """Give text out, without the white space around calls where there is none other to keep apart."""
        body = text.rstrip(BLANKS)
        tail = text[len(body) :]
        if not body:
            self._blank += tail
            return
        apart = self.calls and not self._said
        body = body.lstrip(BLANKS) if apart else self._blank + body
        self._blank, self._said = tail, True
        self._out.append(body)


def begun(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark."""
    return next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0
    )
