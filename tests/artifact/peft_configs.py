"""PEFT configurations of every kind that is read, over the modules of the tiny Llama."""

from __future__ import annotations

from typing import Any

from peft import IA3Config, LoraConfig

from loraplex.artifact.record import Method

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
    "pattern, lazy": lora(
        target_modules=r"(?:.*?self_attn.*?(?:q_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.up_proj)"
    ),
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
    "dora rslora all": (lora(use_dora=True, use_rslora=True, target_modules=ALL), False,
    {Method.RSLORA, Method.DORA}),
    "dora over biases": (lora(use_dora=True, target_modules=ALL), True, {Method.LORA, Method.DORA}),
    "dora lm_head": (lora(use_dora=True, target_modules=["lm_head"]), False, {Method.LORA, Method.DORA}),
    "lora_bias": (lora(lora_bias=True), False, {Method.LORA, Method.LORA_BIAS}),
    "lora_bias over biases": (lora(lora_bias=True), True, {Method.LORA, Method.LORA_BIAS}),
    "bias lora_only": (lora(bias="lora_only"), True, {Method.LORA, Method.BITFIT}),
    "bias all": (lora(bias="all"), True, {Method.LORA, Method.BITFIT}),
    "bias all, none there": (lora(bias="all"), False, {Method.LORA}),
    "dora with bias": (lora(use_dora=True, bias="lora_only"), True,
    {Method.LORA, Method.DORA, Method.BITFIT}),
    "ia3": (IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    False, {Method.IA3}),
    "ia3 over biases": (IA3Config(target_modules=["k_proj", "o_proj"], feedforward_modules=["o_proj"]), True,
    {Method.IA3}),
    "ia3 without feedforward": (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), True,
    {Method.IA3}),
    "ia3 patterns": (IA3Config(target_modules=r".*\.(k|down)_proj", feedforward_modules=r".*down_proj"),
    False, {Method.IA3}),
}  # fmt: skip
