"""One random model three times: in float32 and in a half type on the CPU, and on CUDA behind graphs and fused
kernels.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch

from loraplex.core.layout import KvShape
from loraplex.core.plan_check import PlanBounds
from loraplex.model.cuda.cuda_executor import CudaExecutor
from loraplex.model.cuda.setup import CudaParts, Warmth, prepare_libraries
from loraplex.model.decoder import Decoder
from loraplex.model.linear import Linear
from loraplex.model.runner import MakeExecutor
from loraplex.model.spec import DecoderSpec, spec_from_config
from loraplex.model.weights import DecoderWeights, dummy_weights

VOCAB = 131
CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def moved(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    if isinstance(value, Linear):
        return Linear(moved(value.weight, dtype, device), moved(value.bias, dtype, device))
    if isinstance(value, tuple):
        return tuple(moved(item, dtype, device) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{f.name: moved(getattr(value, f.name), dtype, device) for f in fields(value)})
    return value


@cache
def spec_of(**changes: Any) -> DecoderSpec:
    return spec_from_config({**CONFIG, **changes})


@cache
def weights_of(spec: DecoderSpec) -> DecoderWeights:
    """Values that bfloat16 holds exactly, large enough that logits differ."""
    weights = dummy_weights(spec, torch.float32, CPU)
    scaled: Any = moved(weights, torch.bfloat16, CPU)
    out: DecoderWeights = moved(scaled, torch.float32, CPU)
    for layer in out.layers:
        for projection in layer.projections:
            projection.weight.mul_(4.0)
    out.lm_head.weight.mul_(8.0)
    return out


@cache
def reference_decoder(spec: DecoderSpec) -> Decoder:
    return Decoder(spec, weights_of(spec), 1024)


@cache
def half_decoder(spec: DecoderSpec, dtype: torch.dtype) -> Decoder:
    """The yardstick of `level_b`."""
    return Decoder(spec, moved(weights_of(spec), dtype, CPU), 1024)


@cache
def stream() -> torch.cuda.Stream:
    return prepare_libraries()


@cache
def cuda_decoder(spec: DecoderSpec, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    stream()
    from loraplex.model.cuda.flashinfer_fused import FlashInferFused

    return Decoder(spec, moved(weights_of(spec), dtype, GPU), 1024, FlashInferFused())


def cuda_executor(captured: bool = True, rows: int = 512) -> Any:
    """Executor factory for `tests.model.drive.Driver`."""

    def factory(kv: KvShape, bounds: PlanBounds) -> MakeExecutor:
        def make(decoder: Decoder, table: Any, sampler: Any) -> CudaExecutor:
            parts = CudaParts(decoder, kv, rows, lambda line: None, captured=captured)
            executor = parts.executor(bounds)(decoder, table, sampler)
            assert isinstance(executor, CudaExecutor)
            torch.cuda.synchronize()  # buffers and pool were filled on another stream
            if captured:
                with torch.cuda.stream(stream()):
                    Warmth(parts, executor, lambda line: None).capture()
            return executor

        return make

    return factory
