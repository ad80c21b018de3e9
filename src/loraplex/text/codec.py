"""Text and token ids: tokenise, apply the chat template, decode.

Lives in client processes; the engine sees ids only. Never imports torch. A folder without tokenizer.json has
no codec and serves token ids.

Specification: rulings "Text".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final, Self

from tokenizers import AddedToken, Tokenizer

from loraplex.artifact.card import read_card
from loraplex.artifact.companions import SPECIAL_ROLES, AddedText, Companions, token_text
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.tools.tool_types import Message
from loraplex.text.tools.tool_use import ToolUse, messages_for

SHORT_TEXT_CHARS: Final = 4096
"""Texts up to here are tokenised in a few milliseconds; longer ones belong into a thread."""


def _bytes_of_characters() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return {**table, **{chr(256 + index): byte for index, byte in enumerate(others)}}


_BYTE_OF: Final = _bytes_of_characters()


def _takes_spaces(token: AddedText) -> bool:
    return token.lstrip or token.rstrip


class TextCodec:
    """A tokenizer with its end-of-sequence set and, where the model has one, its chat template.

    eos_token_ids: ids that end a sequence. vocab_size: ids that the tokenizer knows, added ones included.
    hidden: texts of the tokens that leave none in an answer, by id: special ones and those that end a
    sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Iterable[int],
        bos_token: str | None,
        template: ChatTemplate | None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        """special: texts of the special tokens, by role; the beginning alone where it is left out."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = {"bos_token": bos_token} if special is None and bos_token else dict(special or {})
        self._bos = bos_token
        self._bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
        self._byte_level = "ByteLevel" in str(tokenizer.decoder)
        self._note_added()
        # A normaliser may shorten a text, and a token take spaces along, so that its length says nothing.
        shortened = tokenizer.normalizer is not None or any(map(_takes_spaces, self._added_texts))
        self._longest = None if shortened else max(map(len, tokenizer.get_vocab()))
        self.hidden = {token.index: token.text for token in self._added_texts if token.special}
        self.hidden |= {
            index: tokenizer.id_to_token(index) or "" for index in self.eos_token_ids - self._added.keys()
        }
        self.hidden |= {index: self._added[index] for index in self.eos_token_ids & self._added.keys()}

    def _note_added(self) -> None:
        self._added_texts = tuple(
            AddedText(
                index,
                token.content,
                token.special,
                token.normalized,
                token.lstrip,
                token.rstrip,
                token.single_word,
            )
            for index, token in sorted(self._tokenizer.get_added_tokens_decoder().items())
        )
        self._added = {token.index: token.text for token in self._added_texts}

    @property
    def tokenizer(self) -> Tokenizer:
        """The library's tokenizer."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be called."""
        return self._template is not None

    @property
    def companions(self) -> Companions:
        """What adapters' own files are held against: template, end tokens, special and added tokens."""
        return Companions(
            chat_template=None if self._template is None else self._template.source,
            eos_token_ids=tuple(sorted(self.eos_token_ids)),
            special=tuple(sorted(self._special.items())),
            added=self._added_texts,
        )

    def adapted(
        self, template: ChatTemplate | None, further: Sequence[AddedText], ends: Iterable[str | int]
    ) -> Self:
        """This codec with a template in place of its own, further tokens, and further ends by text or id.

        Without further tokens it shares the tokenizer. Raises `adapter_unsupported` for a token that cannot
        have its id here, and for an end that is none of its tokens.
        """
        other = copy(self)
        if template is not None:
            other._template = template
        if further:
            other._add(further)
        named = [end if isinstance(end, int) else other.token_id(end) for end in ends]
        ids = {index for index in named if index is not None and index < other.vocab_size}
        if not ids.issuperset(named):
            raise CallerError(
                ErrorCode.ADAPTER_UNSUPPORTED,
                "an end token of the adapter is not among the tokens of base and adapter; serve the adapter "
                "with the "
                "base's text",
                param="text",
            )
        other.eos_token_ids = self.eos_token_ids | ids
        other.hidden = other.hidden | {index: other._text_of(index) for index in ids}
        return other

    def _text_of(self, index: int) -> str:
        return self._added.get(index) or self._tokenizer.id_to_token(index) or ""

    def _add(self, further: Sequence[AddedText]) -> None:
        """Give a tokenizer of its own tokens that this one does not know. further: by id."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        for token in further:
            size = tokenizer.get_vocab_size(with_added_tokens=True)
            if size == token.index and tokenizer.token_to_id(token.text) is None:
                add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
                add(
                    [
                        AddedToken(
                            token.text,
                            special=token.special,
                            normalized=token.normalized,
                            lstrip=token.lstrip,
                            rstrip=token.rstrip,
                            single_word=token.single_word,
                        )
                    ]
                )
            if tokenizer.token_to_id(token.text) != token.index:
                raise CallerError(
                    ErrorCode.ADAPTER_UNSUPPORTED,
                    f"token {token.text!r:.80} of the adapter has the id {token.index}, which it cannot have "
                    f"beside the base's {self.vocab_size} tokens; serve the adapter with the base's text",
                    param="text",
                )
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._note_added()
        self.hidden = self.hidden | {token.index: token.text for token in further if token.special}
        if self._longest is not None:
            longest = max(self._longest, *(len(token.text) for token in further))
            self._longest = None if any(map(_takes_spaces, further)) else longest

    @property
    def plain_added(self) -> list[int]:
        """Ids of added tokens that are part of a text like any other, in ascending order."""
        return sorted(self._added.keys() - self.hidden.keys())

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text."""
        index: int | None = self._tokenizer.token_to_id(text)
        return index

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`. add_special: with what the model's tokenizer puts around it; a BOS is never
        doubled.
        """
        if len(text) <= SHORT_TEXT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special)
        else:  # a batch of one lets go of the interpreter meanwhile, which `encode` does not
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = encoding.ids
        if (
            add_special
            and self._bos is not None
            and text.startswith(self._bos)
            and ids[:2] == [self._bos_id] * 2
        ):
            return ids[1:]
        return ids

    def surely_exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` is too long for so many tokens whatever it says; False where only tokenising it
        would tell.
        """
        return self._longest is not None and len(text) > tokens * self._longest

    def chat(
        self,
        messages: Sequence[Message],
        tools: ToolUse | None = None,
        suffix: str | None = None,
        add_special: bool = False,
        *,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers. The template alone decides about a
        BOS.

        tools: what the answer may call. suffix: text that opens the answer in place of what the template
        opens it with. add_special: with what the tokenizer puts around a text. continues, variables: as in
        `ChatTemplate.render`.
        """
        template = self.template()
        given, offered = messages_for(template, messages, tools)
        text = template.render(given, offered, suffix, continues=continues, variables=variables)
        return self.encode(text, add_special)

    def template(self) -> ChatTemplate:
        """The chat template, or `unsupported_option` where the model has none."""
        if self._template is None:
            raise CallerError(
                ErrorCode.UNSUPPORTED_OPTION,
                "the model has no chat template; use /v1/completions",
                param="messages",
            )
        return self._template

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `token_ids` as a whole; broken UTF-8 becomes U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; none for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        raw = self._tokenizer.id_to_token(token_id)
        if raw is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in raw if character in _BYTE_OF)
        if len(raw) == 6 and raw.startswith("<0x") and raw.endswith(">"):
            return bytes.fromhex(raw[3:5])
        text = self.decode([token_id], skip_special=False)
        return (" " + text if raw.startswith("\u2581") and not text.startswith(" ") else text).encode()

    def token_text(self, token_id: int) -> str:
        """One token for display: its text, or `bytes:\\x..` where it is only a part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def further_ends(own: TextCodec | None, base: TextCodec | None) -> frozenset[int]:
    """End tokens that an adapter's own files add to those of its base."""
    return frozenset() if own is None or base is None else own.eos_token_ids - base.eos_token_ids


