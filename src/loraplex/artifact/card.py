"""What a card, the README.md beside a model's or an adapter's files, says of its use.

Three keys of the card's front matter (between two lines `---`), each a JSON string on one line:
`tool_format`, how calls of tools are written, and of an activated adapter `alora_invocation`, the invocation
as text, and `alora_chat_suffix`, with what a conversation ends in place of the chat template's own opening of
an answer. Everything else in a card is for people. Never part of an adapter's identity: the same artifact
under another card is the same function of the same tokens.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from loraplex.artifact.refuse import bad_config
from loraplex.artifact.safetensors_file import open_regular
from loraplex.core.tool_formats import TOOL_FORMATS

CARD_FILE: Final = "README.md"
MAX_CARD_BYTES: Final = 1 << 20
MAX_TEXT_CHARS: Final = 4096
_KEY: Final = re.compile(r"(alora_\w*|tool_format)[ \t]*:[ \t]*(.*?)[ \t]*")
_TOOL_KEY: Final = "tool_format"
_FENCE: Final = "---"
_FIELDS: Final = {"alora_invocation": "invocation", "alora_chat_suffix": "chat_suffix"}


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """invocation: as text. chat_suffix: text with which a conversation ends. tool_format: how calls of tools
    are written. None: the card does not say.
    """

    invocation: str | None = None
    chat_suffix: str | None = None
    tool_format: str | None = None

    @property
    def texts(self) -> dict[str, str]:
        """What is given of an invocation, by the card's keys."""
        given = {key: getattr(self, field) for key, field in _FIELDS.items()}
        return {key: text for key, text in given.items() if text is not None}


def read_card(folder: Path, *, activated: bool) -> Card | None:
    """What the card of an adapter folder says; None where there is no card or it says nothing.

    activated: whether the adapter has an invocation. Raises `adapter_config_invalid` for a key that is
    unknown, twice there, no JSON string, or on the card of an adapter that is always on.
    """
    path = folder / CARD_FILE
    if not os.path.lexists(path):
        return None
    descriptor = open_regular(path)
    try:
        data = os.pread(descriptor, MAX_CARD_BYTES, 0)
    finally:
        os.close(descriptor)
    given: dict[str, str] = {}
    for line in _front_matter(data.decode("utf-8", "replace").splitlines()):
        found = _KEY.fullmatch(line)
        if found is None:
            continue
        key, value = found.groups()
        if key == _TOOL_KEY and _TOOL_KEY not in given:
            given[key] = _tool_format(value)
            continue
        if key not in _FIELDS or _FIELDS[key] in given:
            raise bad_config(
                key, f"the card has {key} twice, or it is none of {', '.join([*_FIELDS, _TOOL_KEY])}"
            )
        if not activated:
            raise bad_config(
                key, f"the card has {key}, and adapter_config.json has no alora_invocation_tokens"
            )
        given[_FIELDS[key]] = _text(key, value)
    return Card(**given) if given else None


def _front_matter(lines: list[str]) -> list[str]:
    if not lines or lines[0].rstrip() != _FENCE:
        return []
    end = next((index for index, line in enumerate(lines) if index and line.rstrip() == _FENCE), 0)
    return lines[1:end]


def _tool_format(value: str) -> str:
    named = _text(_TOOL_KEY, value)
    if named not in TOOL_FORMATS:
        raise bad_config(
            _TOOL_KEY,
            f"{_TOOL_KEY} of the card is {named[:80]!r}, expected one of {', '.join(TOOL_FORMATS)}",
        )
    return named


def _text(key: str, value: str) -> str:
    try:
        text = json.loads(value)
    except ValueError:
        text = None
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT_CHARS:
        raise bad_config(
            key,
            f"{key} of the card is {value[:80]}, expected a JSON string of 1 to {MAX_TEXT_CHARS} characters",
        )
    return text
