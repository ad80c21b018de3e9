"""Owns the cache of converted models: where it is and how a folder gets into it.

A model folder is named by the digest of what it was made from, so it never changes: it is either complete
or absent. A builder writes into a private folder beside it and one rename publishes the result; whoever
loses a race throws its own copy away and uses the winner's. Never reads weights and never decides what a
folder contains. Implements the "converted once into a content-addressed folder" ruling on start-up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from loraplex.core.errors import CallerError, ErrorCode

BUILDING_PREFIX = ".building-"


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of everything loraplex caches: LORAPLEX_CACHE, else XDG_CACHE_HOME/loraplex, else
    ~/.cache/loraplex.

    An empty variable counts as unset; so does a relative XDG_CACHE_HOME, as the XDG rules ask.
    """
    env = os.environ if environ is None else environ
    own = env.get("LORAPLEX_CACHE", "")
    if own:
        return Path(own).expanduser().absolute()
    xdg = env.get("XDG_CACHE_HOME", "")
    if xdg and Path(xdg).is_absolute():
        return Path(xdg) / "loraplex"
    return Path.home() / ".cache" / "loraplex"


def publish(target: Path, build: Callable[[Path], None]) -> Path:
    """Make `target` exist by running `build(private folder)` and renaming the result; return `target`.

    Any number of processes may call this at once for one target: all succeed and one result stays. A failing
    `build` leaves nothing behind. Raises CallerError MODEL_CACHE_UNWRITABLE when the file system refuses.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with _private_folder(target.parent) as folder:
            build(folder)
            with contextlib.suppress(FileExistsError):
                _rename_onto_absent(folder, target)
    except OSError as error:
        raise CallerError(
            ErrorCode.MODEL_CACHE_UNWRITABLE,
            f"cannot write the model cache {target.parent}: {error.strerror or error}; "
            "free space there or set LORAPLEX_CACHE to a writable folder",
        ) from error
    return target


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise CallerError MODEL_CACHE_DAMAGED unless `folder` holds each named file with the size it was
    published with.
    """
    for name, size in sizes.items():
        path = folder / name
        seen = path.stat().st_size if path.is_file() else None
        if seen != size:
            found = "is missing" if seen is None else f"has {seen} bytes"
            raise CallerError(
                ErrorCode.MODEL_CACHE_DAMAGED,
                f"{path} {found}, expected {size} bytes; delete {folder} to convert it again",
            )


def _rename_onto_absent(folder: Path, target: Path) -> None:
    """Rename, and turn "somebody else published first" into FileExistsError on every platform."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(error.errno, "already published", str(target)) from error
        raise


@contextlib.contextmanager
def _private_folder(parent: Path) -> Iterator[Path]:
    """A fresh locked folder under `parent`; whatever is still there at the end is removed.

    The lock tells other processes that the builder lives. Between mkdir and lock a cleaner may win the lock
    and remove the folder; then the inode behind the path differs and we start over.
    """
    while True:
        folder = parent / f"{BUILDING_PREFIX}{secrets.token_hex(8)}"
        folder.mkdir()
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_same_folder(folder, descriptor):
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
        finally:
            os.close(descriptor)


def _is_same_folder(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_abandoned(parent: Path) -> None:
    """Remove private folders whose builder died: their lock is free."""
    for folder in sorted(parent.glob(f"{BUILDING_PREFIX}*")):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
