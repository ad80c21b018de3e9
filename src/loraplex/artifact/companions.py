"""What lies beside an adapter's weights and says how its text is made: chat template, end tokens, added
tokens.

Owns reading these files, of which none is needed; each is bounded and read as data. Decides nothing about
their use (`text.codecs` does). No digest covers them: they change what a request asks, never what an artifact
computes. Specification: rulings "Text".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.artifact.lookalikes import lookalike
from loraplex.artifact.refuse import malformed
from loraplex.artifact.safetensors_file import open_regular
from loraplex.core.limits import (
    MAX_ADAPTER_CONFIG_BYTES,
    MAX_ADDED_TOKEN_CHARS,
    MAX_ADDED_TOKENS,
    MAX_CHAT_TEMPLATE_CHARS,
    MAX_TOKENIZER_BYTES,
)

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_JSON: Final = "chat_template.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
GENERATION_FILE: Final = "generation_config.json"
ADDED_FILE: Final = "added_tokens.json"
COMPANION_FILES: Final = (
    TEMPLATE_FILE,
    TEMPLATE_JSON,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    GENERATION_FILE,
    ADDED_FILE,
)
SPECIAL_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class Companions:
    """What a folder's files say about text. Everything is empty where they say nothing.

    chat_template: its Jinja source. eos_token_ids: of generation_config.json, ascending. special: (role,
    text) of the special tokens. added: (id, text) of the tokens beside the vocabulary's own, by id.
    """

    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    special: tuple[tuple[str, str], ...] = ()
    added: tuple[tuple[int, str], ...] = ()

    @property
    def eos_token(self) -> str | None:
        """Text of the end token."""
        return dict(self.special).get("eos_token")


NO_COMPANIONS: Final = Companions()


def read_companions(folder: Path) -> Companions:
    """The companions in a folder; raises `adapter_file_malformed` for a file that is there and cannot be
    read.
    """
    config = _object(folder / TOKENIZER_CONFIG)
    special = tuple(
        (role, text) for role in SPECIAL_ROLES if (text := token_text(config.get(role))) is not None
    )
    return Companions(
        chat_template=_template(folder, config),
        eos_token_ids=_ends(folder),
        special=special,
        added=_added(folder, config),
    )


def token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    data = _bytes(folder / TEMPLATE_FILE, 4 * MAX_CHAT_TEMPLATE_CHARS)
    if data is not None:
        try:
            return _short(data.decode("utf-8"), TEMPLATE_FILE)
        except UnicodeDecodeError as error:
            raise malformed(f"{TEMPLATE_FILE} is not UTF-8 at byte {error.start}") from None
    for name, record in ((TOKENIZER_CONFIG, config), (TEMPLATE_JSON, _object(folder / TEMPLATE_JSON))):
        value = record.get("chat_template")
        if isinstance(value, list):
            named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
            value = named[0].get("template") if named else None
        if isinstance(value, str):
            return _short(value, name)
    return None


def _short(template: str, name: str) -> str:
    if len(template) > MAX_CHAT_TEMPLATE_CHARS:
        raise malformed(
            f"{name} holds a chat template of {len(template)} characters, at most {MAX_CHAT_TEMPLATE_CHARS} "
            "are read"
        )
    return template


def _ends(folder: Path) -> tuple[int, ...]:
    value = _object(folder / GENERATION_FILE).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_ADDED_TOKENS or not all(type(item) is int and item >= 0 for item in ids):
        raise malformed(
            f"{GENERATION_FILE} has an eos_token_id that is neither a token id nor a list of them"
        )
    return tuple(sorted(set(ids)))


def _added(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[int, str], ...]:
    """From the first of the three places that writes them down."""
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        pairs = [
            (int(k), token_text(v)) for k, v in decoder.items() if k.isascii() and k.isdigit() and len(k) < 10
        ]
        return _checked(pairs, len(decoder), TOKENIZER_CONFIG)
    beside = _object(folder / ADDED_FILE)
    if beside:
        return _checked([(v, k) for k, v in beside.items()], len(beside), ADDED_FILE)
    tokens = _object(folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES).get("added_tokens")
    items = [item for item in tokens if isinstance(item, dict)] if isinstance(tokens, list) else []
    return _checked([(item.get("id"), token_text(item)) for item in items], len(tokens or ()), TOKENIZER_FILE)


def _checked(pairs: Iterable[tuple[Any, Any]], count: int, name: str) -> tuple[tuple[int, str], ...]:
    found = [
        (index, text)
        for index, text in pairs
        if type(index) is int and isinstance(text, str) and 0 < len(text) <= MAX_ADDED_TOKEN_CHARS
    ]
    good = len(found) == count <= MAX_ADDED_TOKENS and all(index >= 0 for index, _ in found)
    if not good or len({index for index, _ in found}) != count or len({text for _, text in found}) != count:
        raise malformed(
            f"{name} must give each added token an id and a text of its own, of at most "
            f"{MAX_ADDED_TOKEN_CHARS} "
            f"characters, and at most {MAX_ADDED_TOKENS} of them"
        )
    return tuple(sorted(found))


def _object(path: Path, limit: int = MAX_ADAPTER_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    data = _bytes(path, limit)
    if data is None:
        return {}
    known = lookalike(data)
    if known is not None:
        raise malformed(f"{path.name} is {known}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise malformed(f"{path.name} holds no JSON object")
    return value


def _bytes(path: Path, limit: int) -> bytes | None:
    if not os.path.lexists(path):
        return None
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise malformed(f"{path.name} has {size} bytes, at most {limit} are read")
        return os.pread(fd, limit, 0)
    finally:
        os.close(fd)
