"""Adapters through the runner: copied, validated, published, used beside the base, retired; PEFT is the
judge.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.drive import Driver, Request, logits_of
from tests.model.rig import Rig, check_engine, check_preemption
from tests.model.tiny import reference
from tests.model.tuned import CONFIGS, image, loaded, publish, tuned
from tests.prompts import prompt
from tests.sections import adapters, changed

from loraplex.model.copies import SteppedCopies
from loraplex.model.decoder import Decoder


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_a_mixed_batch_runs_each_row_under_its_own_adapter(
    root: Path, model: Decoder, page_tokens: int
) -> None:
    names = list(CONFIGS)
    driver = loaded(root, model, names, page_tokens)
    requests = [Request(i, prompt(5 + 2 * i, i), adapter=(i, 7 if i else 0), logprobs=2) for i in range(5)]
    results = [driver.step([(r, len(r.prompt)) for r in requests])]
    results += [driver.step([(r, 0) for r in requests]) for _ in range(3)]
    for request in requests:
        judge = tuned(names[request.slot - 1]) if request.slot else reference("llama")
        tokens = list(request.prompt)
        for step in range(4):
            scores = torch.log_softmax(logits_of(judge, tokens)[-1], dim=-1)
            assert request.out[step] == int(scores.argmax())
            value = results[step].logprob_values.view(np.float32)[3 * request.slot]
            assert value == pytest.approx(float(scores.max()), abs=1e-4)
            tokens.append(request.out[step])


def test_base_rows_are_bitwise_the_same_whatever_adapters_run_beside_them(root: Path, model: Decoder) -> None:
    values = []
    for slot in (0, 1, 2):
        driver = loaded(root, model, ["all-r4", "head-r2"])
        base = Request(0, prompt(9, 1), logprobs=5)
        other = Request(1, prompt(7, 2), adapter=(slot, 7 if slot else 0))
        first = driver.step([(other, 7), (base, 9)])
        second = driver.step([(base, 0), (other, 0)])
        values.append([*first.logprob_values.tolist(), *second.logprob_values.tolist(), *base.out])
    assert values[0] == values[1] == values[2]


def test_an_adapter_whose_bytes_differ_is_not_intact_and_cannot_be_published(
    root: Path, model: Decoder
) -> None:
    driver = Driver(model, pages=400)
    good = image(root, model, "all-r4", driver.kv.page_bytes)
    pages = good.pages.copy()
    pages[len(pages) // 2, 5] ^= 1
    assert driver.load(replace(good, pages=pages), 1, 7).copied.array.tolist() == [[1, 7, 0]]
    refused = driver.run(driver.plan([], deltas=publish(driver, 1, 7)))
    assert refused.error_message.startswith("stale_slot_generation: ")
    assert driver.load(good, 1, 8).copied.array.tolist() == [[1, 8, 1]]
    driver.step([], deltas=publish(driver, 1, 8))


def test_a_replay_that_is_ahead_of_its_copies_publishes_what_arrived_intact_and_nothing_else(
    root: Path, model: Decoder
) -> None:
    """A plan may publish a copy that this runner has not finished: it is waited for, and checked, before
    anything is visible.
    """
    driver = Driver(model, pages=400)
    driver.runner._residents._copies = copies = SteppedCopies(driver.runner.table, 0, 0)
    good, other = (image(root, model, name, driver.kv.page_bytes) for name in ("all-r4", "qv-r3"))
    pages = other.pages.copy()
    pages[-1, 3] ^= 1
    for slot, made in ((1, good), (2, replace(other, pages=pages)), (3, good)):
        driver.images.images[made.kernel_digest] = made
        begun = driver.run(driver.plan([], deltas=driver.copy(made, slot, 7)))
        assert (begun.error_message, begun.copied.array.tolist()) == ("", [])
    both = {"publishes": adapters((1, 7), (2, 7))}
    assert driver.run(driver.plan([], deltas=both)).error_message.startswith("copy_checksum: ")
    assert driver.runner.table.published.tolist() == [0] * driver.bounds.max_adapter_slots
    result = driver.step([], deltas=publish(driver, 1, 7))
    assert sorted(result.copied.array.tolist()) == [[1, 7, 1], [2, 7, 0]]
    assert driver.step([], deltas=publish(driver, 3, 7)).copied.array.tolist() == [[3, 7, 1]]
    assert driver.runner.table.published.tolist()[:4] == [0, 7, 0, 7]
    assert copies.ended() == []


def test_an_image_that_is_not_there_fails_its_copy_and_nothing_else(root: Path, model: Decoder) -> None:
    driver = Driver(model, pages=400)
    good = image(root, model, "qv-r3", driver.kv.page_bytes)
    request = Request(0, prompt(6, 1))
    result = driver.step([(request, 6)], deltas=driver.copy(good, 1, 7))
    assert result.copied.array.tolist() == [[1, 7, 0]]
    assert request.out == [int(logits_of(reference("llama"), request.prompt)[-1].argmax())]


def test_an_image_for_another_model_is_not_installed(root: Path, model: Decoder) -> None:
    driver = Driver(model, pages=400)
    good = image(root, model, "qv-r3", driver.kv.page_bytes)
    modules = good.modules.copy()
    modules[:, 2] += 1
    assert driver.load(replace(good, modules=modules), 1, 7).copied.array.tolist() == [[1, 7, 0]]


def test_a_published_slot_is_not_copied_over(root: Path, model: Decoder) -> None:
    driver = loaded(root, model, ["qv-r3"])
    refused = driver.load(image(root, model, "head-r2", driver.kv.page_bytes), 1, 8)
    assert refused.error_message.startswith("stale_slot_generation: ")


def test_rows_bind_only_the_published_generation(root: Path, model: Decoder) -> None:
    driver = Driver(model, pages=400)
    driver.load(image(root, model, "qv-r3", driver.kv.page_bytes), 1, 7)
    request = Request(0, prompt(6, 1), adapter=(1, 7))
    plan = driver.plan([(request, 6)])
    assert driver.run(plan).error_message.startswith("stale_slot_generation: ")
    driver.step([], deltas=publish(driver, 1, 7))
    stale = replace(plan, generation=4, requests=changed(plan.requests, 0, adapter_generation=8))
    assert driver.run(stale).error_message.startswith("stale_slot_generation: ")
    assert driver.run(replace(plan, generation=5)).error_message == ""
    driver.generation = 5
    driver.step([], deltas={"retires": adapters((1, 7))})
    request.last = 3
    assert driver.run(driver.plan([(request, 0)])).error_message.startswith("stale_slot_generation: ")


def test_adapter_deltas_of_a_failed_plan_may_come_again(
    root: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is retired, published and filled in one plan that fails inside; the next plan carries the same
    deltas.
    """
    driver = loaded(root, model, ["all-r4", "qv-r3"])
    third = image(root, model, "head-r2", driver.kv.page_bytes)
    driver.load(third, 3, 2)
    request = Request(0, prompt(6, 1), adapter=(2, 7))
    driver.images.images[third.kernel_digest] = third
    deltas = {
        **driver.copy(third, 1, 8),
        "retires": adapters((1, 7)),
        **publish(driver, 3, 2),
    }
    plan = driver.plan([(request, 6)], deltas=deltas)

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.sampler, "sample", fail)
        assert driver.run(plan).error_message.startswith("backend_failed: ")
    again = driver.run(replace(plan, generation=plan.generation + 1))
    assert again.error_message == ""
    assert again.copied.array.tolist() == [[1, 8, 1]]
    assert driver.runner.table.published.tolist() == [0, 0, 7, 2, 0]
    assert again.tokens.tolist() == [int(logits_of(tuned("qv-r3"), request.prompt)[-1].argmax())]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("pages", "reloads"), [(200, False), (40, True)])
def test_the_engine_over_the_runner_answers_as_peft_does(
    root: Path, model: Decoder, depth: int, pages: int, reloads: bool
) -> None:
    check_engine(Rig(root, model, depth=depth, pages=pages), reloads)


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_answer_the_same(root: Path, model: Decoder, depth: int) -> None:
    check_preemption(Rig(root, model, depth=depth, pages=28))
