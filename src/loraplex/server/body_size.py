"""What a body may ask of the decoder, checked before it is decoded.

Making objects of eight megabytes of brackets takes seconds in which nobody else is served. Here a long body
is only walked through, its fields stay bytes, and what they would become is counted from above: refused is
what exceeds a limit for sure. The exact limits are checked on what was decoded.

Specification: interface "HTTP".
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import msgspec
from msgspec import UNSET

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode

_OBJECT: Final = re.compile(rb'\{[ \t\r\n]*"')
"""The beginning of an object. Within a text only at its end: there a quotation mark has a backslash before
it.
"""


@functools.cache
def _outline(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same fields, undecoded."""
    fields = [(field.encode_name, msgspec.Raw, UNSET) for field in msgspec.structs.fields(kind)]
    return msgspec.defstruct(f"{kind.__name__}Outline", fields, frozen=True, forbid_unknown_fields=True)


def check_body(body: bytes, kind: type[msgspec.Struct]) -> None:
    """Refuse a body that would become too many objects. Raises `invalid_request` with the field, and decoding
    errors.
    """
    if len(body) <= limits.SHORT_BODY_BYTES:
        return
    outline = msgspec.json.decode(body, type=_outline(kind))
    for name in outline.__struct_fields__:
        raw = getattr(outline, name)
        if raw is UNSET:
            continue
        match name:
            case "messages" | "input":
                _check_messages(name, bytes(raw))
            case "prompt" | "tokens":
                _check_prompt(bytes(raw))
            case _:
                if len(raw) > limits.MAX_FIELD_BYTES:
                    raise _too_much(name, len(raw), "bytes", limits.MAX_FIELD_BYTES)


def _check_messages(name: str, raw: bytes) -> None:
    """Each object may hold two texts that end in what looks like the beginning of another."""
    most = limits.MAX_MESSAGES + limits.MAX_CONTENT_PARTS
    for count, _ in enumerate(_OBJECT.finditer(raw), 1):
        if count > 3 * most:
            raise _too_much(name, f"more than {most}", "messages and parts", most)


def _check_prompt(raw: bytes) -> None:
    if raw[:1] != b"[":
        return
    # Every text has two marks that are not escaped; a backslash at its end hides one of them.
    marks = raw.count(b'"') - raw.count(b'\\"')
    if marks > 2 * limits.MAX_CHOICES:
        raise _too_much("prompt", f"more than {limits.MAX_CHOICES}", "prompts", limits.MAX_CHOICES)
    if b'"' not in raw:
        lists, ids = raw.count(b"[") - 1, raw.count(b",") + 1
        if lists > limits.MAX_CHOICES:
            raise _too_much("prompt", lists, "prompts", limits.MAX_CHOICES)
        if ids > limits.MAX_PROMPT_TOKENS + limits.MAX_CHOICES:
            raise _too_much("prompt", ids, "token ids", limits.MAX_PROMPT_TOKENS)
    # Stops at the first item of another kind, before there are many.
    form: Any = list[str] if b'"' in raw else list[int | list[int]]
    try:
        msgspec.json.decode(raw, type=form)
    except msgspec.ValidationError as error:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids",
            param="prompt",
        ) from error


def _too_much(name: str, seen: object, what: str, limit: int) -> CallerError:
    return CallerError(
        ErrorCode.INVALID_REQUEST, f"{name} holds {seen} {what}, the limit is {limit}; send less", param=name
    )
