"""Says on standard error what a long command is doing: a spinner with its time on a terminal, plain lines
elsewhere.

Nothing that takes minutes is silent: a plain line is repeated while its activity lasts. Results go to
standard output and are not written here. Never decides what is done. Specification: interface "Command line".
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

Tell = Callable[[str], None]
"""Called with what begins now, or with what has just been found."""
REPEAT_S: Final = 15.0


@contextmanager
def activity(
    stream: TextIO | None = None, *, live: bool = True, repeat_s: float = REPEAT_S
) -> Iterator[Tell]:
    """A `Tell` until the block ends. stream: standard error by default.

    live: draw on a terminal; False where others write to the same stream meanwhile. repeat_s: pause between
    plain lines.
    """
    out = sys.stderr if stream is None else stream
    if not live or not out.isatty():
        lines = _Lines(out, repeat_s)
        try:
            yield lines.tell
        finally:
            lines.close()
        return
    from rich.console import Console

    console = Console(file=out, highlight=False, soft_wrap=True, markup=False)
    with console.status("starting") as status:
        shown = _Spinner(console.print, status.update)
        try:
            yield shown.tell
        finally:
            shown.close()


class _Spinner:
    """The current activity spins; those before it stand above with the time that they took."""

    def __init__(self, write: Callable[[str], None], spin: Callable[[str], None]) -> None:
        self._write, self._spin = write, spin
        self._current = ""
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        self.close()
        self._current, self._began = text, time.monotonic()
        self._spin(text)

    def close(self) -> None:
        if self._current:
            self._write(f"{self._current} ({time.monotonic() - self._began:.1f} s)")
        self._current = ""


class _Lines:
    """A line an activity, repeated by a thread while it lasts."""

    def __init__(self, out: TextIO, repeat_s: float) -> None:
        self._out = out
        self._repeat_s = repeat_s
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._current = ""
        self._told = 0
        self._closed = False
        self._thread = threading.Thread(target=self._repeat, daemon=True, name="activity")
        self._thread.start()

    def tell(self, text: str) -> None:
        with self._changed:
            self._current = text
            self._told += 1
            self._write(text)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _write(self, text: str) -> None:
        self._out.write(f"[{time.monotonic() - self._began:5.0f} s] {text}\n")
        self._out.flush()

    def _repeat(self) -> None:
        with self._changed:
            while not self._closed:
                told = self._told
                self._changed.wait(self._repeat_s)
                if self._current and self._told == told and not self._closed:
                    self._write(f"still: {self._current}")