def sampled_ids(own: TextCodec | None, base: TextCodec | None) -> int:
    """Ids that may be sampled for an adapter whose tokenizer knows more than its base's; 0 leaves the
    base's.
    """
    return 0 if own is None or base is None or own.vocab_size == base.vocab_size else own.vocab_size


def load_tokenizer(folder: Path) -> TextCodec | None:
    """The codec of a model folder; None without tokenizer.json. Unreadable files raise `config_invalid`."""
    path = folder / "tokenizer.json"
    if not os.path.isfile(path):
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CallerError(ErrorCode.CONFIG_INVALID, f"{path} is not a tokenizer: {error}") from error
    config = _json_object(folder / "tokenizer_config.json")
    special = {role: text for role in SPECIAL_ROLES if (text := token_text(config.get(role))) is not None}
    source = _template_source(folder, config)
    template = None if source is None else ChatTemplate(source, special, tool_format=_card_format(folder))
    return TextCodec(
        tokenizer, _ends(folder, tokenizer, special), special.get("bos_token"), template, special
    )


def _card_format(folder: Path) -> str | None:
    try:
        card = read_card(folder, activated=True)
    except CallerError as error:
        raise CallerError(ErrorCode.CONFIG_INVALID, f"the card in {folder} is refused: {error}") from error
    return None if card is None else card.tool_format


def _json_object(path: Path) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CallerError(ErrorCode.CONFIG_INVALID, f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CallerError(ErrorCode.CONFIG_INVALID, f"{path} holds {type(value).__name__}, not an object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if os.path.isfile(path):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CallerError(ErrorCode.CONFIG_INVALID, f"{path} is not readable text: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}.get(
            "default"
        )
    return value if isinstance(value, str) else None


def configured_ends(folder: Path) -> frozenset[int]:
    """End-of-sequence ids of generation_config.json, else of config.json; empty where neither names one.

    Raises `config_invalid` for what is neither an id nor a list of ids.
    """
    for name in ("generation_config.json", "config.json"):
        value = _json_object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise CallerError(
                ErrorCode.CONFIG_INVALID,
                f"eos_token_id of {folder / name} must be an integer or a list, got {value!r}",
            )
        if ids:
            return frozenset(ids)
    return frozenset()


def _ends(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """What the configuration says, then the tokenizer's own end token."""
    configured = configured_ends(folder)
    index = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return configured if configured or index is None else frozenset({index})
