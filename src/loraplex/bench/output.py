"""Files that a benchmark writes: looked at before it measures, so that no slip costs the minutes that it
takes.
"""

from __future__ import annotations

import os
from pathlib import Path

from loraplex.core.errors import CallerError, ErrorCode


def check_outputs(*paths: Path | None) -> None:
    """Raise `config_invalid` for a file that cannot be written; None stands for no file. Leaves nothing
    behind.
    """
    for path in paths:
        if path is not None:
            there = os.path.lexists(path)
            write_output(path, "", append=True)
            if not there:
                path.unlink()


def write_output(path: Path, text: str, *, append: bool = False) -> None:
    """Write a file; raises `config_invalid` when that cannot be."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"{path} cannot be written: {error.strerror}; name another file",
            param="json",
        ) from error
