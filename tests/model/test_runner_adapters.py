"""Adapters through the runner: copied, validated, published, used beside the base, retired; PEFT is the judge."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.engine.rig import sampling
from tests.model.drive import Driver, Images, Request, logits_of
from tests.model.tiny import VOCAB, reference, save
from tests.sections import adapters, changed

from loraplex.artifact.convert import to_image
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import base_modules
from loraplex.core.events import AdapterTransition, Event, RequestPreempted
from loraplex.core.layout import AdapterImage, Geometry, PageGeometry, size_class_for
from loraplex.core.messages import RegisterAdapter, Submit
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.model.base_values import BaseWeights
from loraplex.model.copies import SteppedCopies
from loraplex.model.decoder import Decoder
from loraplex.model.runner import ModelRunner, allocate_pool
from loraplex.sim.world import EventLog, MemoryMailbox, VirtualClock

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "all-r4": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "qv-r3": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "head-r2": {"r": 2, "lora_alpha": 4, "target_modules": ["lm_head", "down_proj"]},
    "rs-r16": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ["k_proj", "up_proj", "embed_tokens"]},
}  # fmt: skip


def make_root(root: Path) -> Path:
    """A folder with the base and every adapter."""
    save("llama", root / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that embeddings are saved too
        for name in CONFIGS:
            tuned(name).save_pretrained(root / name)
    return root


@cache
def tuned(name: str) -> Any:
    """The PEFT model of one adapter over a copy of the tiny Llama."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about targets
        config = reference("llama").config
        base = type(reference("llama"))(config)
        base.load_state_dict(reference("llama").state_dict())
        model = peft.get_peft_model(base, peft.LoraConfig(**CONFIGS[name]))
    generator = torch.Generator().manual_seed(len(name))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def image(root: Path, model: Decoder, name: str, page_bytes: int) -> AdapterImage:
    weights = BaseWeights(model.spec, model.weights)
    artifact = load_adapter(root / name, base_modules(model.spec), weights)
    geometry = PageGeometry(Geometry.RANK_ROWS, 4, row_page_bytes=page_bytes)
    return to_image(artifact, geometry, Dtype.FLOAT32, "0" * 64, weights)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def publish(driver: Driver, slot: int, generation: int) -> dict[str, Any]:
    return {"publishes": adapters((slot, generation))}


def loaded(
    root: Path, model: Decoder, names: list[str], page_tokens: int = 4, executor: Any = None
) -> Driver:
    """A driver with the adapters in slots 1, 2, ..., generation 7 each."""
    driver = Driver(model, page_tokens, pages=400, executor=executor)
    for slot, name in enumerate(names, start=1):
        result = driver.load(image(root, model, name, driver.kv.page_bytes), slot, 7)
        assert result.copied.array.tolist() == [[slot, 7, 1]]
        driver.step([], deltas=publish(driver, slot, 7))
    return driver


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
    """A plan may publish a copy that this runner has not finished: it is waited for, and checked, before anything is visible."""
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
    """A slot is retired, published and filled in one plan that fails inside; the next plan carries the same deltas."""
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


class Rig:
    """The whole control plane over the model runner, in one process."""

    def __init__(
        self,
        root: Path,
        model: Decoder,
        *,
        depth: int,
        pages: int,
        executor: Any = None,
        images: Images | None = None,
        names: tuple[str, ...] = tuple(CONFIGS),
        **changes: Any,
    ) -> None:
        kv = model.spec.kv_shape(4, 4)
        sizes: dict[str, Any] = {
            "kv": kv, "num_pages": pages, "max_requests": 8, "max_model_len": 64, "token_budget": 24, "vocab_size": VOCAB,
            "depth": depth, "max_adapter_slots": 6, "growth_horizon": 4, "scrub": True,
        }  # fmt: skip
        self.limits = limits = EngineLimits(**{**sizes, **changes})
        self.images, self.mailbox, self.log = images or Images(), MemoryMailbox(), EventLog()
        self.clock = VirtualClock()
        pool = allocate_pool(pages, kv.page_bytes, model.weights.device, poison=True)
        made = None if executor is None else executor(kv, limits.bounds)
        self.runner = ModelRunner(model, kv, limits.bounds, self.images, pool=pool, executor=made)
        self.engine = Engine(limits, self.runner, self.mailbox, self.clock, self.log)
        for call, name in enumerate(names):
            made = image(root, model, name, kv.page_bytes)
            self.images.images[made.kernel_digest] = made
            ranks = tuple(
                sorted({(int(r), int((made.modules[:, 2] == r).sum())) for r in made.modules[:, 2]})
            )
            targets = tuple(sorted(set(made.modules[:, 1].tolist())))
            self.mailbox.inbox.append(
                RegisterAdapter(
                    call,
                    name,
                    made.kernel_digest,
                    len(made.pages),
                    ranks,
                    targets,
                    made.pages.nbytes,
                    size_class_for(kv.page_bytes, made.pages.shape[1]),
                )
            )

    def submit(self, name: str, tokens: list[int], adapter: str | None, count: int) -> None:
        packed = np.array(tokens, dtype="<i4").tobytes()
        self.mailbox.inbox.append(Submit(name, packed, sampling(max_tokens=count), adapter))

    def run(self) -> list[Event]:
        for _ in range(500):
            self.engine.step()
            if self.engine.idle and not self.mailbox.inbox:
                self.engine.check()
                return self.log.events
        raise AssertionError("the engine did not come to rest")


def assert_answers(rig: Rig, asked: dict[str, tuple[list[int], str | None]], count: int) -> None:
    """Every request ended well, and each token is what PEFT (or the base) chooses after the tokens before it."""
    for name, (tokens, adapter) in asked.items():
        assert [(e.code, e.finish_reason) for e in rig.mailbox.ended[name]] == [(None, "length")]
        judge = tuned(adapter) if adapter else reference("llama")
        known = tokens + rig.mailbox.tokens[name]
        assert len(known) == len(tokens) + count
        choices = logits_of(judge, known).argmax(dim=-1).tolist()
        assert known[len(tokens) :] == choices[len(tokens) - 1 : -1]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("pages", "reloads"), [(200, False), (40, True)])
def test_the_engine_over_the_runner_answers_as_peft_does(
    root: Path, model: Decoder, depth: int, pages: int, reloads: bool
) -> None:
    check_engine(Rig(root, model, depth=depth, pages=pages), reloads)


def check_engine(rig: Rig, reloads: bool) -> None:
    """Ten requests over the base and every adapter. reloads: the pool is so small that adapters come back."""
    asked = {f"r{i}": (prompt(4 + 5 * (i % 4), i), [None, *CONFIGS][i % 5]) for i in range(10)}
    for name, (tokens, adapter) in asked.items():
        rig.submit(name, tokens, adapter, 10)
    events = rig.run()
    assert_answers(rig, asked, 10)
    loads = Counter(e.adapter for e in events if isinstance(e, AdapterTransition) and e.after == "loading")
    assert (max(loads.values()) > 1) is reloads


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_answer_the_same(root: Path, model: Decoder, depth: int) -> None:
    check_preemption(Rig(root, model, depth=depth, pages=28))


def check_preemption(rig: Rig) -> None:
    """More history than the pool of 28 pages holds."""
    asked = {f"r{i}": (prompt(6, i), [None, "qv-r3"][i % 2]) for i in range(4)}
    for name, (tokens, adapter) in asked.items():
        rig.submit(name, tokens, adapter, 30)
    events = rig.run()
    assert any(isinstance(e, RequestPreempted) for e in events)
    assert_answers(rig, asked, 30)
