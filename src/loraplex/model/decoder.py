"""The decoder: one forward pass over packed rows of many requests, in any mixture of phases and adapters.

One dense projection serves all rows; the adapter branch adds to it through `AdapterOps`; attention appends to the
page pool and reads it through an `AttentionBatch`. Owns no state between steps and knows nothing of requests.

Specification: 0x02 (one base projection, many adapter projections), 0x03D (one dense projection, two attention paths).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from loraplex.core.ids import Module
from loraplex.core.layout import KvShape
from loraplex.model.attention.interface import AttentionBatch
from loraplex.model.attention.torch_paged import TorchPagedBatch
from loraplex.model.cpu_layers import CpuLayers
from loraplex.model.linear import Linear
from loraplex.model.rope import RopeTable, rotate_
from loraplex.model.spec import DecoderSpec
from loraplex.model.weights import DecoderWeights, LayerWeights
from loraplex.ops.interface import AdapterOps, RowSet

_QKV = (Module.Q, Module.K, Module.V)
_GATE_UP = (Module.GATE, Module.UP)


class Decoder:
    """Weights and specification of one base model, ready to run steps. positions: longest context served."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self._rope = RopeTable(spec.rope, spec.head_dim, positions, weights.dtype, weights.device)

    def compiled_over(self, pool: torch.Tensor, kv: KvShape) -> CpuLayers | None:
        """The layers as compiled CPU kernels over a page pool, where they serve this model: an argument of `forward`."""
        rope = (self._rope.cos, self._rope.sin)
        return CpuLayers.find(self.spec, self.weights, rope, pool, kv)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        adapters: AdapterOps,
        logit_rows: torch.Tensor,
        compiled: CpuLayers | None = None,
    ) -> torch.Tensor:
        """Logits of the rows asked for.

        tokens, positions: int64 [T]; logit_rows: int64 [L], rows whose logits are wanted. compiled: layers to use in
        place of torch where they serve the step. Returns float32 [L, vocab].
        """
        hidden = F.embedding(tokens, self.weights.embed)
        if adapters.active:
            adapters.embed(hidden, tokens)
        if (
            compiled is not None
            and isinstance(attention, TorchPagedBatch)
            and compiled.serves(attention, adapters)
        ):
            compiled.run(hidden, positions, attention, adapters)
        else:
            self._layers(hidden, positions, attention, adapters)
        return self._logits(hidden, adapters, logit_rows)

    def _layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, adapters: AdapterOps
    ) -> None:
        """All layers in torch, in place: the definition."""
        cos, sin = self._rope.gather(positions)
        for index, layer in enumerate(self.weights.layers):
            x = self._norm(hidden, layer.input_norm)
            hidden += self._attend(index, layer, x, cos, sin, attention, adapters)
            x = self._norm(hidden, layer.post_norm)
            hidden += self._feed_forward(index, layer, x, adapters)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the hidden dimension, accumulated in float32."""
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_eps)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBatch,
        adapters: AdapterOps,
    ) -> torch.Tensor:
        spec = self.spec
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        qkv = _project(x, layer.qkv, index, _QKV, sizes, adapters)
        heads = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        qk = heads[:, : spec.heads + spec.kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps).mul_(layer.qk_norm))
        rotate_(qk, cos, sin)
        out = attention.run(
            index, qk[:, : spec.heads], qk[:, spec.heads :], heads[:, spec.heads + spec.kv_heads :]
        )
        out = out.reshape(x.shape[0], spec.q_size)
        return _project(out, layer.o, index, (Module.O,), (spec.hidden_size,), adapters)

    def _feed_forward(
        self, index: int, layer: LayerWeights, x: torch.Tensor, adapters: AdapterOps
    ) -> torch.Tensor:
        inner = self.spec.intermediate_size
        both = _project(x, layer.gate_up, index, _GATE_UP, (inner, inner), adapters)
        active = F.silu(both[:, :inner]).mul_(both[:, inner:])
        return _project(active, layer.down, index, (Module.DOWN,), (self.spec.hidden_size,), adapters)

    def _logits(self, hidden: torch.Tensor, adapters: AdapterOps, logit_rows: torch.Tensor) -> torch.Tensor:
        if logit_rows.numel() == 0:
            return torch.empty((0, self.spec.vocab_size), dtype=torch.float32, device=hidden.device)
        x = self._norm(hidden[logit_rows], self.weights.final_norm)
        sizes = (self.spec.vocab_size,)
        return _project(x, self.weights.lm_head, 0, (Module.LM_HEAD,), sizes, adapters, RowSet.LOGIT).float()


def _project(
    x: torch.Tensor,
    projection: Linear,
    layer: int,
    modules: tuple[Module, ...],
    sizes: tuple[int, ...],
    adapters: AdapterOps,
    rows: RowSet = RowSet.ALL,
) -> torch.Tensor:
    """y = g * ((x * h) W^T + b + s (x A^T) B^T) + c for modules that share an input; one GEMM unless an h splits them.

    The projection's own bias b lies inside the parentheses for every row; an adapter's c is relative to that. A module
    with its own h costs one more GEMM over all rows, so that a row without h keeps its bits whatever is beside it.
    """
    if not adapters.active:
        return projection(x)
    y = projection(x)
    if adapters.scales_input:
        start = 0
        for module, size in zip(modules, sizes, strict=True):
            own = slice(start, start + size)
            start += size
            scaled = adapters.scale_input(x, layer, module, rows)
            if scaled is not x:
                y[:, own] = projection(scaled)[:, own]
    adapters.apply(y, x, layer, modules, rows)
    return y
