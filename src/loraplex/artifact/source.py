"""The files of an adapter folder: which ones count, single or sharded, and reading their tensors.

Here a folder is given; where an adapter may come from is `catalog/sources.py`. Owns the choice of files.
Never follows a name out of the folder, never reads `.bin`, never ignores a shard.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from loraplex.artifact.jsontext import JsonError, parse_object, show
from loraplex.artifact.lookalikes import lookalike
from loraplex.artifact.refuse import bad_config, malformed, missing_source, not_finite, pickled, too_large
from loraplex.artifact.safetensors_file import PICKLE_ADVICE, Entry, SafetensorsFile, open_regular
from loraplex.artifact.tensors import Tensor, is_finite
from loraplex.artifact.threads import map_threads
from loraplex.core.limits import (
    MAX_ADAPTER_BYTES,
    MAX_ADAPTER_CONFIG_BYTES,
    MAX_ADAPTER_SHARDS,
    MAX_ADAPTER_TENSORS,
)

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
INDEX_FILE: Final = "adapter_model.safetensors.index.json"
PICKLE_FILES: Final = (
    "adapter_model.bin",
    "adapter_model.bin.index.json",
    "adapter_model.pt",
    "adapter_model.pth",
)

ByteProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), rising; it may be from several threads, one at a time."""


def read_config(folder: Path) -> dict[str, Any]:
    """The decoded adapter_config.json; raises `adapter_config_invalid` when it is not strict JSON."""
    mode = _mode(folder)
    if not stat.S_ISDIR(mode):
        if stat.S_ISREG(mode) and folder.suffix in {".bin", ".pt", ".pth", ".pkl"}:
            raise pickled(f"{folder.name} is a pickle; {PICKLE_ADVICE}")
        seen = "does not exist" if not mode else "is a file" if stat.S_ISREG(mode) else "is no folder"
        raise missing_source(f"{folder} {seen}; give the folder that holds {CONFIG_FILE}")
    path = folder / CONFIG_FILE
    if not _mode(path):
        raise missing_source(f"{CONFIG_FILE} is not in {folder}; give the folder that PEFT saved")
    try:
        return _json_file(path)
    except JsonError as error:
        raise bad_config("", f"{CONFIG_FILE} {error}") from None


def _json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `JsonError` for what is none, or larger than a configuration
    may be.
    """
    fd = open_regular(path)
    try:
        data = os.pread(fd, MAX_ADAPTER_CONFIG_BYTES + 1, 0)
    finally:
        os.close(fd)
    if len(data) > MAX_ADAPTER_CONFIG_BYTES:
        raise JsonError(f"is larger than {MAX_ADAPTER_CONFIG_BYTES} bytes, the most that is read")
    known = lookalike(data)
    if known is not None:
        raise JsonError(f"is {known}")
    try:
        return parse_object(data)
    except JsonError as error:
        raise JsonError(f"cannot be read: {error}") from None


def _mode(path: Path) -> int:
    """Type and permissions of what `path` leads to; 0 where nothing is there. Raises for what cannot be
    looked at.
    """
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return 0
        raise missing_source(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:  # a NUL, which no path holds
        return 0


class WeightFiles:
    """The open weight files of a folder, whose headers were checked. Use it as a context manager.

    entries: every tensor's header, by name. total_bytes: of all tensors. Raises what the format checks raise.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        try:
            files = [self._files.enter_context(SafetensorsFile(path)) for path in weight_files(folder)]
            self._work = [(file, entry) for file in files for entry in file.entries.values()]
            self.total_bytes = sum(entry.nbytes for _, entry in self._work)
            self._check_limits()
            _check_index(folder, files)
        except BaseException:
            self._files.close()
            raise
        self.entries = {entry.name: entry for _, entry in self._work}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def read(self, progress: ByteProgress | None = None) -> dict[str, Tensor]:
        """Every tensor, read, hashed and checked for finite values, in parallel; in the order of their names.

        Raises `adapter_not_finite`.
        """
        done = 0
        lock = threading.Lock()

        def one(item: tuple[SafetensorsFile, Entry]) -> Tensor:
            nonlocal done
            tensor = read_tensor(*item)
            if progress is not None:
                with lock:
                    done += item[1].nbytes
                    progress(done, self.total_bytes)
            return tensor

        tensors = map_threads(one, self._work, self.total_bytes)
        return {tensor.name: tensor for tensor in sorted(tensors, key=lambda t: t.name)}

    def _check_limits(self) -> None:
        if self.total_bytes > MAX_ADAPTER_BYTES:
            raise too_large(
                f"the adapter holds {self.total_bytes} bytes, at most {MAX_ADAPTER_BYTES} are accepted"
            )
        if len(self._work) > MAX_ADAPTER_TENSORS:
            raise too_large(
                f"the adapter holds {len(self._work)} tensors, at most {MAX_ADAPTER_TENSORS} are accepted"
            )


def read_tensor(file: SafetensorsFile, entry: Entry) -> Tensor:
    """One tensor: its bytes are read once, hashed, and checked."""
    raw = file.read(entry)
    digest = hashlib.sha256(raw.data).hexdigest()
    data = raw.view(entry.dtype.storage).reshape(entry.shape)
    if data.size and not is_finite(data, entry.dtype):
        raise not_finite(entry.name, f"tensor {entry.name} holds NaN or infinity, expected finite numbers")
    data.flags.writeable = False
    return Tensor(entry.name, entry.dtype, entry.shape, data, digest)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the folder's tensors; raises where there are none, or pickles, or an ambiguity."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if _mode(single) and _mode(index):
        raise malformed(f"{folder.name} holds both {WEIGHTS_FILE} and {INDEX_FILE}; keep the one that counts")
    if _mode(single):
        return [single]
    if _mode(index):
        names = sorted(set(_weight_map(index).values()))
        if len(names) > MAX_ADAPTER_SHARDS:
            raise too_large(f"{index.name} names {len(names)} files, at most {MAX_ADAPTER_SHARDS} are read")
        return [folder / name for name in names]
    for name in PICKLE_FILES:
        if _mode(folder / name):
            raise pickled(f"{folder.name} holds {name}, a pickle, and no {WEIGHTS_FILE}; {PICKLE_ADVICE}")
    raise missing_source(f"{WEIGHTS_FILE} is not in {folder}; save the adapter again with save_pretrained")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        record = _json_file(index)
    except JsonError as error:
        raise malformed(f"{index.name} {error}") from None
    weight_map = record.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise malformed(f"{index.name} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise malformed(
                f"{index.name} sends tensor {show(tensor)} to {show(name)}, expected a .safetensors file "
                "beside it"
            )
    return weight_map


def _check_index(folder: Path, files: list[SafetensorsFile]) -> None:
    """Every tensor is where the index says, and nowhere else."""
    seen: dict[str, str] = {}
    for file in files:
        for name in file.entries:
            if name in seen:
                raise malformed(f"tensor {name} lies in {seen[name]} and in {file.path.name}")
            seen[name] = file.path.name
    if files[0].path.name == WEIGHTS_FILE:
        return
    weight_map = _weight_map(folder / INDEX_FILE)
    for name in sorted(weight_map.keys() | seen.keys()):
        if weight_map.get(name) != seen.get(name):
            raise malformed(
                f"tensor {show(name)} is in {seen.get(name, 'no file')}, the index says "
                f"{show(weight_map[name]) if name in weight_map else 'nothing'}"
            )
