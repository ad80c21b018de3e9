"""Strict JSON: UTF-8, one value, no duplicate names, no NaN, bounded numbers; number texts are kept.

Used for safetensors headers and adapter configurations, which strangers write. Never guesses: what is not
JSON is an error whose text says where.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

MAX_NUMBER_CHARS: Final = 64
MAX_DEPTH: Final = 32
"""Levels of lists and objects; nothing that is read here needs ten, and who walks over a value may recurse.
"""
MAX_VALUES: Final = 1 << 19
"""Values of a text, counted by its commas before it is read: five times what `MAX_ADAPTER_TENSORS` entries
have, and decoded in half a second.
"""
_SHOWN_CHARS: Final = 80


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
    commas = data.count(b",")
    if commas > MAX_VALUES:
        raise JsonError(f"it has {commas} commas, at most {MAX_VALUES} are read")
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
    _check_nesting(value, escapes="\\u" in text)
    if not isinstance(value, dict):
        raise JsonError(f"it holds a {type(value).__name__}, not an object")
    return value


def _check_nesting(value: Any, *, escapes: bool) -> None:
    """Bounded depth. escapes: the text has some, and one can spell half of a surrogate pair, which no UTF-8
    carries.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
                if escapes:
                    below.extend(item.keys())
            elif isinstance(item, list):
                below.extend(item)
            elif escapes and isinstance(item, str) and any("\ud800" <= char <= "\udfff" for char in item):
                raise JsonError(f"the string {item[:_SHOWN_CHARS]!a} holds half of a surrogate pair")
        if not below:
            return
        level = below
    raise JsonError(f"it nests deeper than {MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise JsonError(f"the name {json.dumps(key)[:_SHOWN_CHARS]} occurs twice")
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


def show(value: Any) -> str:
    """A decoded value for a message: as JSON writes it, cut short, and in characters that UTF-8 carries."""
    if isinstance(value, Decimal64):
        return value.text
    text = ""
    for part in _WRITER.iterencode(value):
        text += part[: _SHOWN_CHARS + 1]
        if len(text) > _SHOWN_CHARS:
            text = f"{text[:_SHOWN_CHARS]}..."
            break
    return text.encode("utf-8", "backslashreplace").decode()


_WRITER: Final = json.JSONEncoder(ensure_ascii=False, default=lambda number: number.value)
