"""What lies beside an adapter's weights and says how its text is made: chat template, end tokens, added
tokens, vocabulary.

Owns reading these files, of which none is needed; each is bounded and read as data, and which one counts is
as in transformers. Decides nothing about their use (`text.codecs` does). No digest covers them: they change
what a request asks, never what an artifact computes. Specification: rulings "Text".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.artifact.jsontext import MAX_VALUES, show
from loraplex.artifact.lookalikes import lookalike
from loraplex.artifact.refuse import malformed
from loraplex.artifact.safetensors_file import open_regular
from loraplex.core.limits import (
    MAX_ADAPTER_CONFIG_BYTES,
    MAX_ADDED_TOKEN_CHARS,
    MAX_ADDED_TOKENS,
    MAX_CHAT_TEMPLATE_CHARS,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_VALUES,
)

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_JSON: Final = "chat_template.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
SPECIAL_FILE: Final = "special_tokens_map.json"
GENERATION_FILE: Final = "generation_config.json"
ADDED_FILE: Final = "added_tokens.json"
COMPANION_FILES: Final = (
    TEMPLATE_FILE,
    TEMPLATE_JSON,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    SPECIAL_FILE,
    GENERATION_FILE,
    ADDED_FILE,
)
SPECIAL_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_EXTRA_ROLES: Final = ("additional_special_tokens", "extra_special_tokens")
_OTHERS_KEPT: Final = 8
TokenId = Callable[[str], int | None]
"""The id of a token of the base's tokenizer by its text, None for a text that is no token there."""


@dataclass(frozen=True, slots=True, order=True)
class AddedText:
    """A token beside the vocabulary's own. special: it leaves no text in an answer. The rest: how it is found
    in a text, as tokenizers have it.
    """

    index: int
    text: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class Companions:
    """What a folder's files say about text. Everything is empty where they say nothing.

    chat_template: its Jinja source. eos_token_ids: of generation_config.json, ascending. special: (role,
    text) of the special tokens. added: the tokens beside the vocabulary's own, by id. others: (id, text) of
    the first tokens of the vocabulary itself that the base's does not have there.
    """

    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    special: tuple[tuple[str, str], ...] = ()
    added: tuple[AddedText, ...] = ()
    others: tuple[tuple[int, str], ...] = ()

    @property
    def eos_token(self) -> str | None:
        """Text of the end token."""
        return dict(self.special).get("eos_token")


NO_COMPANIONS: Final = Companions()


def read_companions(folder: Path, token_id: TokenId | None = None) -> Companions:
    """The companions in a folder. token_id: of the base, None says nothing of the vocabulary.

    Raises `adapter_file_malformed` for a file that is there and cannot be read.
    """
    config, beside = _object(folder / TOKENIZER_CONFIG), _object(folder / SPECIAL_FILE)
    # A folder that tells of its added tokens has its roles in the configuration; an older one beside it.
    if "added_tokens_decoder" in config:
        roles = {**beside, **{name: value for name, value in config.items() if value is not None}}
    else:
        roles = {**config, **beside}
    special = tuple(
        (role, text) for role in SPECIAL_ROLES if (text := _role_text(role, roles.get(role))) is not None
    )
    extra = [token_text(item) for name in _EXTRA_ROLES for item in _items(roles.get(name))]
    tokenizer = _tokenizer(folder / TOKENIZER_FILE)
    return Companions(
        chat_template=_template(folder, config),
        eos_token_ids=_ends(folder),
        special=special,
        added=_added(folder, config, tokenizer, {*(text for _, text in special), *extra}),
        others=() if token_id is None else _others(tokenizer, token_id),
    )


