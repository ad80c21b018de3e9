"""The store of downloaded adapters: folders named by the digest of their files, complete or absent.

A download goes into a staging folder of its source, continues where an earlier one stopped if the remote file
still has its tag, is checked for size, hashed, and appears by one rename. One that cannot succeed leaves
nothing; what one that broke off has left counts against the limit, and goes when somebody else needs the
room. What is read from the store is hashed again; a folder that does not have its digest is dropped. The
store has a limit: what no revision names goes first, then what only superseded ones name, the least recently
used first; never what somebody is reading. Shared by all servers of a cache folder.

Specification: architecture "Names and what they stand for"; 0x0C (malformed input fails closed).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from loraplex.artifact.card import CARD_FILE
from loraplex.artifact.companions import COMPANION_FILES
from loraplex.artifact.source import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLE_FILES,
    WEIGHTS_FILE,
    ByteProgress,
    weight_files,
)
from loraplex.catalog.locks import FileLocks
from loraplex.catalog.remote import RemoteFile, RemoteFolder
from loraplex.catalog.sources import RemoteSource
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault
from loraplex.core.limits import MAX_ADAPTER_BYTES, MAX_ADAPTER_CONFIG_BYTES, MAX_TOKENIZER_BYTES
from loraplex.identity.canonical import check_digest, digest
from loraplex.model.converted_models import cache_root

CHUNK_BYTES: Final = 8 << 20
DEFAULT_STORE_BYTES: Final = 32 << 30
_CONTENT: Final = "content"
_DOOMED: Final = "doomed-"


def artifacts_folder() -> Path:
    """Where downloads are kept on this machine."""
    return cache_root() / "artifacts"


def has_content(root: str | os.PathLike[str], key: str) -> bool:
    """Whether the store in a folder has an entry under a key; whether that is whole, reading it says."""
    return (Path(root) / _CONTENT / check_digest("content", key)).is_dir()


class ArtifactStore:
    """Downloaded adapters under `root`, at most `limit_bytes` of them."""

    def __init__(self, root: str | os.PathLike[str], limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.root = Path(root)
        self._entries, self._staging = self.root / _CONTENT, self.root / "staging"
        self._refs, locks = self.root / "refs", self.root / "locks"
        self._locks = FileLocks(locks)
        try:
            for folder in (self._entries, self._staging, self._refs, locks):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._locks.sweep()
            for doomed in self._staging.glob(f"{_DOOMED}*"):
                shutil.rmtree(doomed, ignore_errors=True)
        except OSError as error:
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"cannot write {self.root}: {error.strerror}; set LORAPLEX_CACHE to a writable folder",
            ) from error

    @contextmanager
    def reading(
        self, source: RemoteSource, content: str | None = None, progress: ByteProgress | None = None
    ) -> Iterator[tuple[Path, str]]:
        """The folder of a source's files and its key, downloaded if it is not here; kept until the context
        ends.

        content: the key that it must have; then nothing is asked of the source where the store has it. Raises
        `adapter_source_*`, `adapter_too_large`, `artifact_store_full`.
        """
        if content is not None:
            with self._held(content) as found:
                if found and self._is_whole(content):
                    yield self._entries / content, content
                    return
        try:
            key = self._fetch(source, content, progress)
        except OSError as error:
            raise InternalFault(
                ErrorCode.ADAPTER_LOAD_FAILED,
                f"{source.text[:80]!r} cannot be stored: {error.strerror or error}; look at the disk behind "
                "LORAPLEX_CACHE",
            ) from error
        with self._held(key) as found:
            if not found:  # reclaimed between download and use: only when the store is far too small
                raise self._full(0, key)
            yield self._entries / key, key

    def keys(self) -> set[str]:
        """Keys of everything in the store."""
        return {path.name for path in self._entries.iterdir()}

    def total_bytes(self) -> int:
        """Bytes of everything in the store, without what is being downloaded or was broken off."""
        return sum(_folder_bytes(path) for path in self._entries.iterdir())

    def reclaim(self, current: Collection[str], superseded: Collection[str], need_bytes: int = 0) -> int:
        """Delete until `need_bytes` more fit under the limit; what current revisions name stays. Bytes
        deleted.
        """
        excess = self.total_bytes() + need_bytes - self.limit_bytes
        freed = 0
        candidates = [path for path in self._entries.iterdir() if path.name not in current]
        for path in sorted(candidates, key=lambda p: (p.name in superseded, _used(p))):
            if freed >= excess:
                break
            freed += self._delete(path.name)
        return freed

    # Download

    def _fetch(self, source: RemoteSource, content: str | None, progress: ByteProgress | None) -> str:
        stage = self._staging / hashlib.sha256(source.text.encode()).hexdigest()
        with self._locks.held(stage.name):
            remote = RemoteFolder(source)
            files = _small_files(remote, source)
            tags = [[file.name, file.size, file.tag] for file in files]
            ref = self._refs / digest({"source": source.text, "files": tags})
            if all(file.tag is not None for file in files) and (key := self._referenced(ref)) is not None:
                return _expected(key, content, source)
            try:
                stage.mkdir(exist_ok=True, mode=0o700)
                if files[-1].name == INDEX_FILE:
                    files += self._shards(remote, source, stage, files[-1])
                self._check_room(sum(file.size for file in files), source, stage)
                _download(remote, stage, files, progress)
                key = self._publish(stage, [file.name for file in files])
            except CallerError:  # the same files will not do better
                shutil.rmtree(stage, ignore_errors=True)
                raise
            _write_text(ref, key)
            return _expected(key, content, source)

    def _referenced(self, ref: Path) -> str | None:
        """The key that the same remote files had, if the store still has it whole."""
        with suppress(FileNotFoundError):
            key = ref.read_text()
            if self._is_whole(key):
                return key
        return None

    def _shards(
        self, remote: RemoteFolder, source: RemoteSource, stage: Path, index: RemoteFile
    ) -> list[RemoteFile]:
        _download(remote, stage, [index], None)
        shards = []
        for path in weight_files(stage):
            shard = remote.look(path.name)
            if shard is None:
                raise _missing(source, path.name)
            shards.append(shard)
        return shards

    def _check_room(self, size: int, source: RemoteSource, stage: Path) -> None:
        if size > MAX_ADAPTER_BYTES:
            raise CallerError(
                ErrorCode.ADAPTER_TOO_LARGE,
                f"{source.text[:80]!r} holds {size} bytes, at most {MAX_ADAPTER_BYTES} are accepted",
            )
        room = self.limit_bytes - self.total_bytes() - size
        others = [path for path in self._staging.iterdir() if path != stage]
        for path in sorted(others, key=_used):
            if sum(map(_folder_bytes, others)) <= room:
                break
            self._abandon(path)
        if sum(map(_folder_bytes, others)) > room:
            raise self._full(size, source.text)

    def _abandon(self, stage: Path) -> None:
        """Delete what a download that broke off has left, unless somebody goes on with it."""
        with self._locks.attempt(stage.name) as alone:
            if alone:
                shutil.rmtree(stage, ignore_errors=True)

    def _full(self, size: int, what: str) -> CapacityError:
        return CapacityError(
            ErrorCode.ARTIFACT_STORE_FULL,
            f"{size} bytes of {what[:80]!r} do not fit into the artifact store of {self.limit_bytes} bytes, "
            f"{self.total_bytes()} of which are taken; raise --store-gb or remove adapters",
        )

    def _publish(self, stage: Path, names: list[str]) -> str:
        """Hash the staged files, drop everything else beside them, and move them to their key by one
        rename.
        """
        for path in stage.iterdir():
            if path.name not in names:
                path.unlink()
        digests = {name: _sha256(stage / name) for name in sorted(names)}
        key = _key(digests)
        with self._locks.held(key):
            if not self._is_whole(key):
                shutil.rmtree(self._entries / key, ignore_errors=True)
                os.replace(stage, self._entries / key)
                _sync(self._entries)
        shutil.rmtree(stage, ignore_errors=True)
        return key

    def _is_whole(self, key: str) -> bool:
        """Whether the folder has its digest; one that does not is of no use to anybody."""
        folder = self._entries / check_digest("content", key)
        try:
            names = sorted(path.name for path in folder.iterdir())
            good = _key({name: _sha256(folder / name) for name in names}) == key
        except OSError:
            return False
        if good:
            os.utime(folder)
        return good

    # Locks

    @contextmanager
    def _held(self, key: str) -> Iterator[bool]:
        """Keep an entry from being deleted; whether it is there."""
        with self._locks.held(check_digest("content", key), shared=True):
            yield (self._entries / key).is_dir()

    def _delete(self, key: str) -> int:
        """Delete an entry that nobody holds; its bytes, 0 when somebody does."""
        with self._locks.attempt(key) as alone:
            if not alone:
                return 0
            size = _folder_bytes(self._entries / key)
            doomed = self._staging / f"{_DOOMED}{key}"
            try:
                os.replace(self._entries / key, doomed)
            except FileNotFoundError:
                return 0
            shutil.rmtree(doomed, ignore_errors=True)
            return size


def _small_files(remote: RemoteFolder, source: RemoteSource) -> list[RemoteFile]:
    """What lies beside the weights for text, the configuration, and last the weights or their index."""
    config = remote.look(CONFIG_FILE)
    if config is None:
        raise _missing(source, CONFIG_FILE)
    weights = remote.look(WEIGHTS_FILE) or remote.look(INDEX_FILE)
    if weights is None:
        if any(remote.look(name) for name in PICKLE_FILES):
            raise CallerError(
                ErrorCode.ADAPTER_FILE_PICKLE,
                f"{source.text[:80]!r} holds a pickle and no {WEIGHTS_FILE}; load it with PEFT in a place "
                "you trust "
                "and save it again with save_pretrained",
            )
        raise _missing(source, WEIGHTS_FILE)
    for file in (config, weights):
        if file.name != WEIGHTS_FILE and file.size > MAX_ADAPTER_CONFIG_BYTES:
            raise CallerError(
                ErrorCode.ADAPTER_TOO_LARGE,
                f"{file.name} of {source.text[:80]!r} has {file.size} bytes, at most "
                f"{MAX_ADAPTER_CONFIG_BYTES} are read",
            )
    return [*_companions(remote, source), config, weights]


def _companions(remote: RemoteFolder, source: RemoteSource) -> list[RemoteFile]:
    """The files that say how an adapter's text is made and how it is used; none is needed."""
    found = []
    for name in (*COMPANION_FILES, CARD_FILE):
        try:
            file = remote.look(name)
        except CallerError as error:
            # A store whose keys may not be listed says this of what is not there.
            if error.code is not ErrorCode.ADAPTER_SOURCE_FORBIDDEN:
                raise
            file = None
        if file is not None and file.size > MAX_TOKENIZER_BYTES:
            raise CallerError(
                ErrorCode.ADAPTER_TOO_LARGE,
                f"{name} of {source.text[:80]!r} has {file.size} bytes, at most {MAX_TOKENIZER_BYTES} are "
                "read",
            )
        found += [] if file is None else [file]
    return found


