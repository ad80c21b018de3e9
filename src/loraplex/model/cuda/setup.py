"""What a CUDA engine does before it is ready: choose kernels, warm libraries up, run the largest chunk,
capture graphs.

Order: weights (the caller), warm-up and largest chunk over a scratch pool, then the page pool takes what is
left minus a reserve, then the graphs are captured: they hold the pool's address, so they come after it, and
the reserve holds room for them. Nothing is compiled after that.

Without FlashInfer, or for models that its kernels do not serve here (float32, windows that differ between
layers), the torch executor runs instead, and a warning says why. Specification: rulings "Start-up",
"Dependencies".
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch

from loraplex.core.ids import LAYER_MODULES
from loraplex.core.layout import KvShape
from loraplex.core.packed import empty
from loraplex.core.plan import (
    NO_REFERENCE,
    BatchPlan,
    PromptLogprobColumns,
    RequestColumns,
    SampleColumns,
)
from loraplex.core.plan_check import PlanBounds
from loraplex.model.cuda.cuda_executor import CudaExecutor
from loraplex.model.cuda.draws import DeviceDraws
from loraplex.model.cuda.graphs import DecodeGraphs, bucket_sizes
from loraplex.model.cuda.heads import GreedyHead
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.mixed import MixedGraphs, row_buckets
from loraplex.model.cuda.rope_append import RopeAppend, angle_table
from loraplex.model.cuda.step_attention import StepAttention
from loraplex.model.decoder import Decoder
from loraplex.model.progress import Report
from loraplex.model.runner import MakeExecutor
from loraplex.model.sampler import Sampler
from loraplex.model.sampler_cpu import OPTIONS
from loraplex.model.spec import DecoderSpec
from loraplex.ops.interface import NoAdapters
from loraplex.ops.table import AdapterTable
from loraplex.ops.triton_lora import shrink_expand
from loraplex.ops.triton_ops import TritonState
from loraplex.ops.work_layout import GROUPS
from loraplex.ops.worklist import Phase

_log = logging.getLogger(__name__)

RESERVE_BYTES: Final = 4 << 30
"""Device memory that the page pool leaves: graphs, adapter tables, sampling, fragments."""
CUBLASLT_WORKSPACE_KIB: Final = 32768
"""Called with a line of progress."""


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def missing_for_fused(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Why the fused kernels cannot serve a model; None when they can."""
    if not installed("flashinfer"):
        return "FlashInfer is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer has no attention for {dtype}"
    if len(set(spec.windows)) != 1:
        return "its layers have different attention windows"
    return None


def prepare_libraries() -> torch.cuda.Stream:
    """Process-wide choices, before the first product runs; the stream that everything runs on.

    cuBLASLt is faster than cuBLAS at decode sizes (measured), with a workspace of fixed size. The stream has
    priority over the one beside it: a shrink must not take multiprocessors that a GEMM's only wave waits for.
    """
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", str(CUBLASLT_WORKSPACE_KIB))
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    return torch.cuda.Stream(priority=-1)


class CudaParts:
    """Everything but the pool that executors over one decoder need."""

    def __init__(
        self, decoder: Decoder, kv: KvShape, rows: int, report: Report, *, captured: bool = True
    ) -> None:
        self.decoder, self.kv, self.rows, self.report, self.captured = decoder, kv, rows, report, captured
        spec = decoder.spec
        self._angles = angle_table(spec.rope, spec.head_dim, decoder.positions, decoder.weights.device)

    def executor(self, bounds: PlanBounds, buckets: tuple[int, ...] | None = None) -> MakeExecutor:
        """What makes the executor of a runner under `bounds`. buckets: decode buckets, None for
        `bucket_sizes`.
        """

        def make(decoder: Decoder, table: AdapterTable, sampler: Sampler) -> CudaExecutor:
            inputs = StepInputs(bounds, self.rows, self.kv.page_tokens, table.pool.device)
            attention = self.attention(table.pool, inputs)
            head = GreedyHead(inputs, max(self.rows, bounds.max_requests), bounds.vocab_size, sampler.sampled)
            state = TritonState(table, bounds.max_requests, self.rows, bounds.max_requests)
            table.kernel_state = state
            side = torch.cuda.Stream() if self.captured else None
            graphs = DecodeGraphs(
                decoder,
                inputs,
                attention,
                head,
                state,
                buckets or bucket_sizes(bounds.max_requests),
                captured=self.captured,
                side=side,
            )
            mixed = MixedGraphs(
                decoder,
                inputs,
                attention,
                state,
                row_buckets(self.rows) if buckets is None else (),
                captured=self.captured,
            )
            return CudaExecutor(decoder, table, sampler, inputs, attention, head, graphs, mixed)

        return make

    def attention(self, pool: torch.Tensor, inputs: StepInputs) -> StepAttention:
        """FlashInfer over a pool."""
        from loraplex.model.cuda.flashinfer_attention import FlashInferAttention  # not on every machine

        spec, dtype = self.decoder.spec, self.decoder.weights.dtype
        window = spec.windows[0]
        rope = RopeAppend(pool, self.kv, dtype, spec.heads, self._angles, inputs)
        return FlashInferAttention(
            self.kv, dtype, spec.heads, -1 if window is None else window - 1, rope, inputs
        )


