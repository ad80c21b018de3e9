"""Strict JSON: UTF-8, one value, no duplicate names, no NaN, bounded numbers; number texts are kept.

Used for safetensors headers and adapter configurations, which strangers write. Never guesses: what is not JSON is an
error whose text says where.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

MAX_NUMBER_CHARS: Final = 64


class JsonError(ValueError):
    """The text is not strict JSON; the message says why."""


@dataclass(frozen=True, slots=True)
class Decimal64:
    """A JSON number with a fraction or an exponent, as it was written."""

    text: str

    @property
    def value(self) -> float:
        """The nearest float64."""
        return float(self.text)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`: str, int, bool, None, `Decimal64`, list and dict. Raises `JsonError`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_float=_decimal,
            parse_int=_integer,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as error:
        raise JsonError(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise JsonError("it nests too deep") from None
    if "\\u" in text:
        _check_surrogates(value)
    if not isinstance(value, dict):
        raise JsonError(f"it holds a {type(value).__name__}, not an object")
    return value


def _check_surrogates(value: Any) -> None:
    """An escape can spell half of a surrogate pair, which no UTF-8 text can carry."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
            raise JsonError(f"the string {item!a} holds half of a surrogate pair")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise JsonError(f"the name {key!r} occurs twice")
        out[key] = value
    return out


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARS:
        raise JsonError(f"a number has {len(text)} characters, at most {MAX_NUMBER_CHARS} are read")
    return int(text)


def _decimal(text: str) -> Decimal64:
    if len(text) > MAX_NUMBER_CHARS:
        raise JsonError(f"a number has {len(text)} characters, at most {MAX_NUMBER_CHARS} are read")
    return Decimal64(text)


def _constant(text: str) -> Any:
    raise JsonError(f"{text} is not a JSON number")