def token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _role_text(role: str, value: Any) -> str | None:
    text = token_text(value)
    if text is None and value is not None:
        raise malformed(f"{TOKENIZER_CONFIG} or {SPECIAL_FILE} has a {role} that is no token: {show(value)}")
    return None if text is None else _encodable(text, f"{TOKENIZER_CONFIG} or {SPECIAL_FILE} has the {role}")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _encodable(text: str, what: str) -> str:
    """JSON can spell half of a surrogate pair, which no UTF-8 carries."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise malformed(f"{what} {text!a:.80}, which holds half of a surrogate pair") from None
    return text


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    data = _bytes(folder / TEMPLATE_FILE, 4 * MAX_CHAT_TEMPLATE_CHARS)
    if data is not None:
        try:
            return _short(data.decode("utf-8"), TEMPLATE_FILE)
        except UnicodeDecodeError as error:
            raise malformed(f"{TEMPLATE_FILE} is not UTF-8 at byte {error.start}") from None
    for name, record in ((TOKENIZER_CONFIG, config), (TEMPLATE_JSON, _object(folder / TEMPLATE_JSON))):
        value = record.get("chat_template")
        if isinstance(value, list) and value:
            named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
            value = named[0].get("template") if named else value
        if isinstance(value, str):
            return _short(value, name)
        if value not in (None, []):
            raise malformed(
                f"{name} has a chat_template that is neither a text nor a list with one named default: "
                f"{show(value)}"
            )
    return None


def _short(template: str, name: str) -> str:
    if len(template) > MAX_CHAT_TEMPLATE_CHARS:
        raise malformed(
            f"{name} holds a chat template of {len(template)} characters, at most {MAX_CHAT_TEMPLATE_CHARS} "
            "are read"
        )
    return _encodable(template, f"{name} has the chat template")


def _ends(folder: Path) -> tuple[int, ...]:
    value = _object(folder / GENERATION_FILE).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_ADDED_TOKENS or not all(map(_is_id, ids)):
        raise malformed(
            f"{GENERATION_FILE} has an eos_token_id that is neither a token id nor a list of them"
        )
    return tuple(sorted(set(ids)))


def _added(
    folder: Path, config: Mapping[str, Any], tokenizer: _Tokenizer, special: Collection[str | None]
) -> tuple[AddedText, ...]:
    """Those of the tokenizer, and before them those of the configuration, or else of the file beside it.

    special: texts that have a role, and are special whatever is said of them.
    """
    decoder, listed = config.get("added_tokens_decoder"), tokenizer.added_tokens
    beside = {} if isinstance(decoder, dict) else _object(folder / ADDED_FILE)
    groups = (
        (TOKENIZER_CONFIG, [(_index(k), v) for k, v in decoder.items()] if isinstance(decoder, dict) else []),
        (ADDED_FILE, [(v, {"content": k}) for k, v in beside.items()]),
        (TOKENIZER_FILE, [(_field(item, "id"), item) for item in listed or ()]),
    )
    found: dict[int, AddedText] = {}
    texts: dict[str, int] = {}
    for name, pairs in groups:
        own: set[int] = set()
        for index, value in pairs:
            token = _token(index, value, special, name)
            if (
                token is None
                or token.index in own
                or texts.setdefault(token.text, token.index) != token.index
                or found.setdefault(token.index, token).text != token.text
                or len(found) > MAX_ADDED_TOKENS
            ):
                raise malformed(
                    f"{name} must give each added token an id and a text of its own, of at most "
                    f"{MAX_ADDED_TOKEN_CHARS} characters, and at most {MAX_ADDED_TOKENS} of them"
                )
            own.add(token.index)
    return tuple(sorted(found.values()))


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _index(key: str) -> int | None:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 10 else None


def _field(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else None


def _token(index: Any, value: Any, roles: Collection[str | None], name: str) -> AddedText | None:
    """An added token as a file writes it; what it does not say is as the library has it. None for
    what is none.
    """
    text = token_text(value)
    if not _is_id(index) or text is None or not 0 < len(text) <= MAX_ADDED_TOKEN_CHARS:
        return None
    special = _field(value, "special") is True or text in roles
    return AddedText(
        index,
        _encodable(text, f"{name} has the added token"),
        special=special,
        normalized=not special if _field(value, "normalized") is None else value["normalized"] is True,
        lstrip=_field(value, "lstrip") is True,
        rstrip=_field(value, "rstrip") is True,
        single_word=_field(value, "single_word") is True,
    )


def _others(tokenizer: _Tokenizer, token_id: TokenId) -> tuple[tuple[int, str], ...]:
    """Tokens of the vocabulary, of which the base's tokenizer knows none, or another, by their id."""
    vocabulary = None if tokenizer.model is None else tokenizer.model.vocab
    if isinstance(vocabulary, list):  # a unigram's, by rank
        pairs = [(index, text) for index, (text, _) in enumerate(vocabulary)]
    else:
        pairs = [(index, text) for text, index in (vocabulary or {}).items()]
    others = sorted((index, text) for index, text in pairs if token_id(text) != index)
    return tuple(others[:_OTHERS_KEPT])


class _Model(msgspec.Struct):
    """What of a tokenizer's model is read."""

    vocab: dict[str, int] | list[tuple[str, float]] | None = None


class _Tokenizer(msgspec.Struct):
    """What of a tokenizer.json is read; the rest, its merges before all, is passed over."""

    added_tokens: list[dict[str, Any]] | None = None
    model: _Model | None = None


def _tokenizer(path: Path) -> _Tokenizer:
    data = _json(path, MAX_TOKENIZER_BYTES, MAX_TOKENIZER_VALUES)
    if data is None:
        return _Tokenizer()
    try:
        return msgspec.json.decode(data, type=_Tokenizer)
    except (ValueError, RecursionError) as error:
        raise malformed(f"{path.name} is no tokenizer: {error}") from None


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    data = _json(path, MAX_ADAPTER_CONFIG_BYTES, MAX_VALUES)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise malformed(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise malformed(f"{path.name} holds no JSON object")
    return value


def _json(path: Path, limit: int, values: int) -> bytes | None:
    """The bytes of a file that may be JSON of so many values; None where there is none."""
    data = _bytes(path, limit)
    if data is None:
        return None
    known = lookalike(data)
    if known is not None:
        raise malformed(f"{path.name} is {known}")
    commas = data.count(b",")
    if commas > values:
        raise malformed(f"{path.name} has {commas} commas, at most {values} are read")
    return data


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
