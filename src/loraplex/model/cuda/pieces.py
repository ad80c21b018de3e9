"""Steps with prefill rows in captured pieces: everything between two attentions is one graph, attention is launched.

A step of up to 2,048 rows is over on the device before the host could launch its kernels one by one; the pieces take
a tenth of the launches. Rows are padded to a bucket on the null page. Larger steps are launched one by one: they keep
the device busy for longer than the host needs. Owns the static activations between pieces.

Specification: 0x03D (one dense projection, two attention paths); rulings "Start-up".
"""

from __future__ import annotations

from typing import Any, Final

import torch

from loraplex.model.cuda.graphs import AdapterWork, Report
from loraplex.model.cuda.inputs import StepInputs
from loraplex.model.cuda.step_attention import MixedAttention, StepAttention
from loraplex.model.decoder import Decoder
from loraplex.ops.interface import AdapterOps, NoAdapters
from loraplex.ops.triton_captured import CapturedOps
from loraplex.ops.triton_ops import TritonState
from loraplex.ops.worklist import Phase

MOST_ROWS: Final = 2048


def row_buckets(most: int) -> tuple[int, ...]:
    """Buckets of rows: powers of two with one step between, up to `most`."""
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, MOST_ROWS]
    return tuple(size for size in sizes if size <= most)


class PiecewiseSteps:
    """Mixed steps in pieces. buckets: rows; state: adapter work, None where there is none."""

    kinds: Final = (AdapterWork.NONE, AdapterWork.ALL)

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
        self._decoder, self._inputs, self._attention, self._state = decoder, inputs, attention, state
        self.buckets, self._captured = buckets, captured
        spec, most = decoder.spec, max(buckets, default=0)

        def rows(width: int) -> torch.Tensor:
            return torch.zeros((most, width), dtype=decoder.weights.dtype, device=inputs.device)

        self._qkv = rows(spec.q_size + 2 * spec.kv_size)
        self._attended, self._x, self._residual = (
            rows(spec.q_size),
            rows(spec.hidden_size),
            rows(spec.hidden_size),
        )
        self._graphs: dict[tuple[int, AdapterWork], list[torch.cuda.CUDAGraph]] = {}

    def bucket(self, rows: int) -> int | None:
        """The smallest bucket that holds so many rows."""
        return next((size for size in self.buckets if size >= rows), None)

    def capture(self, pool: Any, report: Report) -> None:
        """Capture every piece of every bucket, the largest first. pool: handle of the graphs' memory."""
        kinds = self.kinds if self._state is not None else self.kinds[:1]
        for size in reversed(self.buckets):
            for work in kinds:
                graphs = []
                for piece in range(self._decoder.spec.layers + 1):
                    if piece < 2:
                        self._body(piece, size, work)  # kernels of this size are loaded outside a capture
                        torch.cuda.current_stream().synchronize()
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        self._body(piece, size, work)
                    finally:
                        graph.capture_end()
                    graphs.append(graph)
                self._graphs[size, work] = graphs
            report(f"captured mixed steps of {size} rows")

    def run(
        self, size: int, rows: int, work: AdapterWork, attention: MixedAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last layer's output and residual stream, each [rows, hidden], until the next run.

        To be called after `StepInputs.unpack` of a plan of `rows` rows.
        """
        spec = self._decoder.spec
        q, _, _ = self._decoder.split(self._qkv[:rows].view(rows, -1, spec.head_dim))
        attended = self._attended[:rows].view(rows, spec.heads, spec.head_dim)
        graphs = self._graphs[size, work] if self._captured else None
        for piece in range(spec.layers + 1):
            if graphs is None:
                self._body(piece, size, work)
            else:
                graphs[piece].replay()
            if piece < spec.layers:
                attention.attend(piece, q, attended)
        return self._x[:rows], self._residual[:rows]

    def _body(self, piece: int, size: int, work: AdapterWork) -> None:
        """Piece p: what follows the attention of layer p - 1, up to the appended q, k and v of layer p."""
        decoder, inputs = self._decoder, self._inputs
        adapters: AdapterOps = NoAdapters()
        if work is not AdapterWork.NONE and self._state is not None:
            adapters = CapturedOps(self._state, work.value, phases=tuple(Phase))
        residual, x = self._residual[:size], self._x[:size]
        if piece == 0:
            inputs.pad(size)
            decoder.embed(inputs.tokens[:size], adapters, residual)
        else:
            last = piece == decoder.spec.layers
            x = decoder.after_attention(
                piece - 1, self._attended[:size], residual, adapters, x if last else None
            )
            if last:
                return
        heads = decoder.before_attention(piece, x, residual, adapters, self._qkv[:size])
        self._attention.append(piece, decoder.split(heads)[0])