def _download(
    remote: RemoteFolder, stage: Path, files: list[RemoteFile], progress: ByteProgress | None
) -> None:
    """Have every file in the staging folder, whole and on disk."""
    total, before = sum(file.size for file in files), 0
    for file in files:
        done, part, tag = stage / file.name, stage / f"{file.name}.part", stage / f"{file.name}.tag"
        version = msgspec.json.encode(file).decode()
        same = file.tag is not None and tag.is_file() and tag.read_text() == version
        if not (same and done.is_file() and done.stat().st_size == file.size):
            done.unlink(missing_ok=True)
            if not same:
                part.unlink(missing_ok=True)
            _write_text(tag, version)
            _continue(remote, file, part, _after(before, total, progress))
            os.replace(part, done)
        before += file.size


def _after(before: int, total: int, progress: ByteProgress | None) -> Callable[[int], None]:
    """Reports a file's bytes behind those of the files before it."""

    def arrived(have: int) -> None:
        if progress is not None:
            progress(before + have, total)

    return arrived


def _continue(remote: RemoteFolder, file: RemoteFile, part: Path, arrived: Callable[[int], None]) -> None:
    """Append what is missing of a file, range by range."""
    with part.open("ab") as out:
        have = out.tell()
        if have > file.size:
            out.truncate(0)
            have = 0
        while have < file.size:
            end = min(have + CHUNK_BYTES, file.size)
            out.write(remote.read(file, have, end))
            have = end
            arrived(have)
        out.flush()
        os.fsync(out.fileno())


def _expected(key: str, content: str | None, source: RemoteSource) -> str:
    if content is not None and key != content:
        raise CallerError(
            ErrorCode.ADAPTER_SOURCE_CHANGED,
            f"{source.text[:80]!r} holds files {key:.16}, the revision was published from {content:.16}; "
            "publish what is there now as a new revision",
            param="source",
        )
    return key


def _missing(source: RemoteSource, name: str) -> CallerError:
    return CallerError(
        ErrorCode.ADAPTER_SOURCE_MISSING, f"{name} is not in {source.text[:80]!r}", param="source"
    )


def _key(digests: dict[str, str]) -> str:
    return digest({"files": digests})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    os.replace(temporary, path)


def _folder_bytes(folder: Path) -> int:
    total = 0
    with suppress(FileNotFoundError):  # somebody deletes it meanwhile
        for path in folder.iterdir():
            total += path.stat().st_size
    return total


def _used(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
