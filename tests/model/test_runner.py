"""The runner: plans in, results out; what is stale is refused whole and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.model.drive import Driver, Request, code_of, copy_row, greedy, logits_of, open_rows, page_rows
from tests.model.tiny import decoder, reference, save
from tests.prompts import prompt
from tests.sections import adapters, changed

from loraplex.core.packed import bits_float
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.model.decoder import Decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> Decoder:
    return decoder("llama", folder)


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_greedy_tokens_of_mixed_steps(model: Decoder, page_tokens: int) -> None:
    driver = Driver(model, page_tokens)
    a, b, c = Request(0, prompt(9, 1)), Request(3, prompt(5, 2)), Request(1, prompt(17, 3))
    driver.step([(a, 9), (c, 6)])
    driver.step([(b, 5), (a, 0), (c, 4)])
    driver.step([(a, 0), (c, 7), (b, 0)])
    driver.step([(c, 0), (b, 0), (a, 0)])
    assert a.out == greedy(a.prompt, 4)
    assert b.out == greedy(b.prompt, 3)
    assert c.out == greedy(c.prompt, 2)


def test_token_references_are_resolved_on_the_device(model: Decoder) -> None:
    driver = Driver(model)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    first = driver.plan([(a, 6), (b, 8)])
    driver.runner.launch(first.pack())
    a.last, b.last = -1, -2
    second = driver.plan([(b, 0), (a, 0)], reference=1)
    driver.runner.launch(second.pack())
    for plan in (first, second):
        driver.note(plan, StepResult.unpack(driver.runner.collect()), [(a, 0), (b, 0)])
    assert a.out == greedy(a.prompt, 2)
    assert b.out == greedy(b.prompt, 2)


def test_a_reference_to_another_requests_token_is_refused(model: Decoder) -> None:
    driver = Driver(model)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(8, 2))
    driver.step([(a, 6), (b, 8)])
    a.last = -2
    assert code_of(driver.run(driver.plan([(a, 0)], reference=1)).error_message) == "plan_token_reference"
    a.last, a.planned, a.frontier = -9, 6, 1
    assert code_of(driver.run(driver.plan([(a, 0)], reference=1)).error_message) == "plan_token_reference"


def test_a_reference_to_a_plan_that_is_gone_is_stale(model: Decoder) -> None:
    driver = Driver(model)
    a = Request(0, prompt(6, 1))
    driver.step([(a, 6)])
    driver.step([(a, 0)])
    driver.step([(a, 0)])
    a.last = -1
    assert code_of(driver.run(driver.plan([(a, 0)], reference=1)).error_message) == "stale_plan_generation"


def test_log_probabilities_are_those_of_the_raw_logits(model: Decoder) -> None:
    driver = Driver(model)
    a = Request(0, prompt(7, 1), logprobs=3, prompt_logprobs=2)
    b = Request(1, prompt(4, 2), temperature=1.5, logprobs=0)
    result = driver.step([(a, 7), (b, 4)])
    scores = torch.log_softmax(logits_of(reference("llama"), a.prompt), dim=-1)
    assert result.logprob_indptr.tolist() == [0, 4, 5]
    top = scores[-1].topk(3)
    assert result.logprob_ids[:4].tolist() == [a.out[0], *top.indices.tolist()]
    np.testing.assert_allclose(bits_float(result.logprob_values)[1:4], top.values.numpy(), atol=1e-4)
    other = torch.log_softmax(logits_of(reference("llama"), b.prompt), dim=-1)
    assert result.logprob_ids[4] == b.out[0]
    np.testing.assert_allclose(bits_float(result.logprob_values)[4], other[-1, b.out[0]], atol=1e-4)
    assert result.prompt_logprob_indptr.tolist() == [0, 3, 6, 9, 12, 15, 18]
    for position in range(6):
        part = slice(3 * position, 3 * position + 3)
        top = scores[position].topk(2)
        assert result.prompt_logprob_ids[part].tolist() == [a.prompt[position + 1], *top.indices.tolist()]
        want = [float(scores[position, a.prompt[position + 1]]), *top.values.tolist()]
        np.testing.assert_allclose(bits_float(result.prompt_logprob_values)[part], want, atol=1e-4)
        better = int((scores[position] > want[0]).sum())
        assert abs(int(result.prompt_logprob_ranks[position]) - (better + 1)) <= 1


def test_a_plan_without_rows_is_a_step(model: Decoder) -> None:
    driver = Driver(model)
    result = driver.step([], deltas={"scrub_pages": np.array([3, 5], dtype=np.int32)})
    assert result.generation == 1
    assert result.tokens.size == 0
    assert (driver.runner.pool[[3, 5]] == 0xFF).all()


def test_scrubbed_pages_and_reopened_slots_carry_nothing_over(model: Decoder) -> None:
    driver = Driver(model)
    a = Request(0, prompt(9, 1))
    driver.step([(a, 9)])
    old = driver.tables[0]
    again = Request(0, prompt(12, 2), incarnation=2)
    driver.free = np.concatenate([np.array(old, dtype=np.int32), driver.free])
    driver.step([(again, 12)], deltas={"scrub_pages": np.array(old, dtype=np.int32)})
    driver.step([(again, 0)])
    assert set(driver.tables[0]) & set(old)
    assert again.out == greedy(again.prompt, 2)


def nan_row(driver: Driver, request: Request) -> None:
    """Break the KV of a request's first page, and only that."""
    driver.runner.pool[driver.tables[request.slot][0]] = 0xFF


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "logprobs": 3},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.8, "top_k": 4},
        {"repetition": 1.3, "logprobs": 0},
    ],
)
def test_logits_that_are_not_finite_are_a_fault_of_their_request_alone(
    model: Decoder, sampling: dict[str, Any]
) -> None:
    driver = Driver(model)
    a, b = Request(0, prompt(6, 1), **sampling), Request(1, prompt(8, 2))
    driver.step([(a, 6), (b, 8)])
    nan_row(driver, a)
    plan = driver.plan([(a, 0), (b, 0)])
    result = driver.run(plan)
    assert [int(plan.requests.slot[i]) for i in result.faults.request] == [0]
    driver.note(plan, result, [(a, 0), (b, 0)])
    assert 0 <= a.out[-1] < 131
    driver.step([(b, 0)])
    assert b.out == greedy(b.prompt, 3)


