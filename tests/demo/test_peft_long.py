"""Every demo adapter, served in float32, gives PEFT's log probabilities, or is refused by the name of its
method.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from demo.reference import load_base, with_adapter

from loraplex import LLM, SamplingParams
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_LOGPROBS
from loraplex.model.gguf import demo_model

pytestmark = [pytest.mark.long, pytest.mark.e2e]
ROOT = Path(__file__).resolve().parents[2] / "demo" / "adapters"
TOLERANCE = 2e-4
"""On 30 layers, float32 leaves about a ten thousandth between two orders of summation."""
PROMPT = (
    "The meeting was moved to the 3rd of March 2021, and nobody was pleased about it."
    "<|im_end|>\n<|im_start|>judge\nIt was not moved."
)
"""Holds the invocation of the activated adapter, with rows before and after it."""


def test_every_demo_adapter() -> None:
    folder = demo_model()
    names = sorted(path.name for path in ROOT.iterdir() if (path / "adapter_config.json").is_file())
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=MAX_LOGPROBS)
    served, refused = {}, {}
    with LLM(folder, dtype="float32", pool_gb=0.2, max_model_len=256) as llm:
        for name in names:
            try:
                described = llm.add_adapter(name, ROOT / name)
            except CallerError as error:
                refused[name] = error
                continue
            assert described["tensors_applied"] == described["tensors_total"]
            served[name] = llm.generate(PROMPT, name, params)[0]
    gc.collect()
    assert len(served) >= 9
    for name, refusal in refused.items():
        print(f"{name}: {refusal}")
        assert refusal.code is ErrorCode.ADAPTER_UNSUPPORTED
    base = load_base(folder, "float32")
    for name, output in served.items():
        with with_adapter(base, ROOT / name) as model, torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids]), use_cache=False).logits[0]
        expected = torch.log_softmax(logits.double(), dim=-1)
        assert output.prompt_logprobs is not None
        worst = max(
            abs(value - float(expected[position, token]))
            for position, entries in enumerate(output.prompt_logprobs[1:])
            for token, value in (entries or {}).items()
        )
        print(f"{name}: largest difference {worst:.2e}")
        assert worst < TOLERANCE, name
