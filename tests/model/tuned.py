"""Adapters that PEFT wrote over the tiny Llama, their images, and drivers that hold them."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from tests.model.drive import Driver
from tests.model.resident_base import BaseWeights
from tests.model.tiny import reference, save
from tests.sections import adapters

from loraplex.artifact.convert import to_image
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import base_modules
from loraplex.core.layout import AdapterImage, Geometry, PageGeometry
from loraplex.model.decoder import Decoder

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "all-r4": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "qv-r3": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "head-r2": {"r": 2, "lora_alpha": 4, "target_modules": ["lm_head", "down_proj"]},
    "rs-r16": {"r": 16, "lora_alpha": 4, "use_rslora": True,
    "target_modules": ["k_proj", "up_proj", "embed_tokens"]},
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
