"""Steps with prefill rows as one captured graph: a bucket of rows, all layers, both attentions.

Decode rows come first in memory, prefill rows behind them, then padding on the null page; the plan's own
order does not change. So decode attention begins at row 0 and each of the two attentions finds its rows where
it was captured. The head follows outside, over as many rows as the plan asks logits of. Steps that no bucket
holds are launched one by one: they keep the device busy for longer than the host needs.

Owns graphs and the static activations that the head reads. `captured=False` runs the same launches one by
one. Measured: docs/benchmarks.md. Specification: 0x03D (one dense projection, two attention paths); rulings
"Start-up", "Operators".
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import torch

from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.graphs import AdapterWork, record
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.step_attention import MixedAttention, StepAttention
from loraplex.model.decoder import Decoder
from loraplex.model.progress import Report
from loraplex.ops.interface import AdapterOps, NoAdapters
from loraplex.ops.triton_captured import CapturedOps
from loraplex.ops.triton_ops import TritonState
from loraplex.ops.worklist import Phase

BUCKETS: Final = (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 432, 512, 576, 640, 768, 896, 1024)
"""Rows. Left out are those at which GEMMs take as long as at the next one, or longer."""
MOST_PREFILLS: Final = 64
"""Prefill requests of a captured step."""
LONG_PREFIX: Final = 8192
"""Positions of a prefill request from which its attention takes so long that launches do not count."""


def row_buckets(most: int) -> tuple[int, ...]:
    """Buckets of rows up to `most`."""
    return tuple(size for size in BUCKETS if size <= most)


def decode_first(rows: I32, plan: BatchPlan) -> I32:
    """Where rows of a plan lie in a bucket."""
    return np.where(rows < plan.doff, rows + plan.decodes, rows - plan.doff).astype(np.int32)


class MixedGraphs:
    """Mixed steps of up to `buckets[-1]` rows. state: adapter work, None where there is none."""

    def __init__(
        self,
        decoder: Decoder,
        inputs: StepInputs,
        attention: StepAttention,
        state: TritonState | None,
        buckets: tuple[int, ...],
        *,
        captured: bool,
    ) -> None:
        self._decoder, self._inputs, self._state = decoder, inputs, state
        self.buckets, self._captured = buckets, captured
        most = inputs.bounds.max_requests
        self._prefills = {size: min(MOST_PREFILLS, size // 2, most) for size in buckets}
        self._attention: dict[int, MixedAttention] = {
            size: attention.mixed_bucket(size, prefills) for size, prefills in self._prefills.items()
        }
        self._x, self._residual = (
            torch.zeros(
                (max(buckets, default=0), decoder.spec.hidden_size),
                dtype=decoder.weights.dtype,
                device=inputs.device,
            )
            for _ in range(2)
        )
        self._graphs: dict[tuple[int, AdapterWork], torch.cuda.CUDAGraph] = {}

    def bucket(self, plan: BatchPlan) -> int:
        """The smallest bucket that holds a plan with prefill rows; 0 where none does."""
        if not plan.prefills or int(plan.requests.kv_end[: plan.prefills].max()) >= LONG_PREFIX:
            return 0
        fitting = (
            size for size in self.buckets if size >= plan.rows and self._prefills[size] >= plan.prefills
        )
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

    def run(self, size: int, work: AdapterWork) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the step whose plan was sent and prepared: the last layer's output and the residual stream.

        Each [size, hidden] until the next run, decode rows first.
        """
        if self._captured:
            self._graphs[size, work].replay()
        else:
            self._body(size, work)
        return self._x[:size], self._residual[:size]

    def _body(self, size: int, work: AdapterWork) -> None:
        decoder, inputs, attention = self._decoder, self._inputs, self._attention[size]
        inputs.unpack(min(size, inputs.bounds.max_requests), decode_first=True)
        inputs.pad(size)
        adapters: AdapterOps = NoAdapters()
        if work is not AdapterWork.NONE and self._state is not None:
            adapters = CapturedOps(self._state, work.value, phases=tuple(Phase))
        x = residual = decoder.embed(inputs.tokens[:size], adapters, self._residual[:size])
        for layer in range(decoder.spec.layers):
            heads = decoder.before_attention(layer, x, residual, adapters)
            attended = attention.run(layer, *decoder.split(heads)).reshape(-1, decoder.spec.q_size)
            out = self._x[:size] if layer + 1 == decoder.spec.layers else None
            x = decoder.after_attention(layer, attended, residual, adapters, out)
