"""What a step left on the device becomes a `StepResult`: transfers that do not wait, and the packing of the
answer.

Everything is enqueued at launch; only `Pending.finish` waits, and only for its own step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.core.packed import I32, empty, float_bits
from loraplex.core.plan import BatchPlan, FaultColumns, StepResult
from loraplex.model.residents import Residents


class Stopwatch:
    """Device time of one step in microseconds; on a CPU, time of the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._started = self._ended = time.perf_counter_ns()
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        """The step's work, transfers included, has been enqueued."""
        self._ended = time.perf_counter_ns()
        if self._events:
            self._events[1].record()

    def wait(self) -> int:
        """Wait until the work is done; microseconds that it took."""
        if self._events:
            self._events[1].synchronize()
            return round(self._events[0].elapsed_time(self._events[1]) * 1000.0)
        return (self._ended - self._started) // 1000


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, there once the step's stopwatch has been waited for."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of n positions. ids, values [n, 1 + widest]: the position's own token, then the best
    ones.

    wanted: int32 [n], top entries of each position; -1 for none at all. ranks [n]: of the own tokens, where
    they are wanted.
    """

    wanted: I32
    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor | None = None

    def packed(self) -> tuple[I32, I32, I32]:
        """(indptr [n + 1], ids, float32 bits of the values): 1 + wanted entries of each position."""
        counts = np.minimum(self.wanted + 1, self.ids.shape[1])  # a small vocabulary has fewer entries
        indptr = np.zeros(counts.size + 1, dtype=np.int32)
        np.cumsum(counts, out=indptr[1:])
        if not indptr[-1]:
            return indptr, empty(), empty()
        keep = np.arange(self.ids.shape[1])[None, :] < counts[:, None]
        return indptr, self.ids.numpy()[keep].astype(np.int32), float_bits(self.values.numpy()[keep])


def no_scores(count: int) -> Scores:
    """Scores of `count` positions of which none wants any."""
    nothing = torch.empty((count, 0))
    return Scores(np.full(count, -1, dtype=np.int32), nothing.long(), nothing)


@dataclass(slots=True)
class Pending:
    """A step that was launched: what `collect` turns into its result. Tensors are host copies under way.

    tokens: integers [S]. finite: bool or integers [L], whether each logit row is.
    """

    plan: BatchPlan
    watch: Stopwatch
    tokens: torch.Tensor
    finite: torch.Tensor
    scores: Scores
    prompt_scores: Scores

    def finish(self, residents: Residents) -> StepResult:
        """Wait for the step and answer its plan."""
        execute_us = self.watch.wait()
        indptr, ids, values = self.scores.packed()
        prompt_indptr, prompt_ids, prompt_values = self.prompt_scores.packed()
        ranks = self.prompt_scores.ranks
        return StepResult(
            generation=self.plan.generation,
            execute_us=min(execute_us, 2**31 - 1),
            tokens=self.tokens.numpy().astype(np.int32),
            logprob_indptr=indptr,
            logprob_ids=ids,
            logprob_values=values,
            prompt_logprob_indptr=prompt_indptr,
            prompt_logprob_ids=prompt_ids,
            prompt_logprob_values=prompt_values,
            prompt_logprob_ranks=empty() if ranks is None else ranks.numpy().astype(np.int32),
            copied=residents.report(self.plan.generation),
            faults=self._faults(),
        )

    def _faults(self) -> FaultColumns:
        """Every request with a logit row that is not finite."""
        bad = self.plan.logit_rows[self.finite.numpy() == 0]
        if not bad.size:
            return FaultColumns.none()
        requests = np.unique(np.searchsorted(self.plan.row_indptr[1:], bad, side="right"))
        return FaultColumns.filled(requests.size, request=requests, not_finite=1)
