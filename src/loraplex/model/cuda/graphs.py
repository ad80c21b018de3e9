"""Captured decode steps: one graph for each bucket of requests and each kind of adapter work, in one shared
memory pool.

A bucket pads a batch with rows on the null page. A batch without adapters replays a graph without adapter
work; one whose adapters touch attention alone replays one without launches for the feed-forward part. A graph
follows every plan: lengths, pages, tokens and work lists are read from static buffers.

Owns graphs and the static logits. `captured=False` runs the same launches one by one (tests, devices without
graphs). Specification: rulings "Start-up", "Operators".
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final

import torch

from loraplex.model.cuda.heads import GreedyHead
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.step_attention import BucketAttention, StepAttention
from loraplex.model.decoder import Decoder
from loraplex.model.progress import Report
from loraplex.ops.interface import AdapterOps, NoAdapters
from loraplex.ops.triton_captured import CapturedOps
from loraplex.ops.triton_ops import TritonState

OVERLAP_ROWS: Final = 128
"""Rows up to which the shrink runs beside the GEMM; above, after it is as fast."""


class AdapterWork(Enum):
    """Fused groups (`work_layout.GROUPS`) that a captured step launches."""

    NONE = frozenset[int]()
    ATTENTION = frozenset({0, 1})
    ALL = frozenset({0, 1, 2, 3})

    @staticmethod
    def covering(groups: frozenset[int]) -> AdapterWork:
        """The least work that serves these groups."""
        return next(work for work in AdapterWork if groups <= work.value)


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Buckets for up to `most` requests: powers of two, then every 8, from 128 on every 16."""
    sizes = [1, 2, 4, *range(8, min(most, 128) + 1, 8), *range(144, most + 1, 16)]
    return tuple(sorted({min(size, most) for size in sizes} | {most}))


def record(pool: Any, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What `run` enqueues, as a graph. pool: handle of the graphs' memory.

    Not torch.cuda.graph: it collects garbage and empties the allocator's cache for every capture.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    finally:
        graph.capture_end()
    return graph


class DecodeGraphs:
    """Steps of up to `buckets[-1]` decode requests.

    logits: [largest bucket, vocab] of the model's type, the last step's. state: adapter work, None where
    there is none. side: stream for work beside the GEMMs.
    """

    def __init__(
        self,
        decoder: Decoder,
        inputs: StepInputs,
        attention: StepAttention,
        head: GreedyHead,
        state: TritonState | None,
        buckets: tuple[int, ...],
        *,
        captured: bool,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self._decoder, self._inputs, self._head, self._state, self._side = decoder, inputs, head, state, side
        self.buckets = buckets
        self._captured = captured
        self._attention: dict[int, BucketAttention] = {size: attention.bucket(size) for size in buckets}
        self._graphs: dict[tuple[int, AdapterWork], torch.cuda.CUDAGraph] = {}
        self.logits = torch.zeros(
            (buckets[-1], decoder.spec.vocab_size), dtype=decoder.weights.dtype, device=inputs.device
        )

    def bucket(self, requests: int) -> int | None:
        """The smallest bucket that holds so many requests."""
        return next((size for size in self.buckets if size >= requests), None)

    @property
    def kinds(self) -> tuple[AdapterWork, ...]:
        """Adapter work that there are graphs for."""
        return (AdapterWork.NONE,) if self._state is None else tuple(AdapterWork)

    def capture(self, pool: Any, report: Report) -> None:
        """Capture every graph, the largest first. pool: handle of the graphs' memory."""
        todo = [(size, work) for size in reversed(self.buckets) for work in self.kinds]
        for index, (size, work) in enumerate(todo):
            self.prepare(size, KvLengths.padding(size))
            self._body(
                size, work
            )  # lazily made handles and compiled kernels must not be made inside a capture
            torch.cuda.current_stream().synchronize()
            self._graphs[size, work] = record(pool, partial(self._body, size, work))
            report(f"captured {index + 1} of {len(todo)} decode steps: {size} requests, {work.name.lower()}")

    def prepare(self, size: int, lengths: KvLengths) -> None:
        """Tell a bucket's attention about the lengths of the next run."""
        self._attention[size].prepare(lengths)

    def run(self, size: int, work: AdapterWork) -> torch.Tensor:
        """Enqueue the step whose plan was sent and prepared; logits [size, vocab] until the next run."""
        if self._captured:
            self._graphs[size, work].replay()
        else:
            self._body(size, work)
        return self.logits[:size]

    def _body(self, size: int, work: AdapterWork) -> None:
        inputs = self._inputs
        inputs.unpack(size)
        adapters: AdapterOps = NoAdapters()
        if work is not AdapterWork.NONE and self._state is not None:
            adapters = CapturedOps(self._state, work.value, self._side if size <= OVERLAP_ROWS else None)
        logits = self._decoder.forward(
            inputs.tokens[:size],
            inputs.positions[:size],
            self._attention[size],
            adapters,
            None,
            out=self.logits[:size],
        )
        self._head.run(logits, size)
