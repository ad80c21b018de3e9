"""The demo model on CUDA against float32 on the CPU, base and adapters in one batch (equality level b)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.level_b import Deviations, assert_level_b  # noqa: E402

from loraplex import LLM, SamplingParams  # noqa: E402
from loraplex.api import RequestOutput  # noqa: E402
from loraplex.model.gguf import demo_model  # noqa: E402

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


SAMPLING: Final = SamplingParams(max_tokens=32, temperature=0.0, logprobs=5, ignore_eos=True)
SCORED: Final = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=20, ignore_eos=True)


def open_demo(device: str, dtype: str) -> LLM:
    return LLM(demo_model(), SERVED, device=device, dtype=dtype, pool_gb=0.5, max_model_len=256)


def test_float32_on_cuda_equals_float32_on_the_cpu_up_to_ties() -> None:
    answers = []
    for device in ("cuda", "cpu"):
        with open_demo(device, "float32") as llm:
            answers.append(llm.generate(PROMPTS, NAMES, SAMPLING))
    for ours, reference in zip(*answers, strict=True):
        assert reference.logprobs is not None
        for index, (own, other) in enumerate(zip(reference.token_ids, ours.token_ids, strict=True)):
            if own != other:  # what follows such a place is another text
                scores = reference.logprobs[index]
                assert other in scores
                assert scores[own] - scores[other] < TIE
                break


def scored(llm: LLM, texts: list[list[int]]) -> list[RequestOutput]:
    """Log probabilities of given texts, teacher-forced: each is a prompt."""
    return llm.generate(texts, NAMES, SCORED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_cuda_deviates_no_more_than_on_the_cpu(dtype: str) -> None:
    with open_demo("cpu", "float32") as llm:
        texts = [[*o.prompt_token_ids, *o.token_ids] for o in llm.generate(PROMPTS, NAMES, SAMPLING)]
        reference = scored(llm, texts)
    sides = []
    for device in ("cuda", "cpu"):
        side = Deviations()
        with open_demo(device, dtype) as llm:
            for own, expected in zip(scored(llm, texts), reference, strict=True):
                note_prompt(side, expected, own)
        sides.append(side)
    assert_level_b(*sides)


def note_prompt(side: Deviations, reference: RequestOutput, own: RequestOutput) -> None:
    """Every position of a text: the reference's best five, and what each side would have chosen."""
    assert reference.prompt_logprobs is not None
    assert own.prompt_logprobs is not None
    for expected, found in zip(reference.prompt_logprobs[1:], own.prompt_logprobs[1:], strict=True):
        assert expected is not None
        assert found is not None
        best = dict(sorted(expected.items(), key=lambda item: -item[1])[:5])
        side.note(best, found, max(found, key=lambda token: found[token]))
