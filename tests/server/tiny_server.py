"""A model folder and adapters that are just enough to be served by an engine without a model, in
numpy alone.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN = 2, 16


def write_model(folder: Path) -> Path:
    """config.json of a tiny Llama; there are no weights and no tokenizer."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 997,
        "hidden_size": HIDDEN,
        "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, seed: int = 0, rank: int = 2) -> Path:
    """A LoRA adapter on q_proj of every layer."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(LAYERS):
        tensors[stem.format(layer, "A")] = rng.standard_normal((rank, HIDDEN)).astype(np.float32)
        tensors[stem.format(layer, "B")] = rng.standard_normal((HIDDEN, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


_RESERVED: list[socket.socket] = []
"""Sockets that are bound and never listen, for as long as the tests run."""


def free_port() -> int:
    """A port for one server: nobody else is given it, because a socket is bound to it that lets a listener
    share.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    _RESERVED.append(probe)
    port: int = probe.getsockname()[1]
    return port
