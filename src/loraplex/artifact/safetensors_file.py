"""safetensors, read strictly: the header is checked completely before a byte of data is touched.

Owns the file format: header length, strict JSON, known element types, offsets that cover the data once,
without gaps, overlaps or trailing bytes; the index of a sharded file. Tensor bytes are read into memory of
our own, so what is hashed is what is converted, even when the file changes under us. Never opens a pickle.

Specification: 0x0C (malformed input fails closed).
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from loraplex.artifact.jsontext import JsonError, parse_object, show
from loraplex.artifact.lookalikes import HEAD_BYTES, lookalike
from loraplex.artifact.refuse import bad_dtype, malformed, missing_source, pickled, too_large
from loraplex.artifact.tensors import Dtype
from loraplex.core.errors import CallerError
from loraplex.core.limits import (
    MAX_ADAPTER_BYTES,
    MAX_ADAPTER_TENSORS,
    MAX_SAFETENSORS_HEADER_BYTES,
    MAX_TENSOR_DIMS,
    MAX_TENSOR_NAME_CHARS,
)

Bytes = npt.NDArray[np.uint8]

PICKLE_ADVICE: Final = "load it with PEFT in a place you trust and save it again with save_pretrained"
_LENGTH_BYTES: Final = 8
_ITEMSIZE: Final[dict[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_SERVED: Final[dict[str, Dtype]] = {"F32": Dtype.FLOAT32, "F16": Dtype.FLOAT16, "BF16": Dtype.BFLOAT16}
_PICKLE_MAGICS: Final = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: name, element type, shape, and the bytes [offset, offset + nbytes) of
    its file.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file whose header was checked. Close it, or use it as a context manager.

    entries: all tensors by name, in file order. size: bytes of the file. max_bytes: an adapter's limit when
    None.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path = path
        self._max_bytes = MAX_ADAPTER_BYTES if max_bytes is None else max_bytes
        self._fd = open_regular(path)
        try:
            self.size = os.fstat(self._fd).st_size
            self.entries = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        os.close(self._fd)

    def read(self, entry: Entry) -> Bytes:
        """The bytes of a tensor, in memory of our own. Raises `adapter_file_malformed` when the file
        shrank.
        """
        return self._read_exactly(entry.offset, entry.nbytes)

    def _read_exactly(self, offset: int, size: int) -> Bytes:
        out = np.empty(size, dtype=np.uint8)
        view = out.data
        done = 0
        while done < size:
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise malformed(f"{self.path.name} ended at byte {offset + done} while it was read")
            done += got
        return out

    def _read_header(self) -> dict[str, Entry]:
        name = self.path.name
        head = bytes(self._read_exactly(0, min(self.size, HEAD_BYTES)))
        if len(head) < _LENGTH_BYTES:
            raise _no_header(
                name, head, f"it has {self.size} bytes, a safetensors file has at least {_LENGTH_BYTES}"
            )
        if self.size > self._max_bytes:
            raise too_large(f"{name} has {self.size} bytes, at most {self._max_bytes} are accepted")
        (length,) = struct.unpack("<Q", head[:_LENGTH_BYTES])
        limit = min(MAX_SAFETENSORS_HEADER_BYTES, self.size - _LENGTH_BYTES)
        if length > limit:
            raise _no_header(name, head, _no_length(head[:_LENGTH_BYTES], length, limit))
        text = bytes(self._read_exactly(_LENGTH_BYTES, length))
        if not text.startswith(b"{"):
            start = f"starts with {show(text[:1].decode('latin-1'))}" if text else "is empty"
            raise _no_header(name, head, f"its header {start}, expected an opening brace")
        try:
            header = parse_object(text)
        except JsonError as error:
            raise malformed(f"{name}: the header cannot be read, {error}") from None
        return check_header(header, _LENGTH_BYTES + length, self.size, name)


def _no_header(file: str, head: bytes, why: str) -> CallerError:
    """The refusal of a file without header. A pickle is only looked for here: a header's length can look like
    one.
    """
    if head.startswith(_PICKLE_MAGICS):
        return pickled(f"{file} is a pickle or zip archive, not safetensors; {PICKLE_ADVICE}")
    known = lookalike(head)
    return malformed(f"{file} is not safetensors: {why}" if known is None else f"{file} is {known}")


def _no_length(start: bytes, length: int, limit: int) -> str:
    """Why the first eight bytes cannot be a header's length; a text is shown as such."""
    if start.isascii() and start.decode("latin-1").isprintable():
        return f"it begins with the text {start.decode()!r}, a safetensors file with its header's length"
    return f"it declares a header of {length} bytes, at most {limit} are possible; fetch or save it again"


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; links are followed, devices and pipes refused."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise missing_source(
            f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise malformed(f"{path.name} is not a regular file")
    return fd


