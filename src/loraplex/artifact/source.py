"""The files of an adapter folder: which ones count, single or sharded, and reading their tensors.

Owns the choice of files. Never follows a name out of the folder, never reads `.bin`, never ignores a shard.
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
from typing import Any, Final

from loraplex.artifact.jsontext import JsonError, parse_object
from loraplex.artifact.refuse import bad_config, malformed, missing_source, not_finite, pickled, too_large
from loraplex.artifact.safetensors_file import PICKLE_ADVICE, Entry, SafetensorsFile, open_regular
from loraplex.artifact.tensors import Tensor, is_finite
from loraplex.artifact.threads import map_threads
from loraplex.core.limits import MAX_ADAPTER_BYTES, MAX_ADAPTER_CONFIG_BYTES, MAX_ADAPTER_TENSORS

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
INDEX_FILE: Final = "adapter_model.safetensors.index.json"
PICKLE_FILES: Final = (
    "adapter_model.bin",
    "adapter_model.bin.index.json",
    "adapter_model.pt",
    "adapter_model.pth",
)

Progress = Callable[[int, int], None]
"""Called with (bytes read and hashed so far, bytes in all); called from several threads, one at a time, rising."""


def read_config(folder: Path) -> dict[str, Any]:
    """The decoded adapter_config.json; raises `adapter_config_invalid` when it is not strict JSON."""
    mode = _mode(folder)
    if not stat.S_ISDIR(mode):
        if stat.S_ISREG(mode) and folder.suffix in {".bin", ".pt", ".pth", ".pkl"}:
            raise pickled(f"{folder.name} is a pickle; {PICKLE_ADVICE}")
        raise missing_source(f"{folder.name or folder} is not an adapter folder")
    path = folder / CONFIG_FILE
    if not _mode(path):
        raise missing_source(f"{CONFIG_FILE} is not in {folder.name}")
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_ADAPTER_CONFIG_BYTES:
            raise bad_config(
                "", f"{CONFIG_FILE} has {size} bytes, at most {MAX_ADAPTER_CONFIG_BYTES} are read"
            )
        data = os.pread(fd, size, 0)
    finally:
        os.close(fd)
    try:
        return parse_object(data)
    except JsonError as error:
        raise bad_config("", f"{CONFIG_FILE} cannot be read: {error}") from None


def _mode(path: Path) -> int:
    """Type and permissions of what `path` leads to; 0 where nothing is there. Raises for what cannot be looked at."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return 0
        raise missing_source(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError:  # a NUL, which no path holds
        return 0


def read_tensors(folder: Path, progress: Progress | None = None) -> dict[str, Tensor]:
    """Every tensor of the folder's weights, read, hashed and checked for finite values, in parallel.

    Returned in the order of their names. Raises what the format checks raise, and `adapter_not_finite`.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in weight_files(folder)]
        work = [(file, entry) for file in files for entry in file.entries.values()]
        _check_index(folder, files)
        total = sum(entry.nbytes for _, entry in work)
        if total > MAX_ADAPTER_BYTES:
            raise too_large(f"the adapter holds {total} bytes, at most {MAX_ADAPTER_BYTES} are accepted")
        if len(work) > MAX_ADAPTER_TENSORS:
            raise too_large(
                f"the adapter holds {len(work)} tensors, at most {MAX_ADAPTER_TENSORS} are accepted"
            )
        done = 0
        lock = threading.Lock()

        def one(item: tuple[SafetensorsFile, Entry]) -> Tensor:
            nonlocal done
            tensor = read_tensor(*item)
            if progress is not None:
                with lock:
                    done += item[1].nbytes
                    progress(done, total)
            return tensor

        tensors = map_threads(one, work, total)
    return {tensor.name: tensor for tensor in sorted(tensors, key=lambda t: t.name)}


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
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    for name in PICKLE_FILES:
        if _mode(folder / name):
            raise pickled(f"{folder.name} holds {name}, a pickle, and no {WEIGHTS_FILE}; {PICKLE_ADVICE}")
    raise missing_source(f"{WEIGHTS_FILE} is not in {folder.name}")


def _weight_map(index: Path) -> dict[str, str]:
    fd = open_regular(index)
    try:
        data = os.pread(fd, MAX_ADAPTER_CONFIG_BYTES + 1, 0)
    finally:
        os.close(fd)
    if len(data) > MAX_ADAPTER_CONFIG_BYTES:
        raise malformed(f"{index.name} is larger than {MAX_ADAPTER_CONFIG_BYTES} bytes")
    try:
        record = parse_object(data)
    except JsonError as error:
        raise malformed(f"{index.name} cannot be read: {error}") from None
    weight_map = record.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise malformed(f"{index.name} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise malformed(
                f"{index.name} sends tensor {tensor} to {name!r}, expected a .safetensors file beside it"
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
                f"tensor {name} is in {seen.get(name, 'no file')}, the index says {weight_map.get(name, 'nothing')}"
            )
