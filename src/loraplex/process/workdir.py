"""A private folder for what a server keeps while it runs: adapter images. Gone with the server, however it
ended.

A folder is locked by its owner. One whose lock is free belongs to a server that was killed, and the next
start removes it. Never shared between servers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.core.errors import CallerError, ErrorCode


def temporary_root() -> Path:
    """Where this user's sockets lie: a short path, which addresses of sockets need."""
    return Path(tempfile.gettempdir()) / f"loraplex-{os.getuid()}"


@contextmanager
def private_folder(parent: Path) -> Iterator[Path]:
    """A fresh folder under `parent`, removed afterwards; abandoned ones beside it are removed first.

    Raises `config_invalid` when the file system refuses.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if parent.stat().st_uid != os.getuid() or parent.lstat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        remove_abandoned(parent)
        folder, lock = _take(parent)
    except OSError as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"cannot write {parent}: {error.strerror}; name a writable folder in LORAPLEX_CACHE or TMPDIR",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _take(parent: Path) -> tuple[Path, int]:
    while True:
        folder = parent / secrets.token_hex(8)
        folder.mkdir(mode=0o700)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another start took it for abandoned
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir() and os.path.samestat(os.stat(folder), os.fstat(lock)):
            return folder, lock
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders under `parent` whose servers were killed; raises OSError where it cannot be read."""
    for folder in sorted(parent.iterdir()):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its server lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
