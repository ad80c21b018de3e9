"""What a Python caller may pass to `LLM`, decoded as strictly as a request body.

Whatever has another type is refused by name with a typed error before anything is submitted; nothing is
converted that could mean something else: 1.7, True and "3" are no token ids. Arrays of integers are, by their
`tolist`.

Specification: interface "Python".
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import msgspec

from loraplex.catalog.records import TextWord
from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ports import EventSink
from loraplex.core.request import SamplingParams
from loraplex.process.local import NullSink

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""
_FIELD: Final = re.compile(r"at `\$\.([^`]*)`|field `([^`]*)`")
_SHOWN_CHARS: Final = 80


def _refuse(param: str, expectation: str, value: object) -> CallerError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    return CallerError(ErrorCode.INVALID_REQUEST, f"{param} must be {expectation}, got {shown}", param=param)


def engine_config(own: Mapping[str, Any], options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that `LLM`'s arguments make. own: its fixed ones; options: further keywords of the
    caller.

    Raises `config_invalid` with the option at fault.
    """
    for name in sorted(own.keys() & options.keys()):
        raise CallerError(ErrorCode.CONFIG_INVALID, f"{name} is not an option; leave it out", param=name)
    try:
        return msgspec.convert({**own, **options}, EngineConfig)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        param = None if found is None else found[1] or found[2]
        raise CallerError(ErrorCode.CONFIG_INVALID, f"an option is refused: {error}", param=param) from error


def read_prompts(prompts: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids. Raises `invalid_request`."""
    prompts = _named(_plain(prompts))
    if isinstance(prompts, str):
        return [_text(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise _refuse("prompts", "a text, token ids, or a list of these", prompts)
    if prompts and all(_is_token(item) for item in prompts):
        return [_tokens(prompts)]
    given = [_named(_plain(item)) for item in prompts]
    return [_text(item) if isinstance(item, str) else _tokens(item) for item in given]


def _named(prompt: Any) -> Any:
    """What an object with one prompt holds."""
    if not isinstance(prompt, Mapping):
        return prompt
    if set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
        raise _refuse("prompts", "an object with prompt or prompt_token_ids", prompt)
    if "prompt" in prompt:
        if not isinstance(prompt["prompt"], str):
            raise _refuse("prompts", "an object whose prompt is a text", prompt)
        return _text(prompt["prompt"])
    return _tokens(_plain(prompt["prompt_token_ids"]))


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise `token_out_of_range` unless every id lies in the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise CallerError(
                ErrorCode.TOKEN_OUT_OF_RANGE,
                f"token id {token} lies outside the vocabulary of {vocab_size}",
                param="prompts",
            )


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists of Python numbers."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _refuse("prompts", "texts that UTF-8 can write", value) from error
    return value


def read_model(model: Any) -> Path:
    """The folder of a model. Raises `config_invalid`."""
    if not isinstance(model, (str, Path)) or not _names_a_file(model):
        raise CallerError(ErrorCode.CONFIG_INVALID, f"model must be a path, got {model!r:.80}", param="model")
    return Path(model)


def _names_a_file(path: str | Path) -> bool:
    """Whether the system could look for it."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _is_token(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and not hasattr(value, "__len__")


def _tokens(value: Any) -> list[int]:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, (bytes, bytearray))
        or not all(map(_is_token, value))
    ):
        raise _refuse("prompts", "texts or lists of integer token ids", value)
    return [operator.index(token) for token in value]


def read_names(adapters: Any, count: int) -> list[str | None]:
    """The adapter of each prompt, None for the base; one name stands for all. Raises `invalid_request`."""
    return _each("adapters", adapters, str, count, "names of adapters or None for the base")


def read_sampling(sampling: Any, count: int) -> list[SamplingParams]:
    """The parameters of each prompt; one stands for all, None for the defaults. Raises `invalid_request`."""
    given = SamplingParams() if sampling is None else sampling
    read = _each("sampling", given, SamplingParams, count, "SamplingParams")
    return [SamplingParams() if item is None else item for item in read]


def _each(what: str, value: Any, kind: type[T], count: int, expectation: str) -> list[T | None]:
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or not all(item is None or isinstance(item, kind) for item in value):
        raise _refuse(what, expectation, value)
    if len(value) != count:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"{len(value)} {what} were given for {count} prompts", param=what
        )
    return list(value)


def read_adapters(adapters: Any) -> Mapping[str, Any]:
    """The adapters to begin with: a mapping, or nothing. Raises `invalid_request`."""
    if adapters is not None and not isinstance(adapters, Mapping):
        raise _refuse("adapters", "a mapping of names to sources", adapters)
    return adapters or {}


def read_registration(alias: Any, source: Any = "") -> tuple[str, str | Path]:
    """An alias and a source, of the right types; what they say is checked where they are used."""
    if not isinstance(alias, str):
        raise _refuse("alias", "a text", alias)
    if not isinstance(source, (str, Path)) or not _names_a_file(source):
        raise _refuse("source", "a path or an address", source)
    return alias, source


def read_text(text: Any) -> TextWord | None:
    """Whose text an adapter's requests use. Raises `invalid_request`."""
    if text is not None and text not in get_args(TextWord):
        raise _refuse("text", '"adapter", "base" or None', text)
    word: TextWord | None = text
    return word


def read_grouping(grouping: Any) -> str | None:
    """How an offline batch is grouped. Raises `invalid_request`."""
    if grouping is None or grouping == "pets":
        return None if grouping is None else "pets"
    raise _refuse("grouping", '"pets" or None', grouping)


def read_count(name: str, value: Any) -> int | None:
    """An integer or None. Raises `invalid_request`."""
    if value is not None and not _is_token(value):
        raise _refuse(name, "an integer", value)
    return None if value is None else operator.index(value)


def read_number(name: str, value: Any, low: float, high: float) -> float | None:
    """A number from `low` to `high`, or None. Raises `invalid_request`."""
    if value is None:
        return None
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not low <= value <= high:
        raise _refuse(name, f"a number from {low:g} to {high:g}", value)
    return float(value)


def read_sink(events: Any) -> EventSink:
    """Where the engine's events go; nowhere for None. Raises `invalid_request`."""
    if events is None:
        return NullSink()
    if not callable(getattr(events, "emit", None)):
        raise _refuse("events", "an event sink, which has a method `emit`", events)
    sink: EventSink = events
    return sink
