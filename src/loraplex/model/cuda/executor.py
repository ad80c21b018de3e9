"""Plans on a CUDA device: decode steps replay captured graphs, steps with prefill are launched one by one.

Nothing here waits for the device: a plan goes there in one copy, sampled tokens stay there for the next plan, and
answers are copied to pinned memory behind the step. Rows that only want the best token never leave the graph; others
are sampled from the same logits behind it.

Specification: 0x03D, 0x03E; DESIGN 4 "The plan", "Frontiers and depth", "Sampling", "Start-up".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.attention import StepAttention
from loraplex.model.cuda.graphs import AdapterWork, DecodeGraphs
from loraplex.model.cuda.heads import GreedyHead
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.decoder import Decoder
from loraplex.model.executor import SampleLog, score, wants_scores
from loraplex.model.results import Pending, Stopwatch, no_scores, to_host
from loraplex.model.sampler import Sampler
from loraplex.ops.dispatch import TRITON, make_operator
from loraplex.ops.table import AdapterTable
from loraplex.ops.triton_ops import TritonState, state_of

NOTHING: Final = torch.empty(0, dtype=torch.int64)


class CudaExecutor:
    """`Executor` over static buffers. graphs: captured before the first plan. family: of adapters in mixed steps."""

    def __init__(
        self,
        decoder: Decoder,
        table: AdapterTable,
        sampler: Sampler,
        inputs: StepInputs,
        attention: StepAttention,
        head: GreedyHead,
        graphs: DecodeGraphs,
        family: str = TRITON,
    ) -> None:
        self._decoder, self._table, self._sampler = decoder, table, sampler
        self.inputs, self.attention, self.head, self.graphs = inputs, attention, head, graphs
        self._family = family
        self._samples = SampleLog()
        self._newest_sampled = 0

    def check_references(self, plan: BatchPlan) -> None:
        """See `Executor.check_references`. The device keeps the tokens of the newest plan that sampled."""
        self._samples.check(plan)
        if (plan.tokens < 0).any() and plan.reference != self._newest_sampled:
            raise InternalFault(
                ErrorCode.STALE_PLAN_GENERATION,
                f"the device holds tokens of plan {self._newest_sampled}, the plan refers to {plan.reference}",
            )

    def undone(self, slots: I32) -> None:
        """See `Executor.undone`."""
        self.inputs.forget(slots)

    def execute(self, plan: BatchPlan, packed: bytes, tables: I32, watch: Stopwatch) -> Pending:
        """See `Executor.execute`."""
        if len(plan.opens):
            self._sampler.open(plan.opens, plan.open_bias, plan.open_history)
        size, work = self._captured(plan)
        lengths = KvLengths.of(plan, self.inputs.page_tokens, size)
        self.inputs.send(plan, packed, lengths, tables)
        if plan.rows == 0:
            self._samples.note(plan, NOTHING)
            return Pending(plan, watch, NOTHING, NOTHING, no_scores(0), no_scores(0))
        if size:
            self.graphs.prepare(size, lengths)
            logits = self.graphs.run(size, work)[: plan.rows]
        else:
            logits = self._mixed(plan, lengths)
        return self._answer(plan, logits, watch)

    def _captured(self, plan: BatchPlan) -> tuple[int, AdapterWork]:
        """Bucket and adapter work of a plan that a graph serves; bucket 0 where none does."""
        size = self.graphs.bucket(plan.decodes) if plan.decodes and not plan.prefills else None
        if size is None or len(plan.prompt_logprobs):
            return 0, AdapterWork.NONE
        if not plan.group_rows.size:
            return size, AdapterWork.NONE
        state = self._state()
        if state is None:
            return 0, AdapterWork.NONE
        self._table.check_plan(plan)
        state.plan(plan)
        if state.traits.rest:
            return 0, AdapterWork.NONE
        return size, AdapterWork.covering(state.traits.groups)

    def _state(self) -> TritonState | None:
        return state_of(self._table) if self._family == TRITON else None

    def _mixed(self, plan: BatchPlan, lengths: KvLengths) -> torch.Tensor:
        """Logits [L, vocab] of a step launched one by one; greedy tokens of its samples, too."""
        inputs = self.inputs
        inputs.unpack(len(plan.requests))
        count = len(plan.logit_rows)
        rows = torch.from_numpy(plan.logit_rows.astype(np.int64))
        if inputs.device.type == "cuda":
            rows = rows.pin_memory().to(inputs.device, non_blocking=True)
        logits = self._decoder.forward(
            inputs.tokens[: plan.rows],
            inputs.positions[: plan.rows],
            self.attention.mixed(plan, lengths),
            make_operator(plan, self._table, self._family),
            rows,
        )
        if count:
            self.head.run(logits, max(count, len(plan.samples)))
        return logits

    def _answer(self, plan: BatchPlan, logits: torch.Tensor, watch: Stopwatch) -> Pending:
        inputs, count = self.inputs, len(plan.samples)
        slots = plan.requests[plan.samples[:, 1], 0]
        if count and not self._sampler.takes_best(slots):
            index = torch.from_numpy(plan.samples[:, 0].astype(np.int64)).to(inputs.device, non_blocking=True)
            rows = logits.index_select(0, index).float()
            order = np.arange(count, dtype=np.int32)
            inputs.sampled[:count] = self._sampler.sample(rows, order, slots, plan.samples[:, 2]).int()
        scores, prompt_scores = no_scores(count), no_scores(0)
        if wants_scores(plan):
            scores, prompt_scores = score(self._sampler, plan, logits, inputs.sampled[:count].long())
        self._samples.note(plan, NOTHING)
        if count:
            self._newest_sampled = plan.generation
        answers = inputs.answers[: inputs.bounds.max_requests + len(plan.logit_rows)]
        answers = answers.clone() if inputs.device.type == "cpu" else to_host(answers)
        tokens, finite = answers[:count], answers[inputs.bounds.max_requests :]
        return Pending(plan, watch, tokens, finite, scores, prompt_scores)
