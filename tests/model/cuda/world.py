"""The CUDA executor over tiny models where there is no GPU: kernels interpreted, captured steps run one by
one.
"""

from __future__ import annotations

from tests.model.cuda.attend import PlainAttention

from loraplex.core.layout import KvShape
from loraplex.core.plan_check import PlanBounds
from loraplex.model.cuda.cuda_executor import CudaExecutor
from loraplex.model.cuda.graphs import DecodeGraphs, bucket_sizes
from loraplex.model.cuda.heads import GreedyHead
from loraplex.model.cuda.inputs import StepInputs
from loraplex.model.cuda.mixed import MixedGraphs
from loraplex.model.cuda.rope_append import RopeAppend, angle_table
from loraplex.model.decoder import Decoder
from loraplex.model.runner import MakeExecutor
from loraplex.model.sampler import Sampler
from loraplex.ops.table import AdapterTable
from loraplex.ops.triton_lora import Tuning
from loraplex.ops.triton_ops import TritonState

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


MIXED = (8, 16)
"""Mixed steps of up to 16 rows run in a bucket, larger ones launch by launch."""


def plain_executor(kv: KvShape, bounds: PlanBounds, rows: int = 256) -> MakeExecutor:
    def make(decoder: Decoder, table: AdapterTable, sampler: Sampler) -> CudaExecutor:
        spec = decoder.spec
        inputs = StepInputs(bounds, rows, kv.page_tokens, table.pool.device)
        angles = angle_table(spec.rope, spec.head_dim, decoder.positions, table.pool.device)
        rope = RopeAppend(table.pool, kv, table.dtype, spec.heads, angles, inputs)
        attention = PlainAttention(rope, inputs)
        head = GreedyHead(inputs, rows, spec.vocab_size, sampler.sampled)
        state = TritonState(
            table, bounds.max_requests, rows, bounds.max_requests, tunings=(TINY_PREFILL, TINY)
        )
        table.kernel_state = state
        graphs = DecodeGraphs(
            decoder, inputs, attention, head, state, bucket_sizes(bounds.max_requests), captured=False
        )
        mixed = MixedGraphs(decoder, inputs, attention, state, MIXED, captured=False)
        return CudaExecutor(decoder, table, sampler, inputs, attention, head, graphs, mixed)

    return make
