"""The demo model on CUDA against float32 on the CPU, base and adapters in one batch (equality level b)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from loraplex import LLM, SamplingParams  # noqa: E402
from loraplex.api import RequestOutput  # noqa: E402
from loraplex.model.gguf import ensure_demo_model  # noqa: E402

pytestmark = pytest.mark.gpu
TIE: Final = 1e-4
ADAPTERS: Final = Path(__file__).resolve().parents[2] / "demo" / "adapters"
SERVED: Final = {name: ADAPTERS / name for name in ("iso-date", "sql", "cron")}
PROMPTS: Final = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "the third of May, 2021",
    "Show the names of all customers from Berlin.",
    "every day at noon",
]
NAMES: Final = [None, None, None, "iso-date", "sql", "cron"]


def generate(device: str) -> list[RequestOutput]:
    sampling = SamplingParams(max_tokens=32, temperature=0.0, logprobs=5, ignore_eos=True)
    with LLM(
        ensure_demo_model(), SERVED, device=device, dtype="float32", pool_gb=0.5, max_model_len=256
    ) as llm:
        return llm.generate(PROMPTS, NAMES, sampling)


def test_float32_on_cuda_equals_float32_on_the_cpu_up_to_ties() -> None:
    for ours, reference in zip(generate("cuda"), generate("cpu"), strict=True):
        assert reference.logprobs is not None
        for index, (own, other) in enumerate(zip(reference.token_ids, ours.token_ids, strict=True)):
            if own != other:  # what follows such a place is another text
                scores = reference.logprobs[index]
                assert other in scores
                assert scores[own] - scores[other] < TIE
                break
