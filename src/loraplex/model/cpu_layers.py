"""The decoder's layers through the compiled CPU kernels: one call for a decode step, two for each layer with
prefill.

Owns the records that the library reads (`ops/cpu/step_cpu.cpp`) and the step's scratch tensors. Serves where
every projection lies in panels; elsewhere `Decoder`'s torch code runs, which defines the function. Attention
of prefill rows stays with the attention batch.

Specification: 0x02, 0x03D; rulings "Operators", "Equality".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from loraplex.core.ids import Module
from loraplex.core.layout import KvShape
from loraplex.model.attention.torch_paged import TorchPagedBatch
from loraplex.model.linear import Linear, panel_kernel
from loraplex.model.spec import DecoderSpec
from loraplex.model.weights import DecoderWeights, LayerWeights
from loraplex.ops.cpu_kernel import CpuKernelOps, Records
from loraplex.ops.interface import AdapterOps, NoAdapters

GROUPS: Final = ((Module.Q, Module.K, Module.V), (Module.O,), (Module.GATE, Module.UP), (Module.DOWN,))
_HEAD, _TAIL, _FIRST, _LAST = 1, 2, 4, 8
_NAMES: Final = {torch.bfloat16: "step_layers_bfloat16", torch.float32: "step_layers_float32"}


class CpuLayers:
    """All layers of one decoder over one page pool. Made by `find`."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        kv: KvShape,
        function: object,
    ) -> None:
        self._spec, self._function = spec, function
        self._keep = (weights, rope, pool)
        self._pool_at = pool.data_ptr()
        self._room = torch.empty(0, dtype=torch.uint8)
        layers = np.array(
            [list(_layer_words(layer, w)) for layer, w in zip(weights.layers, spec.windows, strict=True)],
            dtype=np.int64,
        )
        self._layers = layers
        eps = int(np.float64(spec.rms_eps).view(np.int64))
        self._model = np.array(
            [
                spec.hidden_size,
                spec.intermediate_size,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                layers.ctypes.data,
                rope[0].data_ptr(),
                rope[1].data_ptr(),
                pool.data_ptr(),
                kv.page_bytes,
                kv.page_tokens,
                eps,
            ],
            dtype=np.int64,
        )

    @staticmethod
    def find(
        spec: DecoderSpec,
        weights: DecoderWeights,
        rope: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        kv: KvShape,
    ) -> CpuLayers | None:
        """The compiled layers, where they serve this model on this machine. rope: cos and sin [positions,
        head_dim].
        """
        library = panel_kernel(weights.dtype, weights.device)
        every = [projection for layer in weights.layers for projection in layer.projections]
        if library is None or any(p.panels is None for p in every) or spec.head_dim % 2:
            return None
        return CpuLayers(spec, weights, rope, pool, kv, getattr(library.handle, _NAMES[weights.dtype]))

    def serves(self, attention: TorchPagedBatch, adapters: AdapterOps) -> bool:
        """Whether a step with these parts can run here: over this pool, with no other adapter family."""
        return attention.pool_at == self._pool_at and isinstance(adapters, NoAdapters | CpuKernelOps)

    def _scratch(self, rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Matrices [rows, width] that hold until the next step: fresh memory would be paged in anew every
        time.
        """
        sizes = [-(-rows * width * dtype.itemsize // 64) * 64 for width in widths]
        if self._room.numel() < sum(sizes):
            self._room = torch.empty(sum(sizes), dtype=torch.uint8)
        pieces = self._room[: sum(sizes)].split(sizes)
        return [
            piece[: rows * width * dtype.itemsize].view(dtype).view(rows, width)
            for piece, width in zip(pieces, widths, strict=True)
        ]

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: TorchPagedBatch, adapters: AdapterOps
    ) -> None:
        """All layers, in place. hidden: [T, hidden size], contiguous; positions: int64 [T]."""
        spec, histories = self._spec, attention.histories
        rows, dtype = hidden.shape[0], hidden.dtype
        widths = (
            spec.hidden_size,
            spec.q_size + 2 * spec.kv_size,
            spec.q_size,
            2 * spec.intermediate_size,
            spec.intermediate_size,
            spec.hidden_size,
        )
        scratch = self._scratch(rows, widths, dtype)
        pages = np.ascontiguousarray(histories.pages, dtype=np.int32)
        requests = np.repeat(np.arange(histories.rows.size, dtype=np.int32), histories.rows)
        records = adapters.records(GROUPS) if isinstance(adapters, CpuKernelOps) else Records(0, 0, 0, ())
        most = max(len(group) for group in GROUPS) * max(widths) if adapters.scales_input else 0
        scaled = torch.empty((rows, most), dtype=dtype)
        batch = np.array(
            [
                rows,
                int(histories.indptr[histories.prefills]),
                positions.data_ptr(),
                pages.ctypes.data,
                pages.shape[1],
                requests.ctypes.data,
                hidden.data_ptr(),
                *(t.data_ptr() for t in scratch),
                records.step,
                records.calls,
                records.z,
                scaled.data_ptr() if adapters.scales_input else 0,
            ],
            dtype=np.int64,
        )
        model_at, batch_at, last = self._model.ctypes.data, batch.ctypes.data, spec.layers
        call = self._function
        assert callable(call)
        if not histories.prefills:
            call(model_at, batch_at, 0, last, _HEAD | _TAIL | _FIRST | _LAST)
            return
        heads = scratch[1].view(rows, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        out = scratch[2].view(rows, spec.heads, spec.head_dim)
        for layer in range(last):
            call(model_at, batch_at, layer, layer + 1, _HEAD | (0 if layer else _FIRST))
            attention.run_prefills(layer, q, k, v, out)
            call(model_at, batch_at, layer, layer + 1, _TAIL | (_LAST if layer == last - 1 else 0))


def _layer_words(layer: LayerWeights, window: int | None) -> Iterator[int]:
    """The kernel's `Layer`."""
    yield layer.input_norm.data_ptr()
    yield layer.post_norm.data_ptr()
    yield 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
    for projection in layer.projections:
        yield from _projection_words(projection)
    yield window or 0


def _projection_words(projection: Linear) -> Iterator[int]:
    assert projection.panels is not None
    yield projection.panels.data_ptr()
    yield 0 if projection.bias is None else projection.bias.data_ptr()
