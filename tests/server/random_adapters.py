"""Random LoRA adapters that change what the tiny model says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tests.model.tiny import COMMON


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter on q_proj and v_proj that changes what the tiny model says; rank 1 to 6."""
    folder.mkdir(parents=True)
    rank = 1 + seed % 6
    hidden, width = COMMON["hidden_size"], COMMON["hidden_size"] // COMMON["num_attention_heads"]
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for name, out in (("q_proj", hidden), ("v_proj", width * COMMON["num_key_value_heads"])):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((rank, hidden)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((out, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
