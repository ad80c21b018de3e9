"""Random PEFT adapters for measurements: a rank on all linears of a base, small enough to leave its text
readable.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.model.spec import DecoderSpec, module_name

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""In the order of `LAYER_MODULES`."""


def write_config(
    folder: Path,
    rank: int,
    alpha: float,
    modules: Sequence[Module] = LAYER_MODULES,
    invocation: Sequence[int] = (),
) -> None:
    """The configuration of a LoRA of `rank` on these modules of all layers, in a folder that is made.

    invocation: token ids that activate it; none for one that is always on.
    """
    folder.mkdir(parents=True)
    targets = [TARGETS[LAYER_MODULES.index(module)] for module in modules]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha,
        "target_modules": targets,
        "bias": "none", "lora_dropout": 0.0, "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    if invocation:
        config["alora_invocation_tokens"] = list(invocation)
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_adapter(
    folder: Path,
    spec: DecoderSpec,
    rank: int,
    seed: int,
    modules: Sequence[Module] = LAYER_MODULES,
    invocation: Sequence[int] = (),
) -> Path:
    """A LoRA of `rank` on these modules of every layer, bfloat16, as PEFT would write it; returns
    the folder. invocation: as in `write_config`.
    """
    write_config(folder, rank, 2 * rank, modules, invocation)
    generator = torch.Generator().manual_seed(seed)
    dims = spec.module_dims().dims
    tensors = {}
    for layer in range(spec.layers):
        for module in modules:
            d_in, d_out = dims[module]
            stem = f"base_model.model.{module_name(layer, module)}"
            a = torch.randn((rank, d_in), generator=generator) * d_in**-0.5
            b = torch.randn((d_out, rank), generator=generator) * 0.01
            tensors[f"{stem}.lora_A.weight"] = a.bfloat16()
            tensors[f"{stem}.lora_B.weight"] = b.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