def stale(plan: BatchPlan, **columns: int) -> BatchPlan:
    return replace(plan, requests=changed(plan.requests, 0, **columns))


REFUSALS: dict[str, tuple[str, Any]] = {
    "incarnation": ("stale_request_generation", lambda p: stale(p, incarnation=9)),
    "frontier": ("stale_kv_frontier", lambda p: stale(p, frontier=5)),
    "adapter": (
        "stale_slot_generation",
        lambda p: replace(
            stale(p, adapter_slot=1, adapter_generation=4),
            segment_adapters=np.array([1], np.int32),
            group_rows=np.array([0], np.int32),
            group_offsets=np.array([0, 1], np.int32),
            group_adapters=np.array([1], np.int32),
        ),
    ),
    "length": ("stale_kv_frontier", lambda p: replace(
        stale(p, kv_start=2), positions=p.positions - 4,
        samples=changed(p.samples, 0, position=lambda at: at - 4),
    )),
    "page": ("plan_page_table", lambda p: replace(p, page_deltas=p.page_deltas[:0])),
    "writer": ("plan_page_table", lambda p: replace(p, page_deltas=changed(p.page_deltas, 0, page=10_000))),
    "generation": ("stale_plan_generation", lambda p: replace(p, generation=1)),
    "gap": ("stale_plan_generation", lambda p: replace(p, generation=p.generation + 1)),
    "publish": ("stale_slot_generation", lambda p: replace(p, publishes=adapters((1, 3)))),
    "retire": ("stale_slot_generation", lambda p: replace(p, retires=adapters((1, 3)))),
    "token": ("plan_token_reference", lambda p: replace(p, tokens=np.array([131], np.int32))),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_stale_plan_is_refused_whole_and_changes_nothing(model: Decoder, name: str) -> None:
    code, damage = REFUSALS[name]
    driver = Driver(model, page_tokens=3)
    a = Request(0, prompt(6, 1))
    driver.step([(a, 3)])
    driver.step([(a, 3)])
    good = driver.plan([(a, 0)])
    assert len(good.page_deltas) == 1
    before = driver.runner.pool.clone()
    refused = driver.run(damage(good))
    assert code_of(refused.error_message) == code
    assert torch.equal(driver.runner.pool, before)
    consumed = name not in ("generation", "gap")
    result = driver.run(replace(good, generation=good.generation + consumed))
    assert result.error_message == ""
    assert result.tokens.tolist() == greedy(a.prompt, 2)[1:]


def test_two_requests_cannot_write_one_page(model: Decoder) -> None:
    driver = Driver(model)
    plan = driver.plan([(Request(0, prompt(3, 1)), 3), (Request(1, prompt(3, 2)), 3)])
    deltas = changed(plan.page_deltas, 1, page=plan.page_deltas.page[0])
    assert code_of(driver.run(replace(plan, page_deltas=deltas)).error_message) == "plan_page_table"


def test_requests_may_share_pages_that_both_only_read(model: Decoder) -> None:
    driver = Driver(model)
    first = Request(0, prompt(8, 1) + prompt(3, 2))
    driver.step([(first, 11)])
    other = Request(1, prompt(8, 1) + prompt(4, 3), planned=8)
    driver.tables[1] = []
    opened = open_rows([other])
    plan = driver.plan([(other, 4)], opens=[])
    shared = driver.tables[0][:2]
    plan = replace(
        plan,
        opens=opened,
        page_deltas=page_rows([(1, i, p) for i, p in enumerate([*shared, int(driver.take(1)[0])])]),
    )
    elsewhere = changed(opened, 0, kv_start=4)
    refused = driver.run(replace(plan, opens=elsewhere))
    assert refused.error_message.startswith("stale_kv_frontier: ")
    again = driver.run(replace(plan, generation=plan.generation + 1))
    assert again.tokens.tolist() == greedy(other.prompt, 1)


def test_a_failure_inside_a_step_leaves_the_mirrors_as_they_were(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(model)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(5, 2))
    driver.step([(a, 6)])
    plan = driver.plan([(a, 0), (b, 5)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of everything")

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.sampler, "sample", fail)
        result = driver.run(plan)
    assert result.error_message == "backend_failed: RuntimeError: out of everything"
    again = replace(plan, generation=plan.generation + 1)
    result = driver.run(again)
    assert result.error_message == ""
    driver.note(again, result, [(a, 0), (b, 5)])
    assert a.out == greedy(a.prompt, 2)
    assert b.out == greedy(b.prompt, 1)


def test_a_failure_gives_a_reopened_slot_back_to_its_request(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(model)
    a = Request(0, prompt(6, 1))
    driver.step([(a, 6)])
    table = driver.tables[0]
    plan = driver.plan([(Request(0, prompt(9, 2), incarnation=2), 9)])
    driver.tables[0] = table

    def fail(*_: object) -> None:
        raise RuntimeError("out of everything")

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.sampler, "sample", fail)
        assert driver.run(plan).error_message.startswith("backend_failed")
    driver.step([(a, 0)])
    assert a.out == greedy(a.prompt, 2)


def test_a_reopened_slot_has_no_pages_of_the_request_before(model: Decoder) -> None:
    driver = Driver(model)
    driver.step([(Request(0, prompt(9, 1)), 9)])
    plan = driver.plan([(Request(0, prompt(9, 2), incarnation=2), 9)])
    assert (
        code_of(driver.run(replace(plan, page_deltas=plan.page_deltas[1:])).error_message)
        == "plan_page_table"
    )


def test_a_page_that_a_running_request_reads_is_not_scrubbed_or_copied_over(model: Decoder) -> None:
    driver = Driver(model)
    a = Request(0, prompt(9, 1))
    driver.step([(a, 9)])
    page = np.array(driver.tables[0][:1], dtype=np.int32)
    plan = driver.plan([(a, 0)])
    copies = copy_row("00" * 32, 1, 1)
    scrub = driver.run(replace(plan, scrub_pages=page))
    assert code_of(scrub.error_message) == "plan_page_table"
    copy = driver.run(replace(plan, generation=3, copies=copies, copy_pages=page))
    assert code_of(copy.error_message) == "plan_page_table"
    assert driver.run(replace(plan, generation=4)).tokens.tolist() == greedy(a.prompt, 2)[1:]


def test_a_plan_launched_over_an_uncollected_failure_is_stale(model: Decoder) -> None:
    driver = Driver(model)
    a, b = Request(0, prompt(6, 1)), Request(1, prompt(5, 2))
    driver.step([(a, 6)])
    driver.runner.launch(stale(driver.plan([(a, 0)]), incarnation=9).pack())
    # It names nothing that the failed plan touched, and still was made for a state that never came.
    driver.runner.launch(driver.plan([(b, 5)]).pack())
    codes = [code_of(StepResult.unpack(driver.runner.collect()).error_message) for _ in range(2)]
    assert codes == ["stale_request_generation", "stale_plan_generation"]


def test_bytes_that_are_no_plan_are_answered(model: Decoder) -> None:
    driver = Driver(model)
    driver.runner.launch(b"\0" * 64)
    result = StepResult.unpack(driver.runner.collect())
    assert (result.generation, code_of(result.error_message)) == (1, "plan_malformed")
