"""Folders of a tiny Llama and its adapters, and transformers with PEFT as the judge of what is served from
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.model.tiny import reference, save

from loraplex import LLM
from loraplex.api import RequestOutput, Sample

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 6, "lora_alpha": 4, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ALL,
        "rank_pattern": {"q_proj": 7, "layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"v_proj": 3, "layers.2.self_attn.o_proj": 20},
    },
}  # fmt: skip
NAMES = (None, *CONFIGS)
TINY: dict[str, dict[str, Any]] = {
    f"tiny{index}": {
        "r": 1,
        "lora_alpha": 2 + index % 3,
        "target_modules": [ALL[index % 4]],
        "layers_to_transform": [index % 3],
    }
    for index in range(24)
}
"""Rank 1 on one module of one layer: a few hundred bytes each. No two are alike."""

DEVICE = "cpu"
"""Where `open_llm` runs the model; the fixture `device` changes it for a test."""
TIE = 1e-4
CLOSE = 1e-4
GIB = 1 << 30


def write_folders(root: Path) -> Path:
    """`root/base` and `root/NAME` of every adapter."""
    save("llama", root / "base")
    for name in CONFIGS:
        judge_of(name).save_pretrained(root / name)
    return root


@cache
def judge_of(name: str | None) -> Any:
    """The base, or PEFT over a copy of it. B is as random as A: no adapter is without effect."""
    if name is None:
        return reference("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about targets
        base = type(reference("llama"))(reference("llama").config)
        base.load_state_dict(reference("llama").state_dict())
        model = peft.get_peft_model(base, peft.LoraConfig(**(CONFIGS | TINY)[name]))
    generator = torch.Generator().manual_seed(len(name) if name in CONFIGS else 100 + list(TINY).index(name))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(0.0, 0.3 if name in CONFIGS else 1.0, generator=generator)
    return model.eval()


def open_llm(root: Path, adapters: Sequence[str] = tuple(CONFIGS), **options: Any) -> LLM:
    """The tiny model with adapters under their own names, float32, on `DEVICE`."""
    options = {"dtype": "float32", "pool_gb": 0.01, "page_tokens": 4, "device": DEVICE, **options}
    return LLM(root / "base", {name: root / name for name in adapters}, **options)


def scores_of(name: str | None, tokens: Sequence[int]) -> torch.Tensor:
    """Log probabilities after each token, [tokens, vocabulary]."""
    with torch.no_grad():
        logits: torch.Tensor = judge_of(name)(torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check_greedy(output: RequestOutput, name: str | None, count: int) -> None:
    """Level b, teacher-forced: every token is the judge's best, or within `TIE` of it; log probabilities
    agree.
    """
    assert len(output.token_ids) == count
    start = len(output.prompt_token_ids)
    scores = scores_of(name, [*output.prompt_token_ids, *output.token_ids])
    for index, token in enumerate(output.token_ids):
        row = scores[start - 1 + index]
        assert float(row.max() - row[token]) <= TIE, (name, index)
    if output.logprobs is not None:
        assert len(output.logprobs) == count
        for index, token in enumerate(output.token_ids):
            check_entries(output.logprobs[index], scores[start - 1 + index], token)
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == start
        for index, entries in enumerate(output.prompt_logprobs[1:], start=1):
            assert entries is not None
            check_entries(entries, scores[index - 1], output.prompt_token_ids[index])


def check_entries(entries: dict[int, float], row: torch.Tensor, token: int, top: int = 5) -> None:
    """The actual token is in it, values are the judge's, and nothing likelier than the entries was
    left out.
    """
    assert token in entries
    assert len(entries) in (top, top + 1)
    for entry, value in entries.items():
        assert value == pytest.approx(float(row[entry]), abs=CLOSE)
    best = sorted(entries.values(), reverse=True)[:top]
    assert best == pytest.approx(row.topk(top).values.tolist(), abs=CLOSE)


def check_same(one: Sample, other: Sample, name: str | None, context: Sequence[int]) -> None:
    """Two greedy answers are equal, or part where the judge's best two are within `TIE`."""
    for index, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if a != b:
            best = scores_of(name, [*context, *one.token_ids[:index]])[-1].topk(2).values
            assert float(best[0] - best[1]) <= TIE, (name, index, a, b)
            return


def settled_pages(llm: LLM) -> dict[str, int]:
    """Pages by state, those of cached prefixes among the free ones: nobody holds them, and they go where room
    is asked for.
    """
    pages: dict[str, int] = dict(llm.inspect()["pages"])
    pages["free"] += pages.pop("prefix")
    return pages
