"""The decoder: one forward pass over packed rows of many requests, in any mixture of phases and adapters.

One dense projection serves all rows; the adapter branch adds to it through `AdapterOps`; attention appends to
the page pool and reads it through an `AttentionBatch`. Owns no state between steps and knows nothing of
requests.

Specification: 0x02 (one base projection, many adapter projections), 0x03D (one dense projection, two
attention paths).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from loraplex.core.ids import Module
from loraplex.core.layout import KvShape
from loraplex.model.attention.backend import AttentionBatch
from loraplex.model.attention.torch_paged import TorchPagedBatch
from loraplex.model.cpu_layers import CpuLayers
from loraplex.model.fused import FusedOps, TorchFused
from loraplex.model.linear import Linear
from loraplex.model.rope import RopeTable, rotate_
from loraplex.model.spec import DecoderSpec
from loraplex.model.weights import DecoderWeights
from loraplex.ops.interface import AdapterOps, RowSet

_QKV = (Module.Q, Module.K, Module.V)
_GATE_UP = (Module.GATE, Module.UP)


class Decoder:
    """Weights and specification of one base model, ready to run steps.

    positions: longest context served. fused: operators between the GEMMs, plain torch when left out.
    """

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, positions: int, fused: FusedOps | None = None
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.positions = positions
        self.fused = fused or TorchFused()
        self._rope = RopeTable(spec.rope, spec.head_dim, positions, weights.dtype, weights.device)

    def compiled_over(self, pool: torch.Tensor, kv: KvShape) -> CpuLayers | None:
        """The layers as compiled CPU kernels over a page pool, where they serve this model: an argument of
        `forward`.
        """
        rope = (self._rope.cos, self._rope.sin)
        return CpuLayers.find(self.spec, self.weights, rope, pool, kv)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        adapters: AdapterOps,
        logit_rows: torch.Tensor | None,
        compiled: CpuLayers | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the rows asked for.

        tokens, positions: integers [T]; logit_rows: [L], rows whose logits are wanted, None for all.
        compiled: layers to use in place of torch where they serve the step. Returns [L, vocab] of the
        weights' type, in `out` where it is given.
        """
        if (
            compiled is not None
            and isinstance(attention, TorchPagedBatch)
            and compiled.serves(attention, adapters)
        ):
            hidden = self.embed(tokens, adapters)
            compiled.run(hidden, positions, attention, adapters)
            return self.head(None, hidden, adapters, logit_rows, out)
        x, residual = self._layers(tokens, positions, attention, adapters)
        return self.head(x, residual, adapters, logit_rows, out)

    def _layers(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, adapters: AdapterOps
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers in torch, the definition: the last one's output and the residual stream before it is
        added.
        """
        spec = self.spec
        residual = self.embed(tokens, adapters)
        rotation = None if attention.rotates else self._rope.gather(positions)
        x = residual
        for index in range(spec.layers):
            heads = self.before_attention(index, x, residual, adapters)
            if rotation is not None:
                rotate_(heads[:, : spec.heads + spec.kv_heads], *rotation)
            out = attention.run(index, *self.split(heads))
            x = self.after_attention(index, out.reshape(-1, spec.q_size), residual, adapters)
        return x, residual

    def embed(
        self, tokens: torch.Tensor, adapters: AdapterOps, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The residual stream before the first layer, [T, hidden], in `out` where it is given."""
        if out is None:
            residual = F.embedding(tokens, self.weights.embed)
        else:
            residual = torch.index_select(self.weights.embed, 0, tokens, out=out)
        if adapters.active:
            adapters.embed(residual, tokens)
        return residual

    def before_attention(
        self,
        index: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        adapters: AdapterOps,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q, k and v of a layer before rotation, [T, heads + 2 * kv_heads, head_dim].

        x: the layer before's output, added to the residual stream here; anything for the first layer. out:
        [T, qkv].
        """
        spec, layer = self.spec, self.weights.layers[index]
        if index == 0:
            x = self.fused.norm(residual, layer.input_norm, spec.rms_eps)
        else:
            x = self.fused.add_norm(x, residual, layer.input_norm, spec.rms_eps)
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        qkv = _project(x, layer.qkv, index, _QKV, sizes, adapters, out)
        heads = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        if layer.qk_norm is not None:
            qk = heads[:, : spec.heads + spec.kv_heads]
            qk.copy_(F.rms_norm(qk, (spec.head_dim,), None, spec.rms_eps).mul_(layer.qk_norm))
        return heads

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] as views of `before_attention`'s result."""
        first, second = self.spec.heads, self.spec.heads + self.spec.kv_heads
        return heads[:, :first], heads[:, first:second], heads[:, second:]

    def after_attention(
        self,
        index: int,
        attended: torch.Tensor,
        residual: torch.Tensor,
        adapters: AdapterOps,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output, [T, hidden], not yet added to the residual stream. attended: [T, heads *
        head_dim].
        """
        spec, layer = self.spec, self.weights.layers[index]
        x = _project(attended, layer.o, index, (Module.O,), (spec.hidden_size,), adapters)
        x = self.fused.add_norm(x, residual, layer.post_norm, spec.rms_eps)
        inner = spec.intermediate_size
        both = _project(x, layer.gate_up, index, _GATE_UP, (inner, inner), adapters)
        active = self.fused.silu_mul(both)
        return _project(active, layer.down, index, (Module.DOWN,), (spec.hidden_size,), adapters, out)

    def head(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        adapters: AdapterOps,
        logit_rows: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [L, vocab] of `logit_rows`, None for all rows.

        x: the last layer's output where the residual stream lacks it yet.
        """
        if logit_rows is not None:
            if logit_rows.numel() == 0:
                return torch.empty(
                    (0, self.spec.vocab_size), dtype=self.weights.dtype, device=residual.device
                )
            x, residual = None if x is None else x[logit_rows], residual[logit_rows]
        norm, eps = self.weights.final_norm, self.spec.rms_eps
        x = self.fused.norm(residual, norm, eps) if x is None else self.fused.add_norm(x, residual, norm, eps)
        sizes = (self.spec.vocab_size,)
        return _project(
            x, self.weights.lm_head, 0, (Module.LM_HEAD,), sizes, adapters, out, rows=RowSet.LOGIT
        )


def _project(
    x: torch.Tensor,
    projection: Linear,
    layer: int,
    modules: tuple[Module, ...],
    sizes: tuple[int, ...],
    adapters: AdapterOps,
    out: torch.Tensor | None = None,
    rows: RowSet = RowSet.ALL,
) -> torch.Tensor:
    """y = g * ((x * h) W^T + b + s (x A^T) B^T) + c for modules that share an input; one GEMM unless an h
    splits them.

    The projection's own bias b lies inside the parentheses for every row; an adapter's c is relative to that.
    A module with its own h costs one more GEMM over all rows, so that a row without h keeps its bits whatever
    is beside it. out: where y goes.
    """
    if not adapters.active:
        return projection(x, out)
    adapters.ahead(x, layer, modules, rows)
    y = projection(x, out)
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
