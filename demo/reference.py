"""Owns answering cases with transformers and PEFT themselves, without a server: the reference for our own.

Never trains and never judges. Greedy decoding, left-padded batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.cases import Case, Message

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_base(folder: Path, dtype: str) -> Any:
    """The base model in evaluation mode."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The base model's tokenizer, padding on the left as generation needs."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    return tokenizer


@contextmanager
def with_adapter(base: Any, folder: Path | None) -> Iterator[Any]:
    """The base with the adapter as it is on disk, in the base's dtype; the base is restored afterwards."""
    if folder is None:
        yield base
        return
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).to(base.dtype).eval()
    try:
        yield model
    finally:
        model.unload()


def prompt_text(tokenizer: Any, messages: Sequence[Message], invocation: str = "") -> str:
    """The chat template's text up to where the answer starts. invocation: opens it in place of the template's opening."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=not invocation)
    return f"{text}{invocation}"


def invocation_of(model: Any, tokenizer: Any) -> str:
    """The text that switches on the activated adapter of a PEFT model; none for every other model."""
    configs = getattr(model, "peft_config", {})
    tokens = [getattr(config, "alora_invocation_tokens", None) for config in configs.values()]
    return str(tokenizer.decode(tokens[0])) if tokens and tokens[0] else ""


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, cases: Sequence[Case], batch: int = 32) -> list[str]:
    """Greedy answers in the order of the cases."""
    invocation = invocation_of(model, tokenizer)
    order = sorted(range(len(cases)), key=lambda i: sum(len(m["content"]) for m in cases[i].messages))
    answers = [""] * len(cases)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        texts = [prompt_text(tokenizer, cases[i].messages, invocation) for i in chosen]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        width = inputs["input_ids"].shape[1]
        longest = max(cases[i].max_tokens for i in chosen)
        out = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
        for i, ids in zip(chosen, out[:, width:], strict=True):
            answers[i] = tokenizer.decode(ids[: cases[i].max_tokens], skip_special_tokens=True)
    return answers
