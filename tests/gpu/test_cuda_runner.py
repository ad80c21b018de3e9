"""The runner on CUDA against float32 on the CPU, teacher-forced (equality level b), over mixed and captured
steps.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.drivers import HALF, Trio, device_driver, triples  # noqa: E402
from tests.model.drive import Request  # noqa: E402
from tests.prompts import prompt  # noqa: E402

from loraplex.core.plan import StepResult  # noqa: E402

pytestmark = pytest.mark.gpu


def run_mixture(trio: Trio) -> None:
    """Chunks with and without history, mixed steps, then decode steps of several buckets."""
    requests = triples([9, 5, 17, 1, 30])
    trio.follow([(0, 9), (2, 6), (3, 1)], requests)
    trio.follow([(1, 5), (0, 0), (2, 11), (4, 16)], requests)
    trio.follow([(0, 0), (1, 0), (2, 0), (4, 14)], requests)
    for _ in range(8):
        trio.follow([(4, 0), (2, 0), (0, 0), (1, 0), (3, 0)], requests)
    trio.follow([(3, 0)], requests)
    trio.check()


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("page_tokens", [16, 1])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_tokens_follow_float32_on_the_cpu(page_tokens: int, captured: bool, dtype: torch.dtype) -> None:
    run_mixture(Trio(page_tokens, captured=captured, dtype=dtype))


@pytest.mark.parametrize("captured", [True, False])
def test_a_sliding_window_follows_float32_on_the_cpu(captured: bool) -> None:
    """Every prompt and history is longer than the window of five."""
    run_mixture(Trio(4, captured=captured, model_type="mistral", sliding_window=5))


def test_chunks_on_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.model.cuda.flashinfer_attention.FA3_ROWS", 1)
    monkeypatch.setattr("loraplex.model.cuda.mixed.MixedGraphs.bucket", lambda self, plan: 0)
    trio = Trio(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
    requests = triples([50, 20])
    trio.follow([(0, 50)], requests)
    trio.follow([(1, 20), (0, 0)], requests)
    trio.follow([(1, 0), (0, 0)], requests)
    trio.check()


def test_references_stay_on_the_device() -> None:
    own = device_driver()
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    plain = device_driver()
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
        own = device_driver(captured=captured)
        requests = [Request(i, prompt(7 + i, i), logprobs=5) for i in range(5)]
        own.step([(r, len(r.prompt)) for r in requests])
        steps = [own.step([(r, 0) for r in requests[: 1 + i % 5]]) for i in range(10)]
        outputs.append([(s.tokens.tolist(), s.logprob_values.tolist()) for s in steps])
    assert outputs[0] == outputs[1]


def mixed_outputs(captured: bool) -> list[Any]:
    """Mixed steps of several buckets: one prefill and many, chunks behind a history, no decode row, no
    sample.
    """
    own = device_driver(captured=captured)
    lengths = [40, 7, 23, 3, 51, 12, 55, 5, 33]
    requests = [Request(i, prompt(n, i), logprobs=5) for i, n in enumerate(lengths)]
    steps = [own.step([(requests[0], 40)])]
    steps.append(own.step([(requests[1], 7), (requests[0], 0)]))
    steps.append(own.step([(requests[2], 20), (requests[0], 0), (requests[1], 0)]))
    steps.append(own.step([(requests[3], 3), (requests[2], 3), (requests[1], 0), (requests[0], 0)]))
    steps.append(own.step([(requests[4], 30), (requests[5], 12), (requests[6], 30), (requests[2], 0)]))
    steps.append(own.step([(requests[4], 21), (requests[6], 15)]))
    steps.append(own.step([(r, 0) for r in requests[:4]] + [(requests[6], 5)]))
    steps.append(
        own.step([(requests[6], 5), *((r, 0) for r in requests[:6]), (requests[7], 5), (requests[8], 33)])
    )
    steps.append(own.step([(r, 0) for r in requests]))
    return [(step.tokens.tolist(), step.logprob_values.tolist()) for step in steps]


def test_captured_mixed_steps_equal_the_same_launches_one_by_one_bit_for_bit() -> None:
    assert mixed_outputs(True) == mixed_outputs(False)


def test_captured_mixed_steps_follow_float32_on_the_cpu() -> None:
    """Each prompt beside those that decode, so that every step but the first two and the last is a
    mixed one.
    """
    trio = Trio()
    requests = triples([9, 40, 21, 5, 50, 33])
    trio.follow([(0, 9)], requests)
    for new in range(1, 6):
        length = len(requests[new][0].prompt)
        trio.follow([(new, length - 3), *((old, 0) for old in range(new))], requests)
        trio.follow([*((old, 0) for old in range(new)), (new, 3)], requests)
    trio.follow([(i, 0) for i in range(6)], requests)
    trio.check()


def test_mixed_steps_that_no_bucket_holds_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.model.cuda.mixed.MixedGraphs.bucket", lambda self, plan: 0)
    run_mixture(Trio())
