"""Attention for the CUDA executor in plain torch, request by request: what fused kernels must agree with."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.rope_append import RopeAppend


class PlainAttention:
    """`StepAttention` that reads the page lists and lengths which the fused kernels read."""

    backends = ("plain",)

    def __init__(self, rope: RopeAppend, inputs: StepInputs) -> None:
        self.rope, self.inputs = rope, inputs

    def bucket(self, size: int) -> PlainBatch:
        return PlainBatch(self, [1] * size)

    def mixed_bucket(self, rows: int, prefills: int) -> PlainMixedBucket:
        return PlainMixedBucket(self, prefills)

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
        self.owner.rope.run(layer, q)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        keys, values = self.owner.rope.layer(layer)
        begin = 0
        for request, rows in self.order():
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
        return out

    def order(self) -> list[tuple[int, int]]:
        """Request in the plan's order and its rows, as they lie in memory."""
        return list(enumerate(self.rows))


class PlainMixedBucket(PlainBatch):
    """Decode rows first."""

    def __init__(self, owner: PlainAttention, prefills: int) -> None:
        super().__init__(owner, [])
        self.prefills = prefills

    def pad(self) -> None:
        raise AssertionError("nothing is captured here")

    def prepare(self, rows: I32, lengths: KvLengths) -> None:
        assert rows.size <= self.prefills
        self.lengths, self.rows = lengths, rows.tolist()

    def order(self) -> list[tuple[int, int]]:
        decodes = [(request, 1) for request in range(len(self.rows), self.lengths.totals.size)]
        return decodes + list(enumerate(self.rows))
