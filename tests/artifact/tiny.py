"""A tiny random Llama, and adapters for it that PEFT itself writes."""

from __future__ import annotations

import copy
import json
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.artifact.base_modules import BaseModules
from loraplex.core.ids import Module

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 32, 48, 4, 2, 8, 64


@lru_cache(maxsize=2)
def _model(bias: bool) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        attention_bias=bias,
        tie_word_embeddings=False,
        # Weights that matter: with the usual small ones an adapter hardly shows in the logits.
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    return model


def tiny_model(bias: bool = False) -> LlamaForCausalLM:
    """A fresh copy; bias: attention projections have one."""
    return copy.deepcopy(_model(bias))


def tiny_base(bias: bool = False, layers: int = LAYERS) -> BaseModules:
    """The modules of `tiny_model`."""
    return BaseModules.llama(
        layers=layers,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        q_dim=HEADS * HEAD_DIM,
        kv_dim=KV_HEADS * HEAD_DIM,
        vocab=VOCAB,
        biases=frozenset({Module.Q, Module.K, Module.V, Module.O}) if bias else frozenset(),
    )


class TinyTensors:
    """Base weights of `tiny_model`, by module."""

    def __init__(self, bias: bool = False) -> None:
        self._modules = dict(_model(bias).named_modules())
        self._base = tiny_base(bias)

    def weight(self, layer: int, module: Module) -> np.ndarray:
        return self._modules[self._base.at(layer, module).name].weight.detach().numpy()

    def bias(self, layer: int, module: Module) -> np.ndarray | None:
        bias = self._modules[self._base.at(layer, module).name].bias
        return None if bias is None else bias.detach().numpy()


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every adapter parameter (and every bias) a random value."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "ia3_")):
            scale = 0.5
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale
            if "magnitude" in name or "ia3_" in name:
                parameter.data = parameter.data.abs() + 0.5
        elif parameter.requires_grad and name.endswith(".bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)


def save_adapter(
    folder: Path, config: peft.PeftConfig, *, bias: bool = False, seed: int = 0
) -> torch.nn.Module:
    """Write an adapter of random values as PEFT does; returns the PEFT model in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice about targets is not what is tested here
        model = peft.get_peft_model(tiny_model(bias), config)
        randomise(model, seed)
        model.save_pretrained(folder)
    return model.eval()


def write_lora(folder: Path, **changes: Any) -> Path:
    """A small valid adapter on q_proj and v_proj of every layer, rank 4, without PEFT; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none",
        "lora_dropout": 0.0, "task_type": "CAUSAL_LM", "base_model_name_or_path": None,
        "inference_mode": True,
    }  # fmt: skip
    config.update(changes)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(lora_tensors(), folder / "adapter_model.safetensors")
    return folder


def lora_tensors(rank: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of `write_lora`."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer in range(LAYERS):
        for target, d_out in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            out[f"{stem}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator).to(dtype)
            out[f"{stem}.lora_B.weight"] = torch.randn(d_out, rank, generator=generator).to(dtype)
    return out


def edit_tensors(folder: Path, edit: Any) -> None:
    """Rewrite the weights of an adapter folder through `edit(dict) -> dict`."""
    path = folder / "adapter_model.safetensors"
    save_file({k: v.contiguous() for k, v in edit(load_file(path)).items()}, path)


def edit_config(folder: Path, edit: Any) -> None:
    """Rewrite the configuration of an adapter folder through `edit(dict) -> dict`."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def write_base(folder: Path) -> Path:
    model = tiny_model()
    model.config.save_pretrained(folder)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder
