"""A small random Llama in a folder, and what PEFT itself computes over it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.artifact.tiny import tiny_model


def write_base(folder: Path, bias: bool) -> Path:
    model = tiny_model(bias)
    model.config.save_pretrained(folder)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def logprobs_of(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """PEFT's log probabilities, [positions, vocabulary], float64."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)
