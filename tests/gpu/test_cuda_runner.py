"""The runner on CUDA against float32 on the CPU, teacher-forced (equality level b), over mixed and captured steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.world import VOCAB, cuda_decoder, cuda_executor, reference_decoder, spec_of, stream  # noqa: E402
from tests.model.drive import Driver, Request  # noqa: E402

from loraplex.core.plan import StepResult  # noqa: E402

pytestmark = pytest.mark.gpu
TIE = 0.06


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def drivers(page_tokens: int = 16, *, captured: bool = True, **changes: Any) -> tuple[Driver, Driver]:
    spec = spec_of(**changes)
    sizes: dict[str, Any] = {"slots": 12, "pages": 2000, "adapters": 9}
    own = Driver(cuda_decoder(spec), page_tokens, executor=cuda_executor(captured), stream=stream(), **sizes)
    return Driver(reference_decoder(spec), page_tokens, **sizes), own


def follow(
    pair: tuple[Driver, Driver], work: list[tuple[int, int]], requests: dict[int, tuple[Request, Request]]
) -> None:
    """One step on both, fed with the reference's tokens; tokens may differ only where its best two nearly tie."""
    results = []
    for side, driver in enumerate(pair):
        results.append(driver.step([(requests[i][side], rows) for i, rows in work]))
    best = [step_best(result) for result in results]
    for (ids, values), token in zip(best[0], results[1].tokens.tolist(), strict=True):
        chosen = dict(zip(ids, values, strict=True))
        assert token in chosen, "not among the reference's best five"
        assert max(values) - chosen[token] < TIE
    for i, _ in work:
        left, right = requests[i]
        right.last = left.last


def step_best(result: StepResult) -> list[tuple[list[int], list[float]]]:
    out = []
    values = result.logprob_values.view(np.float32)
    for lo, hi in zip(result.logprob_indptr[:-1].tolist(), result.logprob_indptr[1:].tolist(), strict=True):
        out.append((result.logprob_ids[lo:hi].tolist(), values[lo:hi].tolist()))
    return out


def pairs(lengths: list[int]) -> dict[int, tuple[Request, Request]]:
    return {
        i: (Request(i, prompt(n, i), logprobs=5), Request(i, prompt(n, i), logprobs=5))
        for i, n in enumerate(lengths)
    }


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("page_tokens", [16, 1])
def test_tokens_follow_float32_on_the_cpu(page_tokens: int, captured: bool) -> None:
    pair = drivers(page_tokens, captured=captured)
    requests = pairs([9, 5, 17, 1, 30])
    follow(pair, [(0, 9), (2, 6), (3, 1)], requests)
    follow(pair, [(1, 5), (0, 0), (2, 11), (4, 16)], requests)
    follow(pair, [(0, 0), (1, 0), (2, 0), (4, 14)], requests)
    for _ in range(8):
        follow(pair, [(4, 0), (2, 0), (0, 0), (1, 0), (3, 0)], requests)
    follow(pair, [(3, 0)], requests)


def test_chunks_on_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.model.cuda.flashinfer_attention.FA3_ROWS", 1)
    pair = drivers(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
    requests = pairs([50, 20])
    follow(pair, [(0, 50)], requests)
    follow(pair, [(1, 20), (0, 0)], requests)
    follow(pair, [(1, 0), (0, 0)], requests)


def test_references_stay_on_the_device() -> None:
    _, own = drivers()
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    plain = drivers()[1]
    c, d = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    plain.step([(c, 6), (d, 8)])
    for _ in range(5):
        plain.step([(d, 0), (c, 0)])
    plans = [own.plan([(a, 6), (b, 8)])]
    for generation in range(1, 6):
        a.last, b.last = (-1, -2) if generation == 1 else (-2, -1)
        plans.append(own.plan([(b, 0), (a, 0)], reference=generation))
    results = []
    for index, plan in enumerate(plans):
        own.runner.launch(plan.pack())
        if index:
            results.append(StepResult.unpack(own.runner.collect()))
    results.append(StepResult.unpack(own.runner.collect()))
    for plan, result in zip(plans, results, strict=True):
        assert result.error_message == ""
        own.note(plan, result, [(a, 0), (b, 0)])
    assert (a.out, b.out) == (c.out, d.out)


def test_captured_steps_equal_the_same_launches_one_by_one_bit_for_bit() -> None:
    outputs = []
    for captured in (True, False):
        own = drivers(captured=captured)[1]
        requests = [Request(i, prompt(7 + i, i), logprobs=5) for i in range(5)]
        own.step([(r, len(r.prompt)) for r in requests])
        steps = [own.step([(r, 0) for r in requests[: 1 + i % 5]]) for i in range(10)]
        outputs.append([(s.tokens.tolist(), s.logprob_values.tolist()) for s in steps])
    assert outputs[0] == outputs[1]
