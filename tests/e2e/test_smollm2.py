"""SmolLM2-135M-Instruct: greedy float32 tokens equal to transformers on the same weights (level c)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex import LLM, SamplingParams
from loraplex.model.gguf import ensure_demo_model

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")]

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "The opposite of hot is",
    "2, 4, 6, 8,", "In 1969, humans first", "A haiku about autumn:", "Dear Sir or Madam,", "The three primary colours are",
    "import numpy as np\n", "To make an omelette, first", "Der schnelle braune Fuchs", "<html>\n<body>", "Q: What is DNA?\nA:",
    "The largest planet is", "She opened the door and", "Photosynthesis is the process", "1 + 1 =", "Roses are red,",
]  # fmt: skip


def compare(prompts: list[str], count: int) -> None:
    folder = ensure_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, dtype="float32") as llm:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(prompts, None, params)
    for text, output in zip(prompts, outputs, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert output.prompt_token_ids == ids[0].tolist(), text
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
                pad_token_id=0,
            )  # fmt: skip
        assert output.token_ids == out[0, ids.shape[1] :].tolist(), text
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True), text


def test_a_few_prompts() -> None:
    compare(PROMPTS[:3], 8)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_twenty_prompts() -> None:
    compare(PROMPTS, 16)
