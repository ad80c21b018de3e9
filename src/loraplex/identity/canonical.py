"""One text for each value: the serialisation that every digest is taken over.

Sorted keys, UTF-8, no white space; integers, strings, booleans, null, lists and objects with string keys. A
float has no canonical text here: whoever holds one passes its shortest decimal text as a string. No paths, no
addresses. Specification: 0x01G "Identities".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault

Value = None | bool | int | str | Sequence["Value"] | Mapping[str, "Value"]
"""What can be serialised; at run time lists, tuples and dicts of exactly these types."""

DIGEST_CHARS: Final = 64
_HEXADECIMAL: Final = frozenset("0123456789abcdef")


def canonical(value: Value) -> bytes:
    """The canonical bytes of `value`; raises `identity_invalid` for anything that has none."""
    _check(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")


def digest(value: Value) -> str:
    """SHA-256 of the canonical bytes, 64 hexadecimal characters."""
    return hashlib.sha256(canonical(value)).hexdigest()


def check_digest(name: str, value: str) -> str:
    """`value` if it is a digest; raises `identity_invalid` naming `name` otherwise."""
    if type(value) is not str or len(value) != DIGEST_CHARS or not _HEXADECIMAL.issuperset(value):
        raise InternalFault(
            ErrorCode.IDENTITY_INVALID,
            f"{name} is {value!r:.80}, expected {DIGEST_CHARS} hexadecimal characters",
        )
    return value


def _check(value: object, where: str) -> None:
    if value is None or type(value) in (bool, int):  # exact types: an enumeration is not its value
        return
    if type(value) is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID, f"{where} holds a string that is not UTF-8"
            ) from None
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise InternalFault(
                    ErrorCode.IDENTITY_INVALID, f"{where} has the key {key!r}, expected a string"
                )
            _check(key, where)
            _check(item, f"{where}.{key}")
    else:
        raise InternalFault(
            ErrorCode.IDENTITY_INVALID,
            f"{where} holds a {type(value).__name__}, which has no canonical text; pass decimal text for a "
            "float",
        )
