"""Where an adapter may come from: a local folder, an object store, a web server, a hub pinned to a commit.

What lies in an adapter's folder is `artifact/source.py`. Owns the text of a source, and what a remote caller
may name: a local path only inside an allowed root, links followed, `..`, links that leave it, devices and
pipes refused; a web address only under an allowed prefix, since the server would fetch it from inside its
network. Object stores and hubs are read with the server's own credentials and are the operator's to grant; a
prefix given for their scheme narrows them to it. Opens nothing.

Specification: rulings "Tenants"; interface "Command line".
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from loraplex.artifact.card import CARD_FILE
from loraplex.artifact.companions import COMPANION_FILES
from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode

OBJECT_SCHEMES: Final = frozenset({"s3", "gs", "az", "abfs", "abfss"})
WEB_SCHEMES: Final = frozenset({"http", "https"})
HUB_SCHEME: Final = "hf"
_HUB: Final = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)@(?P<commit>[^/]+)(?:/(?P<folder>[\w./-]+))?")
_MAX_ESCAPES: Final = 4
_SHOWN_CHARS: Final = 160
_SHARD: Final = ".safetensors"
"""What an index of shards may name besides files that begin with `adapter_`."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_REMOTE: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[^/?#@\s]+)(?P<path>/[^?#\s]*)?")


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder of this machine."""

    folder: Path


@dataclass(frozen=True, slots=True)
class RemoteSource:
    """A folder elsewhere. scheme: of its text. url: what the object-store library opens. text: as it was
    given.
    """

    text: str
    scheme: str
    url: str


def is_remote(source: str) -> bool:
    """Whether a source is not a path of this machine."""
    return "://" in source


def parse_source(source: str) -> LocalSource | RemoteSource:
    """What a source names. Raises `unsupported_option` for an unknown scheme, `adapter_source_unpinned` for a
    hub source without a whole commit, `adapter_source_missing` for one that is malformed.
    """
    if not source:
        raise _malformed(source, "it is empty")
    if len(source) > limits.MAX_SOURCE_CHARS:
        raise _malformed(
            source, f"it has {len(source)} characters, at most {limits.MAX_SOURCE_CHARS} are read"
        )
    if "\0" in source:
        raise _malformed(source, "it holds a NUL, which no path does")
    if not is_remote(source):
        return LocalSource(Path(source))
    scheme = source.partition("://")[0].lower()
    if scheme == HUB_SCHEME:
        return _hub(source)
    if scheme not in OBJECT_SCHEMES | WEB_SCHEMES:
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"source {shown(source)} has the scheme {shown(scheme)}, expected a local path, "
            f"{', '.join(sorted(OBJECT_SCHEMES | WEB_SCHEMES))} or hf",
            param="source",
        )
    match = _REMOTE.fullmatch(source)
    if match is None:
        raise _malformed(source, "it has no host, or a query, a fragment or a blank")
    if _climbs(match["path"] or ""):
        raise _malformed(source, "its path holds '..', '.', a backslash or escapes of them")
    return RemoteSource(source, scheme, source.rstrip("/"))


def _climbs(path: str) -> bool:
    """Whether a reader of URLs may take a part of a path for the folder above, or see parts that we do not.

    They resolve `..` also where it is written with escapes, and take a backslash for a slash; a server behind
    them may resolve escapes of escapes.
    """
    for _ in range(_MAX_ESCAPES):
        if "\\" in path or not {"..", "."}.isdisjoint(path.split("/")):
            return True
        plain = unquote(path)
        if plain == path:
            return False
        if plain.count("/") != path.count("/"):
            return True
        path = plain
    return True


def _hub(source: str) -> RemoteSource:
    match = _HUB.fullmatch(source)
    if match is None or _climbs(source.replace("@", "/")):
        if "@" not in source:
            raise _unpinned(source, "no commit")
        raise _malformed(source, "it is not hf://OWNER/NAME@COMMIT or hf://OWNER/NAME@COMMIT/FOLDER")
    if not _COMMIT.fullmatch(match["commit"]):
        raise _unpinned(source, shown(match["commit"]))
    folder = f"/{match['folder'].strip('/')}" if match["folder"] else ""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return RemoteSource(source, HUB_SCHEME, f"{hub}/{match['repo']}/resolve/{match['commit']}{folder}")


def permitted(source: str, roots: Sequence[str | os.PathLike[str]]) -> str:
    """The source behind what a remote caller named, if the roots (--adapter-dir: folders and prefixes) permit
    it.

    Raises `adapter_source_forbidden` otherwise, without saying whether a path exists; else as `parse_source`.
    """
    parsed = parse_source(source) if "\0" not in source else LocalSource(Path(os.devnull))
    texts = [os.fspath(root) for root in roots]
    if isinstance(parsed, LocalSource):
        return _permitted_folder(source, [root for root in texts if not is_remote(root)])
    prefixes = [root.rstrip("/") for root in texts if is_remote(root)]
    mine = [root for root in prefixes if root.partition("://")[0] == parsed.scheme]
    text = source.rstrip("/")
    inside = any(text == root or text.startswith(f"{root}/") for root in mine)
    if inside or (not mine and parsed.scheme not in WEB_SCHEMES):
        return source
    raise CallerError(
        ErrorCode.ADAPTER_SOURCE_FORBIDDEN,
        f"source {shown(source)} must lie under a {parsed.scheme}:// prefix given as --adapter-dir",
        param="source",
    )


def _permitted_folder(source: str, roots: Sequence[str]) -> str:
    path = Path(source)
    if "\0" not in source and path.is_absolute() and ".." not in path.parts:
        real = Path(os.path.realpath(path))
        allowed = [Path(os.path.realpath(root)) for root in roots]
        if any(real.is_relative_to(root) for root in allowed) and _files_stay(real, allowed):
            return str(real)
    raise CallerError(
        ErrorCode.ADAPTER_SOURCE_FORBIDDEN,
        f"source {shown(source)} must be an absolute path without '..' that resolves into a folder given as "
        "--adapter-dir, with no file in it that is a device, a pipe or a link that leaves it, and at most "
        f"{limits.MAX_ADAPTER_FOLDER_FILES} files",
        param="source",
    )


def _files_stay(folder: Path, roots: Sequence[Path]) -> bool:
    """Whether every file that a load could open is a regular one inside the roots. What is not there is not
    judged.
    """
    try:
        with os.scandir(folder) if os.path.isdir(folder) else nullcontext(()) as found:
            entries = list(islice(found, limits.MAX_ADAPTER_FOLDER_FILES + 1))
    except OSError:
        return False
    if len(entries) > limits.MAX_ADAPTER_FOLDER_FILES:
        return False
    for entry in entries:
        opened = (
            entry.name.startswith("adapter_")
            or entry.name.endswith(_SHARD)
            or entry.name in (*COMPANION_FILES, CARD_FILE)
        )
        if not opened:
            continue
        real = Path(os.path.realpath(entry.path))
        if not any(real.is_relative_to(root) for root in roots):
            return False
        try:
            mode = real.stat().st_mode
        except OSError:
            continue  # a dead link is the load's to refuse
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return False
    return True


def shown(text: str) -> str:
    """A source for a message: as it was given, the middle of a long one left out."""
    short = (
        text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]}...{text[-_SHOWN_CHARS // 2 :]}"
    )
    return repr(short)


def _malformed(source: str, why: str) -> CallerError:
    return CallerError(
        ErrorCode.ADAPTER_SOURCE_MISSING,
        f"source {shown(source)} is not read, {why}; give a folder, SCHEME://HOST/PATH or "
        "hf://OWNER/NAME@COMMIT",
        param="source",
    )


def _unpinned(source: str, seen: str) -> CallerError:
    return CallerError(
        ErrorCode.ADAPTER_SOURCE_UNPINNED,
        f"source {shown(source)} names {seen}; a branch or tag can move, so give the commit's 40 hexadecimal "
        "digits",
        param="source",
    )