def padding_plan(rows: int, longest: int) -> BatchPlan:
    """A prefill plan of `rows` rows in requests of at most `longest` positions, all on the null page, every
    row scored.

    No control plane made it: it only brings kernels and buffers to the size of the largest step.
    """
    counts = np.full(-(-rows // longest), longest, dtype=np.int32)
    counts[-1] = rows - longest * (counts.size - 1)
    requests = RequestColumns.zeros(counts.size)
    requests.rows[:] = counts
    ends = np.cumsum(counts, dtype=np.int32)
    indptr = np.concatenate([np.zeros(1, np.int32), ends])
    positions = np.arange(rows, dtype=np.int32) - np.repeat(indptr[:-1], counts)
    return BatchPlan(
        generation=1,
        reference=NO_REFERENCE,
        prefills=counts.size,
        decodes=0,
        doff=rows,
        tokens=np.zeros(rows, np.int32),
        positions=positions,
        requests=requests,
        prefill_indptr=indptr,
        segment_offsets=np.array([0, rows], np.int32),
        segment_adapters=np.zeros(1, np.int32),
        group_rows=empty(),
        group_offsets=np.zeros(1, np.int32),
        group_adapters=empty(),
        logit_rows=np.arange(rows, dtype=np.int32),
        samples=SampleColumns.none(),
        prompt_logprobs=PromptLogprobColumns.none(),
    )


class Warmth:
    """Brings an executor's kernels, libraries and buffers to life; every call enqueues on the
    current stream.
    """

    def __init__(self, parts: CudaParts, executor: CudaExecutor, report: Report) -> None:
        self._parts, self._executor, self._report = parts, executor, report

    @torch.inference_mode()
    def largest_chunk(self) -> None:
        """The largest prefill step, on every prefill backend; compiles what is not in the caches."""
        executor, decoder = self._executor, self._parts.decoder
        inputs, attention = executor.inputs, executor.attention
        plan = padding_plan(self._parts.rows, decoder.positions)
        lengths = KvLengths.of(plan, inputs.page_tokens)
        logit_rows = torch.arange(plan.rows, device=inputs.device)
        for backend in attention.backends:
            self._timed(
                f"attention on {backend}, {plan.rows} rows",
                partial(self._run, plan, lengths, attention, backend, logit_rows),
            )

    def _run(
        self,
        plan: BatchPlan,
        lengths: KvLengths,
        attention: StepAttention,
        backend: str,
        logit_rows: torch.Tensor,
    ) -> None:
        inputs = self._executor.inputs
        inputs.send(plan, plan.pack(), lengths, np.zeros((len(plan.requests), 1), np.int32))
        inputs.unpack(len(plan.requests))
        logits = self._parts.decoder.forward(
            inputs.tokens[: plan.rows],
            inputs.positions[: plan.rows],
            attention.mixed_on(backend, plan, lengths),
            NoAdapters(),
            logit_rows,
        )
        self._executor.head.run(logits, plan.rows)

    @torch.inference_mode()
    def adapters(self, state: TritonState) -> None:
        """Every adapter kernel once, over empty work lists."""
        dims, dtype = self._parts.decoder.spec.module_dims().dims, state.table.dtype
        for phase in Phase:
            step = state.steps[phase]
            step.fill()
            for group, (first, last) in enumerate(GROUPS):
                modules = LAYER_MODULES[first:last]
                x = torch.zeros((1, dims[modules[0]][0]), dtype=dtype, device=state.table.pool.device)
                width = sum(dims[module][1] for module in modules)
                y = torch.zeros((1, width), dtype=dtype, device=state.table.pool.device)
                name = (
                    f"adapter kernels of {', '.join(m.name.lower() for m in modules)} in {phase.name.lower()}"
                )
                self._timed(name, partial(shrink_expand, y, x, step, 0, group))

    @torch.inference_mode()
    def sampling(self, sampled: int) -> None:
        """The kernels that draw tokens below `sampled`, and of the whole vocabulary for adapters whose
        tokenizer knows more.
        """
        device = self._executor.inputs.device
        logits = torch.zeros((1, self._parts.decoder.spec.vocab_size), dtype=torch.float32, device=device)
        options = np.zeros(1, dtype=OPTIONS)
        options["temperature"], options["top_p"] = 1.0, 1.0
        draws = DeviceDraws(device)
        index = np.zeros(1, dtype=np.int64)
        for ids in sorted({sampled, logits.shape[1]}):
            self._timed(f"sampling of {ids} ids", partial(draws.draw, logits, index, ids, options))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture decode steps and mixed ones, in one memory pool."""
        pool = torch.cuda.graph_pool_handle()
        self._executor.graphs.capture(pool, self._report)
        self._executor.mixed.capture(pool, self._report)

    def _timed(self, what: str, run: Callable[[], object]) -> None:
        started = time.perf_counter()
        run()
        torch.cuda.current_stream().synchronize()
        self._report(f"{what}: ready after {time.perf_counter() - started:.1f} s")
