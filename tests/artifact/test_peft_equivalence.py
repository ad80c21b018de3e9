"""What PEFT writes, read by us, is the function that PEFT computes: module by module, for many
configurations.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from tests.artifact.peft_configs import ALL, GENERAL, LORA, lora
from tests.artifact.tiny import TinyTensors, edit_config, save_adapter, tiny_base, tiny_model

from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import AdaptedModule, Artifact, TensorRole
from loraplex.artifact.vectors import vectors_of
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module
from loraplex.core.layout import Factor


def load(tmp_path: Path, config: Any, bias: bool = False) -> tuple[torch.nn.Module, Artifact]:
    model = save_adapter(tmp_path, config, bias=bias)
    return model, load_adapter(tmp_path, tiny_base(bias), TinyTensors(bias))


def peft_layers(model: torch.nn.Module) -> dict[str, BaseTunerLayer]:
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


def delta(module: AdaptedModule) -> np.ndarray:
    a = module.tensors[TensorRole.A].float32().astype(np.float64)
    b = module.tensors[TensorRole.B].float32().astype(np.float64)
    product = module.scale * (b @ a)
    return product.T if module.module is Module.EMBED else product


@pytest.mark.parametrize("name", LORA)
def test_effective_delta_is_pefts(tmp_path: Path, name: str) -> None:
    model, artifact = load(tmp_path, LORA[name])
    layers = peft_layers(model)
    assert {m.name for m in artifact.modules} == set(layers)
    assert artifact.tensors_applied == artifact.tensors_total
    for module in artifact.modules:
        expected = layers[module.name].get_delta_weight("default").detach().double().numpy()
        np.testing.assert_allclose(delta(module), expected, rtol=1e-6, atol=1e-6 * abs(expected).max())
        assert np.float32(module.scale).view(np.int32) == module.scale_bits


@pytest.mark.parametrize("name", GENERAL)
def test_general_operator_is_pefts_forward(tmp_path: Path, name: str) -> None:
    config, bias, methods = GENERAL[name]
    model, artifact = load(tmp_path, config, bias)
    assert artifact.methods == methods
    modules = dict(model.base_model.model.named_modules())
    base = TinyTensors(bias)
    assert set(peft_layers(model)) <= {m.name for m in artifact.modules}
    for module in artifact.modules:
        x = torch.randn(5, module.d_in, generator=torch.Generator().manual_seed(3))
        expected = modules[module.name](x).detach().double().numpy()
        np.testing.assert_allclose(
            general(module, base, x.double().numpy()), expected, rtol=1e-5, atol=1e-5 * abs(expected).max()
        )


def general(module: AdaptedModule, base: TinyTensors, x: np.ndarray) -> np.ndarray:
    """y = g * ((x * h) W^T + b + s (x A^T) B^T) + c: c is relative to the base's own bias b."""
    vectors = vectors_of(module, base)
    y = (x * vectors.get(Factor.H, 1.0)) @ base.weight(module.layer, module.module).astype(np.float64).T
    if module.rank:
        a, b = (module.tensors[role].float32().astype(np.float64) for role in (TensorRole.A, TensorRole.B))
        y = y + module.scale * (x @ a.T) @ b.T
    bias = base.bias(module.layer, module.module)
    y = y + (0.0 if bias is None else bias.astype(np.float64))
    return y * vectors.get(Factor.G, 1.0) + vectors.get(Factor.C, 0.0)


def loads_as(folder: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits of the folder's adapter as PEFT loads it; None where it cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice is not what is tested here
            return PeftModel.from_pretrained(tiny_model(), folder).eval()(ids).logits
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError):
        return None


@pytest.mark.parametrize(
    "config",
    [
        lora(task_type="CAUSAL_LM"),
        IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["lora", "ia3"],
)
def test_null_means_what_it_means_to_peft(tmp_path: Path, config: Any) -> None:
    """Where PEFT loads the same function from a field that is null, so do we."""
    model = save_adapter(tmp_path, config)
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    modules = load_adapter(tmp_path, tiny_base()).modules
    same = 0
    for name in record:
        edit_config(tmp_path, lambda c, name=name: c | {name: None})
        found = loads_as(tmp_path, ids)
        if found is not None:
            assert torch.equal(found, expected), name
            assert [m.name for m in load_adapter(tmp_path, tiny_base()).modules] == [
                m.name for m in modules
            ], name
            same += 1
        edit_config(tmp_path, lambda _: record)
    assert same > len(record) // 2


def test_tying_asks_for_nothing_where_no_tied_module_is_adapted(tmp_path: Path) -> None:
    base = tiny_base()
    load(tmp_path / "linears", lora(target_modules=ALL))
    expected = delta(load_adapter(tmp_path / "linears", base).modules[0])
    edit_config(tmp_path / "linears", lambda c: c | {"ensure_weight_tying": True})
    assert np.array_equal(delta(load_adapter(tmp_path / "linears", base).modules[0]), expected)
    load(tmp_path / "head", lora(target_modules=["lm_head", "q_proj"]))
    edit_config(tmp_path / "head", lambda c: c | {"ensure_weight_tying": True})
    untied = load_adapter(tmp_path / "head", replace(base, tied=False), TinyTensors())
    assert "lm_head" in {m.name for m in untied.modules}
    with pytest.raises(CallerError, match="lm_head is adapted") as caught:
        load_adapter(tmp_path / "head", replace(base, tied=True), TinyTensors())
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED


def test_there_are_enough_configurations() -> None:
    assert len(LORA) + len(GENERAL) >= 40
