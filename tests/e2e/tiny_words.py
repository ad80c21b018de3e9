"""A tiny model whose tokenizer has words, for tests of text through `LLM`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.model.tiny import COMMON
from tests.text.tiny_text import metaspace_tokenizer

WORD = metaspace_tokenizer().token_to_id("\u2581world")
END = metaspace_tokenizer().token_to_id("</s>")


def model(folder: Path, **changes: Any) -> Path:
    """A tiny Llama of random weights with a sentencepiece-like tokenizer, which has an end token of
    its own.
    """
    folder.mkdir(exist_ok=True)
    config = {**COMMON, "vocab_size": 300, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    metaspace_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder
