"""Owns the translation of the tokenizer in a GGUF file's metadata into Hugging Face files.

Byte-level BPE only, with the text split that the file names in `tokenizer.ggml.pre`; a split this module
does not know is refused by name, because a wrong one gives other ids without any error. Never reads tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from loraplex.core.errors import CallerError, ErrorCode

TOKEN_CONTROL = 3
TOKEN_USER_DEFINED = 4

_SPECIAL_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _unsupported(message: str) -> CallerError:
    return CallerError(ErrorCode.MODEL_UNSUPPORTED, message)


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)


def _split(name: str) -> Any:
    """The text split behind a `tokenizer.ggml.pre` name.

    `smollm` isolates every numeral before the GPT-2 split. It matters beyond digits: white space before a
    number stays one token ("  7" is two spaces and 7), as in the text the model was trained on.
    """
    match name:
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])
        case "gpt-2":
            return _byte_level()
        case _:
            raise _unsupported(
                f"tokenizer.ggml.pre is {name!r}, expected 'smollm' or 'gpt-2'; convert the model with its "
                "own tokenizer.json"
            )


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Fast tokenizer from GGUF metadata. Raises CallerError MODEL_UNSUPPORTED."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise _unsupported(f"tokenizer.ggml.model is {kind!r}, expected 'gpt2' (byte-level BPE)")
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise _unsupported("tokenizer.ggml.add_space_prefix is true, expected false for byte-level BPE")
    lacking = [k for k in ("tokens", "token_type", "merges") if f"tokenizer.ggml.{k}" not in metadata]
    if lacking:
        raise _unsupported(f"the file lacks tokenizer.ggml.{lacking[0]}, which a byte-level BPE needs")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise _unsupported(
            f"the token list has {len(tokens)} entries, {len(vocabulary)} distinct, and {len(types)} types; "
            "expected one of each"
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _split(str(metadata.get("tokenizer.ggml.pre")))
    tokenizer.decoder = decoders.ByteLevel()
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = _bos_in_front(int(metadata["tokenizer.ggml.bos_token_id"]), tokens)
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, k in typed if k == TOKEN_CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, k in typed if k == TOKEN_USER_DEFINED]
    )
    return tokenizer


def _bos_in_front(bos_id: int, tokens: list[str]) -> Any:
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Token ids by role (`bos_token`, `eos_token`, ...), for the roles the file states."""
    return {role: int(metadata[key]) for role, key in _SPECIAL_ROLES.items() if key in metadata}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja."""
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # A class that takes tokenizer.json as it is: the GPT-2 class would rebuild it with its own text
        # split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **{role: tokens[index] for role, index in special_ids(metadata).items()},
    }
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
