"""Vectors of general methods: made from the checkpoint, stored as float32 extents beside the factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig
from tests.artifact.tiny import TinyTensors, edit_tensors, save_adapter, tiny_base, tiny_model

from loraplex.artifact.checkpoint import CheckpointTensors
from loraplex.artifact.convert import to_image
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import Artifact
from loraplex.artifact.tensors import Dtype
from loraplex.artifact.vectors import ServedTensors, vectors_of
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module
from loraplex.core.layout import Factor, Geometry, PageGeometry

BASE = "ab" * 32
CONFIGS: dict[str, Any] = {
    "dora": LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=True),
    "lora_bias": LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True),
    "bitfit": LoraConfig(r=2, target_modules=["q_proj"], bias="all"),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def load(folder: Path, name: str) -> Artifact:
    save_adapter(folder, CONFIGS[name], bias=True)
    return load_adapter(folder, tiny_base(bias=True), TinyTensors(bias=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_lie_in_float32_extents(tmp_path: Path, name: str) -> None:
    artifact = load(tmp_path, name)
    base = TinyTensors(bias=True)
    image = to_image(
        artifact, PageGeometry(Geometry.RANK_ROWS, 2, row_page_bytes=160), Dtype.BFLOAT16, BASE, base
    )
    seen = 0
    for module in artifact.modules:
        for factor, vector in vectors_of(module, ServedTensors(base, Dtype.BFLOAT16)).items():
            got = np.zeros_like(vector)
            for row in image.extents.tolist():
                if tuple(row[:3]) == (module.layer, int(module.module), int(factor)):
                    _, _, _, _, _, lo, n, page, offset = row
                    got[lo : lo + n] = image.pages[page, offset : offset + 4 * n].copy().view(np.float32)
                    seen += 1
            np.testing.assert_array_equal(got, vector)
    assert seen >= len(artifact.modules)


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_that_need_the_base_are_refused_without_it(tmp_path: Path, name: str) -> None:
    artifact = load(tmp_path, name)
    geometry = PageGeometry(Geometry.RANK_ROWS, 4, row_page_bytes=1024)
    if name in ("lora_bias", "ia3"):  # s times the bias of B, or a gain: nothing of the base is needed
        assert to_image(artifact, geometry, Dtype.FLOAT32, BASE).key
        return
    with pytest.raises(CallerError) as caught:
        to_image(artifact, geometry, Dtype.FLOAT32, BASE)
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED


def test_a_row_of_norm_zero_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))

    class Zeros(TinyTensors):
        def weight(self, layer: int, module: Module) -> np.ndarray:
            return np.zeros_like(super().weight(layer, module))

    edit_tensors(tmp_path, lambda t: {n: torch.zeros_like(v) if "lora_B" in n else v for n, v in t.items()})
    artifact = load_adapter(tmp_path, tiny_base())
    with pytest.raises(CallerError) as caught:
        vectors_of(artifact.modules[0], Zeros())
    assert caught.value.code is ErrorCode.ADAPTER_NOT_FINITE
    assert "has norm 0" in caught.value.message


def test_a_vector_that_overflows_float32_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    edit_tensors(tmp_path, lambda t: {n: v * 1e38 if "magnitude" in n else v * 1e-9 for n, v in t.items()})
    artifact = load_adapter(tmp_path, tiny_base())

    class Small(TinyTensors):
        def weight(self, layer: int, module: Module) -> np.ndarray:
            return super().weight(layer, module) * np.float32(1e-9)

    with pytest.raises(CallerError) as caught:
        vectors_of(artifact.modules[0], Small())
    assert caught.value.code is ErrorCode.ADAPTER_NOT_FINITE
    assert "does not fit float32" in caught.value.message


@pytest.mark.parametrize("shard_size", ["5GB", "30KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_folder_gives_its_weights(tmp_path: Path, shard_size: str, dtype: torch.dtype) -> None:
    model = tiny_model(bias=True).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    base = tiny_base(bias=True)
    tensors = CheckpointTensors(tmp_path, base)
    modules = dict(model.named_modules())
    for module in base.modules():
        expected = modules[module.name].weight.detach().float().numpy()
        np.testing.assert_array_equal(tensors.weight(module.layer, module.module), expected)
        bias = tensors.bias(module.layer, module.module)
        if module.has_bias:
            np.testing.assert_array_equal(bias, modules[module.name].bias.detach().float().numpy())
        else:
            assert bias is None


def test_a_tied_output_layer_is_the_embedding(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    tensors = CheckpointTensors(tmp_path, tiny_base())
    np.testing.assert_array_equal(tensors.weight(0, Module.LM_HEAD), tensors.weight(0, Module.EMBED))


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    wider = tiny_base(layers=4)
    for layer, module in ((3, Module.Q),):
        with pytest.raises(CallerError) as caught:
            CheckpointTensors(tmp_path, wider).weight(layer, module)
        assert caught.value.code is ErrorCode.MODEL_WEIGHTS_INVALID


def test_vectors_are_absent_for_plain_lora(tmp_path: Path) -> None:
    save_adapter(tmp_path, LoraConfig(r=2, target_modules=["q_proj"]), bias=True)
    artifact = load_adapter(tmp_path, tiny_base(bias=True))
    assert all(vectors_of(m, None) == {} for m in artifact.modules)
    assert set(Factor) == {Factor.A, Factor.B, Factor.H, Factor.G, Factor.C}
