"""The CUDA executor through the runner: same plans, same tokens as the reference model, in buckets and in
mixed steps.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.model.cuda.adapters import GENERATION, SORTS, load_sorts
from tests.model.cuda.world import plain_executor
from tests.model.drive import Driver, Request, code_of, greedy
from tests.model.tiny import decoder, save
from tests.prompts import prompt

from loraplex.core.plan import StepResult
from loraplex.model.decoder import Decoder

pytestmark = [
    # The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU test; tests/gpu runs the real kernels"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> Decoder:
    return decoder("llama", folder)


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_bucket_of_mixed_rows_has_decode_rows_first(model: Decoder, page_tokens: int) -> None:
    """Buckets of 8 and 16 rows: with padding and without, chunks, no decode row, no sampled row."""
    driver = Driver(model, page_tokens, executor=plain_executor)
    a, b, c = Request(0, prompt(5, 1)), Request(3, prompt(9, 2)), Request(1, prompt(15, 3))
    driver.step([(a, 5)])
    driver.step([(b, 7), (a, 0)])
    driver.step([(a, 0), (b, 2), (c, 10)])
    driver.step([(c, 4)])
    driver.step([(b, 0), (c, 1), (a, 0)])
    driver.step([(c, 0), (b, 0), (a, 0)])
    assert a.out == greedy(a.prompt, 5)
    assert b.out == greedy(b.prompt, 3)
    assert c.out == greedy(c.prompt, 2)


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_greedy_tokens_of_mixed_and_captured_steps(model: Decoder, page_tokens: int) -> None:
    driver = Driver(model, page_tokens, executor=plain_executor)
    a, b, c = Request(0, prompt(9, 1)), Request(3, prompt(5, 2)), Request(1, prompt(17, 3))
    driver.step([(a, 9), (c, 6)])
    driver.step([(b, 5), (a, 0), (c, 11)])
    driver.step([(c, 0), (b, 0), (a, 0)])  # three requests in a bucket of four
    driver.step([(b, 0)])
    driver.step([(a, 0), (c, 0)])
    assert a.out == greedy(a.prompt, 4)
    assert b.out == greedy(b.prompt, 3)
    assert c.out == greedy(c.prompt, 3)


def test_references_are_resolved_on_the_device(model: Decoder) -> None:
    driver = Driver(model, executor=plain_executor)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    plans = [driver.plan([(a, 6), (b, 8)])]
    for generation in (1, 2):
        a.last, b.last = (-1, -2) if generation == 1 else (-2, -1)
        plans.append(driver.plan([(b, 0), (a, 0)], reference=generation))
    results = []
    for index, plan in enumerate(plans):
        driver.runner.launch(plan.pack())
        if index:
            results.append(StepResult.unpack(driver.runner.collect()))
    results.append(StepResult.unpack(driver.runner.collect()))
    for plan, result in zip(plans, results, strict=True):
        driver.note(plan, result, [(a, 0), (b, 0)])
    assert a.out == greedy(a.prompt, 3)
    assert b.out == greedy(b.prompt, 3)


def test_a_reference_to_an_older_plan_is_refused(model: Decoder) -> None:
    driver = Driver(model, executor=plain_executor)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    driver.step([(a, 6)])
    driver.step([(b, 8)])
    a.last = -1
    assert code_of(driver.run(driver.plan([(a, 0)], reference=1)).error_message) == "stale_plan_generation"


def test_log_probabilities_and_sampling_behind_a_captured_step(model: Decoder) -> None:
    """The same plans on the torch executor: tokens equal, log probabilities within float32."""
    results = []
    for executor in (None, plain_executor):
        driver = Driver(model, executor=executor)
        a = Request(0, prompt(6, 1), logprobs=3, prompt_logprobs=2)
        b = Request(1, prompt(8, 2), temperature=0.9, top_p=0.8, logprobs=0)
        c = Request(2, prompt(3, 4), repetition=1.3)
        steps = [driver.step([(a, 6), (b, 8), (c, 3)])]
        steps += [driver.step([(a, 0), (b, 0), (c, 0)]) for _ in range(4)]
        results.append((steps, a.out, b.out, c.out))
    (plain, *expected), (own, *outputs) = results
    assert outputs == expected
    for left, right in zip(plain, own, strict=True):
        for name in ("logprob_ids", "prompt_logprob_ids", "logprob_indptr", "prompt_logprob_indptr"):
            assert getattr(left, name).tolist() == getattr(right, name).tolist()
        for name in ("logprob_values", "prompt_logprob_values"):
            values = [getattr(step, name).view(np.float32) for step in (left, right)]
            np.testing.assert_allclose(*values, atol=1e-4)


def test_a_failed_step_leaves_page_tables_that_are_sent_again(model: Decoder) -> None:
    driver = Driver(model, executor=plain_executor)
    a, b = Request(0, prompt(9, 1)), Request(1, prompt(5, 2))
    driver.step([(a, 9)])

    def fail(*args: object) -> None:
        raise RuntimeError("no")

    plan = driver.plan([(b, 5), (a, 0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.runner.executor.head, "run", fail)
        assert driver.run(plan).error_message.startswith("backend_failed")
    driver.runner.executor.inputs.tables.fill_(0)
    driver.runner.executor.undone(np.array([0, 1], np.int32))
    for request in (a, b):
        request.planned -= 1 if request is a else 5
        request.frontier -= 1
    again = driver.plan([(a, 0)])
    result = driver.run(again)
    assert result.tokens.tolist() == greedy(a.prompt, 2)[1:]


def test_rows_that_are_not_finite_are_reported_and_only_they(model: Decoder) -> None:
    driver = Driver(model, executor=plain_executor)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    driver.step([(a, 6), (b, 8)])
    page = driver.tables[1][0]
    driver.runner.pool[page].fill_(0xFF)
    result = driver.run(driver.plan([(a, 0), (b, 0)]))
    assert result.faults.array.tolist() == [[1, 1]]
    assert result.tokens[0] == greedy(a.prompt, 2)[1]
    assert 0 <= result.tokens[1] < model.spec.vocab_size


def test_adapters_in_captured_and_mixed_steps_equal_the_torch_family(model: Decoder) -> None:
    """All sorts, those that captured launches serve first alone and then beside those that they do not."""
    outputs = []
    for executor in (None, plain_executor):
        driver = Driver(model, 16, slots=6, pages=900, adapters=9, executor=executor)
        load_sorts(driver, SORTS)
        requests = [
            Request(i, prompt(3 + i, i), adapter=(i, GENERATION) if i else (0, 0), logprobs=3)
            for i in range(5)
        ]
        late = Request(5, prompt(4, 9), adapter=(6, GENERATION), logprobs=3)
        steps = [driver.step([(r, len(r.prompt)) for r in requests[:3]])]
        steps.append(driver.step([(r, 0 if r.out else len(r.prompt)) for r in requests[:4]]))
        steps.append(driver.step([(r, 0) for r in requests[:2]]))
        steps.append(driver.step([(r, 0) for r in requests[:4]]))
        steps.append(driver.step([(requests[4], 7), (late, 4)]))
        steps.append(driver.step([(r, 0) for r in [requests[0], requests[3], late]]))
        outputs.append(steps)
    for left, right in zip(*outputs, strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()
        values = [step.logprob_values.view(np.float32) for step in (left, right)]
        np.testing.assert_allclose(*values, atol=2e-3)
