"""Resident base weights as adapters need them (DoRA, trained biases, repeated tensors): float32 values on
demand.
"""

from __future__ import annotations

import torch

from loraplex.artifact.tensors import F32Array
from loraplex.core.ids import Module
from loraplex.model.linear import Linear
from loraplex.model.spec import DecoderSpec
from loraplex.model.weights import DecoderWeights


class BaseWeights:
    """`artifact.base.BaseTensors` over resident weights."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self._spec, self._weights = spec, weights

    def weight(self, layer: int, module: Module) -> F32Array:
        """[d_out, d_in] of a linear module; [vocabulary, hidden] of the embedding."""
        if module is Module.EMBED:
            return _float32(self._weights.embed)
        if module is Module.LM_HEAD:
            return _float32(self._weights.lm_head.weight)
        projection, part = self._place(layer, module)
        return _float32(projection.weight[part])

    def bias(self, layer: int, module: Module) -> F32Array | None:
        """[d_out], or None where the module has none."""
        if module in (Module.EMBED, Module.LM_HEAD):
            return None
        projection, part = self._place(layer, module)
        return None if projection.bias is None else _float32(projection.bias[part])

    def _place(self, layer: int, module: Module) -> tuple[Linear, slice]:
        """The fused projection that holds a module, and its rows in it."""
        own, spec = self._weights.layers[layer], self._spec
        q, kv, inner = spec.q_size, spec.kv_size, spec.intermediate_size
        places = {
            Module.Q: (own.qkv, slice(0, q)),
            Module.K: (own.qkv, slice(q, q + kv)),
            Module.V: (own.qkv, slice(q + kv, q + 2 * kv)),
            Module.O: (own.o, slice(None)),
            Module.GATE: (own.gate_up, slice(0, inner)),
            Module.UP: (own.gate_up, slice(inner, 2 * inner)),
            Module.DOWN: (own.down, slice(None)),
        }
        return places[module]


def _float32(tensor: torch.Tensor) -> F32Array:
    array: F32Array = tensor.detach().to("cpu", torch.float32).numpy()
    return array
