"""An adapter of every method that is served, and one mixed batch of them, with PEFT as the judge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.model.drive import Driver, Request, logits_of
from tests.model.resident_base import BaseWeights
from tests.model.tiny import VOCAB, decoder, reference, save
from tests.sections import adapters

from loraplex.artifact.convert import to_image
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import Artifact
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import base_modules
from loraplex.core.layout import AdapterImage, Geometry, PageGeometry
from loraplex.model.decoder import Decoder

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**changes: Any) -> peft.PeftConfig:
    return peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **changes})


def ia3(targets: list[str], feedforward: list[str]) -> peft.PeftConfig:
    return peft.IA3Config(target_modules=targets, feedforward_modules=feedforward)


CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "lora": lambda: lora(target_modules=ALL, rank_pattern={"o_proj": 1, "down_proj": 7},
    alpha_pattern={"v_proj": 2}),
    "rslora": lambda: lora(r=16, use_rslora=True, target_modules=["k_proj", "up_proj"]),
    "dora": lambda: lora(target_modules=ALL, use_dora=True),
    "dora-head": lambda: lora(target_modules=["lm_head", "gate_proj"], use_dora=True, use_rslora=True),
    "dora-bitfit": lambda: lora(use_dora=True, bias="all"),
    "lora-bias": lambda: lora(target_modules=["q_proj", "down_proj", "up_proj"], lora_bias=True),
    "bitfit": lambda: lora(bias="all"),
    "bitfit-only": lambda: lora(bias="lora_only", target_modules=["k_proj", "down_proj"]),
    "ia3": lambda: ia3(["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "ia3-splits-qkv": lambda: ia3(["q_proj", "v_proj", "gate_proj", "up_proj", "lm_head"],
    ["q_proj", "up_proj", "lm_head"]),
    "embedding": lambda: lora(target_modules=["embed_tokens", "lm_head", "q_proj"]),
}  # fmt: skip
INVOCATION = [7, 8]
SHARING: dict[str, Callable[[], peft.PeftConfig]] = {
    "head": lambda: lora(target_modules=["lm_head"]),
    "alora": lambda: lora(target_modules=ALL, alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM"),
}
"""Adapters whose requests take KV rows of the base: all of them, and those before the invocation."""
BASE = "llama-biased"


@cache
def tuned(name: str, family: str = BASE, spread: float = 0.2) -> Any:
    """The PEFT model of one adapter over a copy of a tiny model with biases, every parameter of it random.

    spread: standard deviation of factors and trained biases.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about targets and biases
        base = type(reference(family))(reference(family).config)
        base.load_state_dict(reference(family).state_dict())
        model = peft.get_peft_model(base, (CONFIGS | SHARING)[name]())
    generator = torch.Generator().manual_seed(len(name))
    for parameter_name, parameter in model.named_parameters():
        if "magnitude" in parameter_name or "ia3_" in parameter_name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif "lora_" in parameter_name or (parameter.requires_grad and parameter_name.endswith("bias")):
            parameter.data.normal_(0.0, spread, generator=generator)
    return model.eval()


def write_folders(
    root: Path, family: str = BASE, spread: float = 0.2, names: Sequence[str] = tuple(CONFIGS)
) -> Path:
    """`root/base` and `root/NAME` of every adapter."""
    save(family, root / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that embeddings are saved too
        for name in names:
            tuned(name, family, spread).save_pretrained(root / name)
    return root


def artifact(root: Path, name: str, model: Decoder | None = None) -> Artifact:
    model = model or decoder(BASE, root / "base")
    return load_adapter(root / name, base_modules(model.spec), BaseWeights(model.spec, model.weights))


def image(root: Path, name: str, page_bytes: int, model: Decoder | None = None) -> AdapterImage:
    """The image of one adapter in the type of a model's weights."""
    model = model or decoder(BASE, root / "base")
    dtype = model.weights.dtype
    geometry = PageGeometry(Geometry.RANK_ROWS, dtype.itemsize, row_page_bytes=page_bytes)
    weights = BaseWeights(model.spec, model.weights)
    kind = Dtype(str(dtype).removeprefix("torch."))
    return to_image(artifact(root, name, model), geometry, kind, "0" * 64, weights)


def driver_of(model: Decoder, names: Sequence[str], **options: Any) -> Driver:
    """A driver with room for these adapters and a request of each, and one of the base."""
    count = len(names) + 1
    return Driver(model, options.pop("page_tokens", 4), slots=count, pages=700, adapters=count, **options)


def check_mixed_batch(root: Path, driver: Driver, names: Sequence[str], steps: int = 2) -> None:
    """Every adapter and the base in one prefill and then in decode steps; PEFT's choices and log
    probabilities.
    """
    load_all(root, driver, names)
    rng = np.random.default_rng(4)
    requests = [
        Request(
            i,
            rng.integers(0, VOCAB, 3 + i % 3).tolist(),
            adapter=(i, 7 if i else 0),
            logprobs=0,
            prompt_logprobs=0,
        )
        for i in range(len(names) + 1)
    ]
    results = [driver.step([(r, len(r.prompt)) for r in requests])]
    results += [driver.step([(r, 0) for r in requests]) for _ in range(steps - 1)]
    at = 0
    for request in requests:
        judge = tuned(names[request.slot - 1]) if request.slot else reference(BASE)
        scores = torch.log_softmax(logits_of(judge, request.prompt + request.out), dim=-1)
        count = len(request.prompt) - 1
        got = results[0].prompt_logprob_values.view(np.float32)[at : at + count]
        expected = scores[torch.arange(count), torch.tensor(request.prompt[1:])]
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-4, err_msg=str(request.slot))
        at += count
        for step, result in enumerate(results):
            row = scores[count + step]
            assert request.out[step] == int(row.argmax())
            value = result.logprob_values.view(np.float32)[request.slot]
            assert value == pytest.approx(float(row.max()), abs=1e-4)


def load_all(root: Path, driver: Driver, names: Sequence[str]) -> None:
    """Adapters in slots 1, 2, ..., generation 7 each."""
    page_bytes, model = driver.kv.page_bytes, driver.runner.decoder
    for slot, name in enumerate(names, start=1):
        loaded = driver.load(image(root, name, page_bytes, model), slot, 7)
        assert loaded.copied.array.tolist() == [[slot, 7, 1]]
        driver.step([], deltas={"publishes": adapters((slot, 7))})
