"""Tunings of the Triton kernels for Triton's interpreter, where a program takes 10 ms."""

from __future__ import annotations

from loraplex.ops.triton_lora import Tuning

TINY = Tuning(
    block_rows=4,
    splits=2,
    chunk_floor=32,
    max_bk=32,
    bn=64,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=2,
    expand_ctas=2,
)
TINY_PREFILL = Tuning(
    block_rows=16,
    splits=2,
    chunk_floor=32,
    max_bk=32,
    bn=64,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=2,
    expand_ctas=2,
    rank_tile=32,
    max_run=1,
)
