"""What PEFT writes, read by us, is the function that PEFT computes: module by module, for many configurations."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from tests.artifact.tiny import TinyTensors, edit_config, save_adapter, tiny_base, tiny_model

from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import AdaptedModule, Artifact, Method, Role
from loraplex.artifact.vectors import vectors_of
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module
from loraplex.core.layout import Factor

QV = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(**changes: Any) -> LoraConfig:
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": QV}
    return LoraConfig(**(fields | changes))


LORA: dict[str, LoraConfig] = {
    "plain": lora(),
    "rank 1": lora(r=1),
    "rank 3, odd": lora(r=3, lora_alpha=7),
    "rank larger than a dimension": lora(r=40),
    "alpha 1": lora(lora_alpha=1),
    "alpha not divisible": lora(r=3, lora_alpha=1),
    "alpha with a fraction": lora(lora_alpha=0.1),
    "rslora": lora(use_rslora=True),
    "rslora odd rank": lora(r=5, lora_alpha=3, use_rslora=True),
    "q only": lora(target_modules=["q_proj"]),
    "k only": lora(target_modules=["k_proj"]),
    "v only": lora(target_modules=["v_proj"]),
    "o only": lora(target_modules=["o_proj"]),
    "down only": lora(target_modules=["down_proj"]),
    "all names": lora(target_modules=ALL),
    "all-linear": lora(target_modules="all-linear"),
    "suffix with parent": lora(target_modules=["self_attn.q_proj", "mlp.up_proj"]),
    "full name": lora(target_modules=["model.layers.1.self_attn.q_proj"]),
    "full and short names": lora(target_modules=["model.layers.1.self_attn.q_proj", "v_proj"]),
    "name that matches nothing": lora(target_modules=["q_proj", "c_attn"]),
    "pattern": lora(target_modules=r".*\.(q|k)_proj"),
    "pattern with layers": lora(target_modules=r".*layers\.[02]\.mlp\.(gate|up)_proj"),
    "pattern with look-ahead": lora(target_modules=r"^(?!.*layers\.0)(?!lm_head).*_proj$"),
    "pattern, lazy": lora(target_modules=r"(?:.*?self_attn.*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.up_proj)"),
    "one layer": lora(layers_to_transform=1),
    "two layers": lora(layers_to_transform=[0, 2]),
    "layers and pattern": lora(layers_to_transform=[1], layers_pattern="layers"),
    "layers and pattern list": lora(layers_to_transform=[1], layers_pattern=["blocks", "layers"]),
    "full name escapes layers": lora(
        target_modules=["model.layers.0.self_attn.q_proj", "v_proj"], layers_to_transform=[2]
    ),
    "exclude names": lora(target_modules=ALL, exclude_modules=["down_proj", "layers.1.self_attn.q_proj"]),
    "exclude pattern": lora(target_modules=ALL, exclude_modules=r".*layers\.2\..*"),
    "rank pattern": lora(rank_pattern={"q_proj": 2}),
    "rank and alpha pattern": lora(rank_pattern={"v_proj": 8}, alpha_pattern={"v_proj": 3, "q_proj": 5}),
    "rank pattern by full name": lora(rank_pattern={"model.layers.1.self_attn.q_proj": 6}),
    "rank pattern, regex": lora(rank_pattern={r"layers\.[01]\.self_attn\.(q|v)_proj": 7}),
    "rank pattern, anchored": lora(rank_pattern={r"^model\.layers\.0.*v_proj": 1, "^q_proj": 9}),
    "rank pattern, first wins": lora(rank_pattern={"a": 3, "layers.0.self_attn.q_proj": 2, "q_proj": 6}),
    "rank pattern, part of a name": lora(rank_pattern={"proj": 2, "_proj": 3}),
    "rslora with patterns": lora(use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 9.5}),
    "gaussian": lora(init_lora_weights="gaussian"),
    "random init": lora(init_lora_weights=False),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "dropout": lora(lora_dropout=0.3),
    "fan_in_fan_out": lora(fan_in_fan_out=True),
    "lm_head": lora(target_modules=["lm_head"]),
    "embed": lora(target_modules=["embed_tokens"]),
    "embed, head and q": lora(target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "embed rslora": lora(target_modules=["embed_tokens"], use_rslora=True, r=3),
    "alora": lora(alora_invocation_tokens=[1, 2, 3], task_type="CAUSAL_LM"),
}  # fmt: skip

GENERAL: dict[str, tuple[Any, bool, set[Method]]] = {
    "dora": (lora(use_dora=True), False, {Method.LORA, Method.DORA}),
    "dora rslora all": (lora(use_dora=True, use_rslora=True, target_modules=ALL), False, {Method.RSLORA, Method.DORA}),
    "dora over biases": (lora(use_dora=True, target_modules=ALL), True, {Method.LORA, Method.DORA}),
    "dora lm_head": (lora(use_dora=True, target_modules=["lm_head"]), False, {Method.LORA, Method.DORA}),
    "lora_bias": (lora(lora_bias=True), False, {Method.LORA, Method.LORA_BIAS}),
    "lora_bias over biases": (lora(lora_bias=True), True, {Method.LORA, Method.LORA_BIAS}),
    "bias lora_only": (lora(bias="lora_only"), True, {Method.LORA, Method.BITFIT}),
    "bias all": (lora(bias="all"), True, {Method.LORA, Method.BITFIT}),
    "bias all, none there": (lora(bias="all"), False, {Method.LORA}),
    "dora with bias": (lora(use_dora=True, bias="lora_only"), True, {Method.LORA, Method.DORA, Method.BITFIT}),
    "ia3": (IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]), False, {Method.IA3}),
    "ia3 over biases": (IA3Config(target_modules=["k_proj", "o_proj"], feedforward_modules=["o_proj"]), True, {Method.IA3}),
    "ia3 without feedforward": (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), True, {Method.IA3}),
    "ia3 patterns": (IA3Config(target_modules=r".*\.(k|down)_proj", feedforward_modules=r".*down_proj"), False, {Method.IA3}),
}  # fmt: skip


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
    a = module.tensors[Role.A].float32().astype(np.float64)
    b = module.tensors[Role.B].float32().astype(np.float64)
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
        a, b = (module.tensors[role].float32().astype(np.float64) for role in (Role.A, Role.B))
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
