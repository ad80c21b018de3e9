"""Owns how long work is shown to a person: a bar on a terminal, one plain line a stage elsewhere.

Never decides what is done or in which order.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

Report = Callable[[str], None]
"""Told one line about each thing that start-up has done."""


class Progress(Protocol):
    """Called with (stage, done, total); `done` grows to `total` within a stage, in units of that stage."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


def silent(stage: str, done: int, total: int, /) -> None:
    """Show nothing."""


@contextlib.contextmanager
def terminal_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """A Progress that draws on `stream` (standard error by default) until the block ends."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield _plain_lines(out)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(file=out), transient=False) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(stage: str, done: int, total: int, /) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield draw


def _plain_lines(out: TextIO) -> Progress:
    seen: set[str] = set()

    def write(stage: str, done: int, total: int, /) -> None:
        if stage not in seen:
            seen.add(stage)
            out.write(f"{stage} ...\n")
            out.flush()

    return write
