"""What a file is that is not what its name says: the usual accidents of a download, told by the first bytes.

Owns the sentences that say so and what to do. Decides nothing: whoever cannot read a file asks here why.
Specification: 0x0C (malformed input fails closed).
"""

from __future__ import annotations

import re
from typing import Final

HEAD_BYTES: Final = 512
"""What has to be looked at; a Git LFS pointer is shorter."""
_LFS: Final = b"version https://git-lfs"
_LFS_SIZE: Final = re.compile(rb"^size ([0-9]{1,18})$", re.MULTILINE)
_FETCH_AGAIN: Final = "not the file itself; fetch it again and look at what the server answers"
_UNPACK: Final = "not the file itself; unpack it first"
_PREFIXES: Final[tuple[tuple[bytes, str], ...]] = (
    (b"<!doctype html", f"an HTML page, {_FETCH_AGAIN}"),
    (b"<html", f"an HTML page, {_FETCH_AGAIN}"),
    (b"<?xml", f"an XML document, {_FETCH_AGAIN}"),
    (b"<error", f"an XML document, {_FETCH_AGAIN}"),
    (b"gguf", "a GGUF file; give the folder that PEFT saved"),
    (b"\x1f\x8b", f"a gzip archive, {_UNPACK}"),
    (b"\x28\xb5\x2f\xfd", f"a zstd archive, {_UNPACK}"),
    (b"\xfd7zxz\x00", f"an xz archive, {_UNPACK}"),
    (b"\x89hdf", "an HDF5 file; give the safetensors files that PEFT saved"),
)


def lookalike(head: bytes) -> str | None:
    """What a file is by its first `HEAD_BYTES` bytes, with its article and advice; None where nothing is
    known.
    """
    if head.startswith(_LFS):
        size = _LFS_SIZE.search(head[:HEAD_BYTES])
        whole = "the file" if size is None else f"a file of {int(size[1])} bytes"
        return f"a Git LFS pointer to {whole} that was not fetched; run `git lfs pull` where it came from"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    return next((what for prefix, what in _PREFIXES if start.startswith(prefix)), None)
