"""Weights: exactly the tensors that the specification implies, from one file or shards, or made up from it
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.tiny import CPU, reference, save, spec_of

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.model.linear import Linear
from loraplex.model.weights import DecoderWeights, dummy_weights, load_weights

Tensors = dict[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def flat(weights: DecoderWeights) -> list[torch.Tensor]:
    out = [weights.embed, weights.final_norm, weights.lm_head.weight]
    for layer in weights.layers:
        out += [t for t in (layer.input_norm, layer.post_norm, layer.qk_norm) if t is not None]
        for projection in layer.projections:
            out += [projection.weight] + ([] if projection.bias is None else [projection.bias])
    return out


def assert_refused(folder: Path, name: str, code: ErrorCode, *words: str) -> None:
    with pytest.raises(CallerError) as caught:
        load_weights(folder, spec_of(name), torch.float32, CPU)
    assert caught.value.code is code
    for word in words:
        assert word in caught.value.message


def test_shards_equal_one_file(tmp_path: Path) -> None:
    one = load_weights(save("qwen3", tmp_path / "one"), spec_of("qwen3"), torch.float32, CPU)
    reference("qwen3").save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    steps: list[tuple[int, int]] = []
    many = load_weights(
        tmp_path / "many",
        spec_of("qwen3"),
        torch.float32,
        CPU,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert all(torch.equal(a, b) for a, b in zip(flat(one), flat(many), strict=True))
    assert torch.equal(many.lm_head.weight, many.embed)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert (
        many.nbytes == steps[-1][0] + 3 * (6 - 1 + 2 - 1) * 10 * 4
    )  # head norms are stored once for each head
    assert steps[-1][0] <= steps[-1][1]


def test_projections_are_fused_in_order(tmp_path: Path) -> None:
    weights = load_weights(save("qwen2", tmp_path), spec_of("qwen2"), torch.bfloat16, CPU)
    layer = reference("qwen2").model.layers[2]
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    assert torch.equal(weights.layers[2].qkv.weight, torch.cat([q.weight, k.weight, v.weight]).bfloat16())
    assert torch.equal(weights.layers[2].qkv.bias, torch.cat([q.bias, k.bias, v.bias]).bfloat16())
    assert torch.equal(
        weights.layers[2].gate_up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16()
    )


def test_missing_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    folder = rewrite(save("llama", tmp_path), lambda tensors: tensors.__delitem__(name))
    assert_refused(folder, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, name, "missing")


def test_left_over_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = rewrite(save("llama", tmp_path), lambda tensors: tensors.update({name: torch.zeros(48)}))
    assert_refused(folder, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, name)


def test_wrong_shape(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = rewrite(save("llama", tmp_path), lambda tensors: tensors.update({name: torch.zeros(48, 48)}))
    assert_refused(folder, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, name, "(48, 48)", "(16, 48)")


def test_integer_tensor(tmp_path: Path) -> None:
    name = "model.norm.weight"
    folder = rewrite(
        save("llama", tmp_path), lambda tensors: tensors.update({name: torch.ones(48, dtype=torch.int8)})
    )
    assert_refused(folder, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, name, "int8")


def test_a_tied_head_may_repeat_the_embedding_but_not_differ(tmp_path: Path) -> None:
    folder = save("llama-tied", tmp_path)
    embed = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embed].clone()}))
    weights = load_weights(folder, spec_of("llama-tied"), torch.float32, CPU)
    assert torch.equal(weights.lm_head.weight, weights.embed)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embed] + 1.0}))
    assert_refused(
        folder, "llama-tied", ErrorCode.MODEL_WEIGHTS_INVALID, "lm_head.weight", "tie_word_embeddings"
    )


def test_old_files_may_repeat_rope_frequencies_but_not_others(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 8, 2) / 8)
    folder = rewrite(save("llama", tmp_path), lambda tensors: tensors.update({name: plain.bfloat16()}))
    load_weights(folder, spec_of("llama"), torch.float32, CPU)
    rewrite(folder, lambda tensors: tensors.update({name: plain * 1.1}))
    assert_refused(folder, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, name, "rope_theta")


def test_a_projection_gives_its_weight_back_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = torch.randn(40, 24).to(dtype), torch.randn(40).to(dtype)
        projection = Linear(weight.clone(), bias)
        x = torch.randn(5, 24).to(dtype)
        plain = projection(x)
        projection.pack()
        assert torch.equal(projection.weight, weight)
        torch.testing.assert_close(
            projection(x), plain, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2
        )
        assert projection.nbytes == weight.nbytes + bias.nbytes


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    assert_refused(tmp_path, "llama", ErrorCode.MODEL_SOURCE_MISSING, "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    assert_refused(tmp_path, "llama", ErrorCode.MODEL_SOURCE_MISSING, "gone.safetensors")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    assert_refused(tmp_path, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, "../elsewhere.safetensors")
    index.write_text("[]")
    assert_refused(tmp_path, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, "index")


def test_damaged_file(tmp_path: Path) -> None:
    path = save("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused(tmp_path, "llama", ErrorCode.MODEL_WEIGHTS_INVALID, "model.safetensors")


def test_dummy_weights_are_the_same_each_time() -> None:
    spec = spec_of("qwen2")
    first, again, other = (dummy_weights(spec, torch.float32, CPU, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(flat(first), flat(again), strict=True))
    assert not torch.equal(first.embed, other.embed)
    assert not torch.equal(first.layers[0].o.weight, first.layers[1].o.weight)
    assert float(first.layers[0].qkv.weight.std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.layers[0].input_norm, torch.ones(spec.hidden_size))
