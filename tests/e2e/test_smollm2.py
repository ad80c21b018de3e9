"""The demo model: float32 greedy tokens equal transformers' for listed prompts (equality level c)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex import LLM, SamplingParams
from loraplex.model.gguf import demo_model

pytestmark = pytest.mark.e2e

NEW = 12
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "2 + 2 =",
    "Dear Sir or Madam,\n",
    "In the beginning",
    "A list of fruits: apple, banana,",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "Roses are red, violets are",
    "import numpy as np\n",
    "The sun rises in the",
    "To make tea, first",
    "<html><head>",
    "Albert Einstein was born in",
    "La capitale de l'Italie est",
    "Q: What is a dog?\nA:",
    "My favourite book is",
]


def check(count: int) -> None:
    """The first `count` prompts, in one batch of ours and one by one in transformers."""
    folder: Path = demo_model()
    with LLM(folder, dtype="float32", pool_gb=0.1, max_model_len=256) as llm:
        outputs = llm.generate(
            PROMPTS[:count], None, SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
        )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, output in zip(PROMPTS, outputs, strict=False):
        assert output.token_ids == choices(theirs, output.prompt_token_ids, output.token_ids), text
        assert output.text != ""


def choices(model: PreTrainedModel, prompt: list[int], out: list[int]) -> list[int]:
    """What transformers would choose at each position of `out`, had it chosen what stands before.

    Equal to `out` exactly when it generates `out` greedily; one pass in place of one for each token.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + out[:-1]])).logits[0, len(prompt) - 1 :]
    return [int(token) for token in logits.argmax(dim=-1)]


def test_greedy_tokens_equal_transformers() -> None:
    check(len(PROMPTS))
