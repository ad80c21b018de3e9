"""Configurations: what each family's config.json means, and that everything not implemented is refused by
name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.tiny import CPU, FAMILIES, reference, save
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ids import Module
from loraplex.model.dtypes import resolve_dtype
from loraplex.model.rope import inverse_frequencies
from loraplex.model.spec import Family, RopeKind, RopeSpec, module_name, spec_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "rope_theta": 500.0, "rope_interleaved": False, "quantization_config": None,
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def scaled(**table: Any) -> dict[str, Any]:
    return {"rope_scaling": table}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_llama_is_read() -> None:
    spec = spec_from_config(LLAMA)
    assert (spec.family, spec.head_dim, spec.q_size, spec.kv_size) == (Family.LLAMA, 8, 32, 16)
    assert (spec.rms_eps, spec.tied_embeddings, spec.dtype, spec.windows) == (
        1e-5,
        True,
        "bfloat16",
        (None, None),
    )
    assert spec.rope == RopeSpec(500.0)
    assert [spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm] == [False] * 4


def test_kv_shape_and_module_dimensions() -> None:
    spec = spec_from_config({**LLAMA, "head_dim": 16})
    assert spec.kv_shape(2, 5).page_bytes == 5 * 2 * 2 * 2 * 16 * 2
    dims = spec.module_dims().dims
    assert dims[Module.Q] == (32, 64)
    assert dims[Module.V] == (32, 32)
    assert dims[Module.O] == (64, 32)
    assert dims[Module.DOWN] == (64, 32)
    assert dims[Module.LM_HEAD] == (32, 100)
    assert dims[Module.EMBED] == (100, 32)
    assert module_name(1, Module.GATE) == "model.layers.1.mlp.gate_proj"
    assert module_name(0, Module.LM_HEAD) == "lm_head"


def test_rope_is_read_from_both_places() -> None:
    old = spec_from_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}).rope
    without_theta = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new = spec_from_config(
        {**without_theta, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}
    ).rope
    assert old == new == RopeSpec(500.0, RopeKind.LINEAR, 2.0)
    assert spec_from_config({**LLAMA, **scaled(**LLAMA3)}).rope.original_positions == 32
    without = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert spec_from_config({**LLAMA, **scaled(**without)}).rope.original_positions == 64


@pytest.mark.parametrize("name", FAMILIES)
def test_frequencies_equal_transformers(name: str) -> None:
    config = reference(name).config
    spec = spec_from_config({**config.to_dict(), "architectures": None})
    ours, scale = inverse_frequencies(spec.rope, spec.head_dim)
    if spec.rope.kind is RopeKind.DEFAULT:
        theta = config.rope_parameters["rope_theta"]
        theirs, want = 1.0 / theta ** (torch.arange(0, spec.head_dim, 2).float() / spec.head_dim), 1.0
    else:
        theirs, want = ROPE_INIT_FUNCTIONS[spec.rope.kind.value](config, CPU)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(want, rel=1e-9)


def test_windows() -> None:
    assert spec_from_config({**MISTRAL, "sliding_window": 16}).windows == (16, 16)
    assert spec_from_config({**MISTRAL, "sliding_window": None}).windows == (None, None)
    assert spec_from_config(MISTRAL).windows == (4096, 4096)
    assert spec_from_config({**QWEN2, "sliding_window": 16}).windows == (None, None)
    used = {**QWEN2, "use_sliding_window": True, "sliding_window": 16}
    assert spec_from_config({**used, "max_window_layers": 1}).windows == (None, 16)
    assert spec_from_config({**used, "layer_types": ["sliding_attention", "full_attention"]}).windows == (
        16,
        None,
    )


def test_biases_and_norms_by_family() -> None:
    assert spec_from_config(QWEN2).qkv_bias
    assert not spec_from_config(QWEN2).o_bias
    qwen3 = spec_from_config({**QWEN3, "attention_bias": True, "head_dim": 16})
    assert qwen3.qk_norm
    assert qwen3.qkv_bias
    assert qwen3.o_bias
    assert spec_from_config(QWEN3).head_dim == 128
    llama = spec_from_config({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("model_type", {**LLAMA, "model_type": "gpt2"}),
    ("model_type", {k: v for k, v in LLAMA.items() if k != "model_type"}),
    ("architectures", {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}),
    ("hidden_act", {**LLAMA, "hidden_act": "gelu"}),
    ("hidden_size", {k: v for k, v in LLAMA.items() if k != "hidden_size"}),
    ("hidden_size", {**LLAMA, "hidden_size": 30}),
    ("num_hidden_layers", {**LLAMA, "num_hidden_layers": 0}),
    ("vocab_size", {**LLAMA, "vocab_size": True}),
    ("num_key_value_heads", {**LLAMA, "num_key_value_heads": 3}),
    ("num_key_value_heads", {k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}),
    ("head_dim", {**LLAMA, "head_dim": 7}),
    ("rms_norm_eps", {**LLAMA, "rms_norm_eps": "1e-5"}),
    ("tie_word_embeddings", {**LLAMA, "tie_word_embeddings": 1}),
    ("dtype", {**LLAMA, "torch_dtype": "float64"}),
    ("quantization_config", {**LLAMA, "quantization_config": {"quant_method": "gptq"}}),
    ("partial_rotary_factor", {**LLAMA, "partial_rotary_factor": 0.5}),
    ("rope_interleaved", {**LLAMA, "rope_interleaved": True}),
    ("final_logit_softcapping", {**LLAMA, "final_logit_softcapping": 30.0}),
    ("residual_multiplier", {**LLAMA, "residual_multiplier": 0.22}),
    ("num_local_experts", {**LLAMA, "num_local_experts": 8}),
    ("no_rope_layers", {**LLAMA, "no_rope_layers": [1, 1, 0]}),
    ("sliding_window", {**LLAMA, "sliding_window": 16}),
    ("layer_types", {**MISTRAL, "layer_types": ["full_attention"] * 2}),
    ("layer_types", {**QWEN2, "layer_types": ["full_attention"]}),
    ("layer_types", {**QWEN2, "layer_types": ["sliding_attention"] * 2}),
    ("layer_types", {**QWEN2, "layer_types": ["chunked_attention", "full_attention"]}),
    ("attention_bias", {**MISTRAL, "attention_bias": True}),
    ("mlp_bias", {**QWEN3, "mlp_bias": True}),
    ("rope_scaling.rope_type", {**LLAMA, **scaled(rope_type="dynamic", factor=2.0)}),
    ("rope_scaling.rope_type", {**LLAMA, **scaled(rope_type="longrope", factor=2.0)}),
    ("rope_parameters.rope_type", {**LLAMA, "rope_parameters": {"rope_type": "axial"}}),
    (
        "rope_scaling.partial_rotary_factor",
        {**LLAMA, **scaled(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)},
    ),
    ("rope_scaling.short_factor", {**LLAMA, **scaled(rope_type="linear", factor=2.0, short_factor=[1.0])}),
    ("rope_scaling.factor", {**LLAMA, **scaled(rope_type="yarn", factor=0.5)}),
    ("rope_scaling.high_freq_factor", {**LLAMA, **scaled(**{**LLAMA3, "high_freq_factor": 1.0})}),
    ("rope_scaling", {**LLAMA, "rope_scaling": [1]}),
    ("factor", {**LLAMA, **scaled(rope_type="linear")}),
    ("low_freq_factor", {**LLAMA, **scaled(**{k: v for k, v in LLAMA3.items() if k != "low_freq_factor"})}),
    ("rope_theta", {**LLAMA, "rope_theta": -1.0}),
]


@pytest.mark.parametrize(("param", "config"), REFUSED, ids=[f"{i}-{p}" for i, (p, _) in enumerate(REFUSED)])
def test_refused_by_name(param: str, config: dict[str, Any]) -> None:
    with pytest.raises(CallerError) as caught:
        spec_from_config(config)
    assert caught.value.code is ErrorCode.MODEL_UNSUPPORTED
    assert caught.value.param == param
    assert param.rpartition(".")[2] in caught.value.message


def test_a_saved_config_json_is_read(tmp_path: Path) -> None:
    for name in FAMILIES:
        config = json.loads((save(name, tmp_path / name) / "config.json").read_text())
        spec = spec_from_config(config)
        assert spec.layers == 3
        assert spec.dtype == "float32"


def test_dtype_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    dtype, sentence = resolve_dtype("auto", CPU)
    assert dtype is torch.bfloat16
    assert "avx512_bf16" in sentence
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "amx_bf16": False})
    assert resolve_dtype("auto", CPU)[0] is torch.float32
    assert resolve_dtype("float16", CPU) == (torch.float16, "float16, as asked")
    with pytest.raises(CallerError) as caught:
        resolve_dtype("int8", CPU)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
