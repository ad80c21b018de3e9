"""Steps with prefill rows as one captured graph: a bucket of rows, all layers, both attentions, the head, the best tokens.

Decode rows come first in memory, prefill rows behind them, then padding on the null page; the plan's own order does not
change. So decode attention begins at row 0 and each of the two attentions finds its rows where it was captured. Logits
are made for as many rows as there can be requests. Steps that a bucket does not hold are launched one by one: they keep the
device busy for longer than the host needs.

Owns graphs; logits are written into a buffer of the caller's. `captured=False` runs the same launches one by one.
Specification: 0x03D (one dense projection, two attention paths); rulings "Start-up", "Operators".
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.graphs import AdapterWork, Report, record
from loraplex.model.cuda.heads import GreedyHead
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.step_attention import MixedAttention, StepAttention
from loraplex.model.decoder import Decoder
from loraplex.ops.interface import AdapterOps, NoAdapters
from loraplex.ops.triton_captured import CapturedOps
from loraplex.ops.triton_ops import TritonState
from loraplex.ops.worklist import Phase

MOST_ROWS: Final = 1024
MOST_PREFILLS: Final = 64
"""Prefill requests of a captured step."""
LONG_PREFIX: Final = 8192
"""Positions of a prefill request from which its attention takes so long that the launches do not count."""


def row_buckets(most: int) -> tuple[int, ...]:
    """Buckets of rows up to `most`: every 32, from 512 on every 64."""
    return tuple(size for size in (*range(32, 513, 32), *range(576, MOST_ROWS + 1, 64)) if size <= most)


def prefills_of(size: int) -> int:
    """Most prefill requests of a bucket of so many rows."""
    return min(MOST_PREFILLS, size // 2)


class MixedGraphs:
    """Mixed steps of up to `buckets[-1]` rows. state: adapter work, None where there is none.

    logits: [at least as many rows as a step has requests, vocab], what `run` fills.
    """

    def __init__(
        self,
        decoder: Decoder,
        inputs: StepInputs,
        attention: StepAttention,
        head: GreedyHead,
        state: TritonState | None,
        logits: torch.Tensor,
        buckets: tuple[int, ...],
        *,
        captured: bool,
    ) -> None:
        self._decoder, self._inputs, self._head, self._state = decoder, inputs, head, state
        self.buckets, self._captured, self._logits = buckets, captured, logits
        self._attention: dict[int, MixedAttention] = {
            size: attention.mixed_bucket(size, prefills_of(size)) for size in buckets
        }
        self._graphs: dict[tuple[int, AdapterWork], torch.cuda.CUDAGraph] = {}

    def bucket(self, plan: BatchPlan) -> int:
        """The smallest bucket that holds a plan with prefill rows; 0 where none does."""
        if not plan.prefills or len(plan.prompt_logprobs):
            return 0
        if int(plan.requests.kv_end[: plan.prefills].max()) >= LONG_PREFIX:
            return 0
        fitting = (size for size in self.buckets if size >= plan.rows and prefills_of(size) >= plan.prefills)
        return next(fitting, 0)

    @property
    def kinds(self) -> tuple[AdapterWork, ...]:
        """Adapter work that there are graphs for."""
        return (AdapterWork.NONE,) if self._state is None else tuple(AdapterWork)

    def capture(self, pool: Any, report: Report) -> None:
        """Capture every graph, the largest first. pool: handle of the graphs' memory."""
        for size in reversed(self.buckets):
            self._attention[size].pad()
            self._body(size, self.kinds[-1])  # nothing may be made lazily inside a capture
            torch.cuda.current_stream().synchronize()
            for work in self.kinds:
                self._graphs[size, work] = record(pool, partial(self._body, size, work))
            report(f"captured mixed steps of {size} rows")

    def prepare(self, size: int, plan: BatchPlan, lengths: KvLengths) -> None:
        """Tell a bucket's attention about the rows and lengths of the next run."""
        self._attention[size].prepare(plan.requests.rows[: plan.prefills], lengths)

    def run(self, size: int, work: AdapterWork) -> torch.Tensor:
        """Enqueue the step whose plan was sent and prepared; logits of its logit rows first, until the next run."""
        if self._captured:
            self._graphs[size, work].replay()
        else:
            self._body(size, work)
        return self._logits

    def _body(self, size: int, work: AdapterWork) -> None:
        inputs = self._inputs
        most = min(size, inputs.bounds.max_requests)
        inputs.unpack(most, decode_first=True)
        inputs.pad(size)
        adapters: AdapterOps = NoAdapters()
        if work is not AdapterWork.NONE and self._state is not None:
            adapters = CapturedOps(self._state, work.value, phases=tuple(Phase))
        logits = self._decoder.forward(
            inputs.tokens[:size],
            inputs.positions[:size],
            self._attention[size],
            adapters,
            inputs.logit_rows(most),
            out=self._logits[:most],
        )
        self._head.run(logits, most)
