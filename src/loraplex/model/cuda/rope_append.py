"""RoPE and append in one launch: q rotated in place, k rotated into the pool, v copied into the pool.

Owns the float32 table of angles and the strides of the page-major pool.
Specification: rulings "One page pool".
"""

from __future__ import annotations

import torch
import triton

from loraplex.core.layout import KvShape
from loraplex.model.cuda import kernels
from loraplex.model.cuda.inputs import StepInputs
from loraplex.model.rope import inverse_frequencies
from loraplex.model.spec import RopeSpec


def angle_table(rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, head_dim]: cosines, then sines, of each position."""
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1).to(device)


class RopeAppend:
    """The launch for one model. pool: uint8 [pages, page_bytes]; dtype: of keys and values; table:
    `angle_table`.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        kv: KvShape,
        dtype: torch.dtype,
        heads: int,
        table: torch.Tensor,
        inputs: StepInputs,
    ) -> None:
        self._kv, self._heads, self._table, self._inputs = kv, heads, table, inputs
        self.paged = (
            pool.view(-1).view(dtype).view(-1, kv.layers, 2, kv.page_tokens, kv.kv_heads, kv.head_dim)
        )
        self._half_block = triton.next_power_of_2(kv.head_dim // 2)
        self._head_block = min(8, triton.next_power_of_2(kv.kv_heads))
        self._blocks = triton.cdiv(heads, self._head_block) + 2 * triton.cdiv(kv.kv_heads, self._head_block)
        self._pdl = pool.device.type == "cuda"
        self._options = {"launch_pdl": True} if self._pdl else {}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each [pages, page_tokens, kv_heads, head_dim], views of the pool."""
        return self.paged[:, index, 0], self.paged[:, index, 1]

    def run(self, layer: int, q: torch.Tensor) -> None:
        """q: the first heads of a fused [T, heads + 2 * kv_heads, head_dim]; k and v follow it in memory."""
        keys, values = self.layer(layer)
        kernels.rope_append_kernel[(q.shape[0], self._blocks)](
            q,
            keys,
            values,
            self._inputs.positions,
            self._inputs.pages,
            self._table,
            q.stride(0),
            PAGE_STRIDE=self.paged.stride(0),
            PAGE_TOKENS=self._kv.page_tokens,
            HEADS=self._heads,
            KV_HEADS=self._kv.kv_heads,
            HALF=self._kv.head_dim // 2,
            HALF_BLOCK=self._half_block,
            HEAD_BLOCK=self._head_block,
            PDL=self._pdl,
            num_warps=4,
            **self._options,
        )
