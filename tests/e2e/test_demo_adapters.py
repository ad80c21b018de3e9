"""Demo adapters of every kind in one mixed batch: DoRA (`cron`), plain LoRA and a rank pattern, beside the
base.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from demo.cases import read_heldout
from demo.checkers import is_right
from transformers import AutoTokenizer

from loraplex import LLM, SamplingParams
from loraplex.model.gguf import demo_model

pytestmark = pytest.mark.e2e

FOLDER = Path(__file__).resolve().parents[2] / "demo" / "adapters"
NAMES = ["cron", "iso-date", "triage"]
CASES = 4


def test_adapters_of_several_methods_answer_their_held_out_cases_in_one_batch() -> None:
    model = demo_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [(name, case) for name in NAMES for case in read_heldout(FOLDER / name)[:CASES]]
    prompts = [
        tokenizer.apply_chat_template(
            case.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for _, case in asked
    ]
    with LLM(
        model, {name: FOLDER / name for name in NAMES}, dtype="float32", pool_gb=0.3, max_model_len=256
    ) as llm:
        methods = {entry["alias"]: entry["method"] for entry in llm.adapters()}
        sampling = SamplingParams(max_tokens=24, temperature=0.0)
        outputs = llm.generate([*prompts, prompts[0]], [*(name for name, _ in asked), None], sampling)
    assert methods["cron"] == "dora+lora"
    right = dict.fromkeys(NAMES, 0)
    for (name, case), output in zip(asked, outputs, strict=False):
        right[name] += is_right(case.checker, output.text, case.expected)
    assert all(count >= CASES - 1 for count in right.values()), right
    assert not is_right(asked[0][1].checker, outputs[-1].text, asked[0][1].expected)
