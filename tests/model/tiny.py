"""Tiny random models of each family, as transformers makes them, and our decoder over the same weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from loraplex.model.attention.backend import Histories
from loraplex.model.attention.torch_paged import TorchPagedAttention
from loraplex.model.decoder import Decoder
from loraplex.model.spec import DecoderSpec, spec_from_config
from loraplex.model.weights import load_weights
from loraplex.ops.interface import NoAdapters

CPU = torch.device("cpu")
POSITIONS = 128
VOCAB = 131

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-llama3": (
        "Llama",
        rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32
        ),
    ),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-tuned": (
        "Llama",
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=2.0, mscale=0.7,
            mscale_all_dim=1.3, truncate=False,
        ),
    ),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
}  # fmt: skip


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.1,
}
"""Shapes that fused attention takes, for tests on a device; logits far enough apart for half precision."""
WIDE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "wide-llama": ("Llama", WIDE),
    "wide-llama-biased": ("Llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "wide-mistral-window": ("Mistral", {**WIDE, "sliding_window": 7}),
    "wide-qwen2": ("Qwen2", WIDE),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Biases and norms too: their defaults of 0 and 1 would hide a parameter that is not used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2, generator=generator)


def round_to_halves(model: torch.nn.Module) -> None:
    """Values that float32, bfloat16 and float16 all hold: what an adapter repeats of the base is what is
    served.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.mul(1024).round().div(1024).bfloat16().float())


@cache
def reference(name: str) -> Any:
    """The transformers model of one family, float32, eager attention."""
    family, changes = {**FAMILIES, **WIDE_FAMILIES}[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model, 11)
    if name in WIDE_FAMILIES:
        round_to_halves(model)
    return model


def save(name: str, folder: Path) -> Path:
    """The model as a Hugging Face folder."""
    reference(name).save_pretrained(folder)
    return folder


def spec_of(name: str) -> DecoderSpec:
    model = reference(name)
    return spec_from_config({**model.config.to_dict(), "architectures": [type(model).__name__]})


@cache
def decoder(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU, fused: Any = None
) -> Decoder:
    """fused: operators between GEMMs, None for torch's."""
    spec = spec_of(name)
    return Decoder(spec, load_weights(folder, spec, dtype, device), POSITIONS, fused)


class Paged:
    """A pool, page tables handed out at random, and steps of any mixture, without the runner."""

    def __init__(
        self, model: Decoder, page_tokens: int, requests: int = 4, positions: int = 64, seed: int = 0
    ) -> None:
        self.model = model
        spec, dtype = model.spec, model.weights.dtype
        self.kv = spec.kv_shape(dtype.itemsize, page_tokens)
        entries = self.kv.pages_for(positions)
        # Every byte is NaN until it is written; the null page stays so.
        self.pool = torch.full((1 + requests * entries, self.kv.page_bytes), 0xFF, dtype=torch.uint8)
        order = np.random.default_rng(seed).permutation(requests * entries) + 1
        self.tables = order.reshape(requests, entries).astype(np.int32)
        self.attention = TorchPagedAttention(self.pool, self.kv, dtype, spec.heads, spec.windows)
        self.lengths = [0] * requests

    def forward(self, histories: Histories, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of every row, in torch."""
        every = torch.arange(len(tokens))
        return self.model.forward(tokens, positions, self.attention.begin(histories), NoAdapters(), every)

    def step(self, prefill: dict[int, list[int]], decode: dict[int, int] | None = None) -> list[torch.Tensor]:
        """Logits of every row, request after request: prefill chunks, then one row of each decode request."""
        work = {**prefill, **{slot: [token] for slot, token in (decode or {}).items()}}
        slots = list(work)
        start = [self.lengths[slot] for slot in slots]
        rows = [len(tokens) for tokens in work.values()]
        tables = self.tables[slots].copy()
        for index, (begin, count) in enumerate(zip(start, rows, strict=True)):
            tables[index, self.kv.pages_for(begin + count) :] = (
                0  # entries beyond the length are the null page
            )
        histories = Histories(len(prefill), np.array(start, np.int32), np.array(rows, np.int32), tables)
        tokens = torch.tensor([t for chunk in work.values() for t in chunk])
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(start, rows, strict=True)])
        logits = self.forward(histories, tokens, positions)
        for slot, count in zip(slots, rows, strict=True):
            self.lengths[slot] += count
        return list(torch.split(logits, rows))
