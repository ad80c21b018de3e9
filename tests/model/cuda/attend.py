"""Attention for the CUDA executor in plain torch, request by request: what fused kernels must agree with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.rope_append import RopeAppend


class PlainAttention:
    """`StepAttention` that reads the page lists and lengths which the fused kernels read."""

    backends = ("plain",)

    def __init__(self, rope: RopeAppend, inputs: StepInputs) -> None:
        self.rope, self.inputs = rope, inputs

    def append(self, layer: int, q: torch.Tensor) -> None:
        self.rope.run(layer, q)

    def bucket(self, size: int) -> PlainBatch:
        return PlainBatch(self, [1] * size)

    def mixed(self, plan: BatchPlan, lengths: KvLengths) -> PlainBatch:
        return self.mixed_on("plain", plan, lengths)

    def mixed_on(self, backend: str, plan: BatchPlan, lengths: KvLengths) -> PlainBatch:
        batch = PlainBatch(self, plan.requests.rows.tolist())
        batch.prepare(lengths)
        return batch


class PlainBatch:
    rotates = True

    def __init__(self, owner: PlainAttention, rows: list[int]) -> None:
        self.owner, self.rows = owner, rows

    def prepare(self, lengths: KvLengths) -> None:
        self.lengths = lengths

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.owner.append(layer, q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.attend(layer, q, out)
        return out

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self.owner.rope.layer(layer)
        begin = 0
        for request, rows in enumerate(self.rows):
            lo, hi = self.lengths.indptr[request : request + 2].tolist()
            total = int(self.lengths.totals[request])
            pages = self.owner.inputs.indices[lo:hi].long()
            own_k, own_v = (
                side[pages].flatten(0, 1)[:total].transpose(0, 1)[None] for side in (keys, values)
            )
            mask = torch.ones(rows, total, dtype=torch.bool, device=q.device).tril(total - rows)
            own_q = q[begin : begin + rows].transpose(0, 1)[None]
            result = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=mask, enable_gqa=True)
            out[begin : begin + rows] = result[0].transpose(0, 1)
            begin += rows
