"""Small tokenizers for tests, built with the library itself: byte-level with a few merges, and metaspace with
bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from loraplex.text.codec import TextCodec, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("Ġ", "w"),
    ("S", "T"),
    ("O", "P"),
    ("ST", "OP"),
]


def byte_tokenizer() -> Tokenizer:
    """ids 0..2 are <|start|>, <|end|>, <|pad|>; then every byte; then merges. A BOS is put in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|start|>", "<|end|>", "<|pad|>", *alphabet, *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", pair=None, special_tokens=[("<|start|>", 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens[:3]])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A sentencepiece-like one: words with a leading mark, single letters, and a token for each byte."""
    words = ["\u2581hello", "\u2581world", "\u2581", "h", "e", "l", "o", "w", "r", "d", "!"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens[:3]])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = TEMPLATE) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|start|>", "eos_token": {"content": "<|end|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return folder


def byte_codec(folder: Path) -> TextCodec:
    codec = load_tokenizer(write_folder(folder, byte_tokenizer()))
    assert codec is not None
    return codec