def check_header(header: dict[str, Any], data_start: int, file_size: int, file: str) -> dict[str, Entry]:
    """Entries of a decoded header, after every check; raises `adapter_file_malformed` and its kin."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise malformed(f"{file}: __metadata__ must be an object of strings")
    if len(header) > MAX_ADAPTER_TENSORS:
        raise too_large(f"{file} holds {len(header)} tensors, at most {MAX_ADAPTER_TENSORS} are accepted")
    if not header:
        raise malformed(f"{file} holds no tensor")
    entries = [_entry(file, name, record, data_start) for name, record in header.items()]
    _check_coverage(file, entries, data_start, file_size)
    return {entry.name: entry for entry in entries}


def _entry(file: str, name: str, record: Any, data_start: int) -> Entry:
    if len(name) > MAX_TENSOR_NAME_CHARS:
        raise malformed(
            f"{file}: a tensor name has {len(name)} characters, at most {MAX_TENSOR_NAME_CHARS} are read"
        )
    if not name.isprintable():
        raise malformed(f"{file}: the tensor name {name!a} holds characters that cannot be printed")
    if not isinstance(record, dict) or set(record) != {"dtype", "shape", "data_offsets"}:
        raise malformed(f"{file}: tensor {name} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEMSIZE:
        raise malformed(f"{file}: tensor {name} has the unknown dtype {show(dtype)}")
    if not _naturals(shape):
        raise malformed(
            f"{file}: tensor {name} has the shape {show(shape)}, expected a list of integers from 0"
        )
    if len(shape) > MAX_TENSOR_DIMS or max(shape, default=0) > MAX_ADAPTER_BYTES:
        raise malformed(
            f"{file}: tensor {name} has {len(shape)} dimensions, the largest of {max(shape)}; at most "
            f"{MAX_TENSOR_DIMS} of {MAX_ADAPTER_BYTES} are read"
        )
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise malformed(f"{file}: tensor {name} has the data_offsets {show(offsets)}, expected [begin, end]")
    nbytes = _ITEMSIZE[dtype]
    for size in shape:
        nbytes *= size
    if nbytes != offsets[1] - offsets[0]:
        raise malformed(
            f"{file}: tensor {name} of shape {show(shape)} and dtype {dtype} needs {nbytes} bytes, "
            f"its offsets span {offsets[1] - offsets[0]}"
        )
    if dtype not in _SERVED:
        raise bad_dtype(name, f"tensor {name} has dtype {dtype}, expected F32, F16 or BF16")
    return Entry(name, _SERVED[dtype], tuple(shape), data_start + offsets[0], nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(file: str, entries: Sequence[Entry], data_start: int, file_size: int) -> None:
    """The tensors tile the data section exactly."""
    end = data_start
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != end:
            kind = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise malformed(
                f"{file}: tensor {entry.name} starts at data byte {entry.offset - data_start} and {kind}, "
                f"expected {end - data_start}"
            )
        end += entry.nbytes
    if end != file_size:
        more = file_size - end
        kind = (
            f"{more} bytes follow the last tensor"
            if more > 0
            else f"{-more} bytes of the last tensor are missing"
        )
        raise malformed(f"{file}: {kind}")
