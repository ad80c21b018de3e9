"""Locks between processes by name, each a file that is there only while somebody uses it.

Whoever has a name for itself alone takes its file away before letting go; whoever shares one does so if
nobody else has it. Between opening a file and locking it another process may have taken it away: then the
name stands for another file, or for none, and one starts over. What a killed process leaves, the next user of
the name or the next `sweep` removes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileLocks:
    """Locks whose files lie in `folder`, which must hold nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def held(self, name: str, *, shared: bool = False) -> Iterator[None]:
        """Have `name`, waiting as long as it takes. shared: beside others who share it."""
        fd = self._lock(name, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._let_go(name, fd)

    @contextmanager
    def attempt(self, name: str) -> Iterator[bool]:
        """Have `name` alone, if nobody has it; whether that is so."""
        try:
            fd = self._lock(name, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            self._let_go(name, fd)

    def sweep(self) -> None:
        """Remove the files that nobody uses."""
        for path in self._folder.iterdir():
            with self.attempt(path.name):
                continue

    def _lock(self, name: str, how: int) -> int:
        """A descriptor of the file that `name` stands for, locked."""
        while True:
            fd = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, how)
                if self._is_named(name, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _let_go(self, name: str, fd: int) -> None:
        try:
            fcntl.flock(
                fd, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # of a shared one the lock may be lost in between: look again
            if self._is_named(name, fd):
                os.unlink(self._folder / name)
        except BlockingIOError:
            return  # others share it, and the last of them removes it
        finally:
            os.close(fd)

    def _is_named(self, name: str, fd: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._folder / name), os.fstat(fd))
        except FileNotFoundError:
            return False
