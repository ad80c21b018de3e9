"""Plans on a CUDA device: decode steps and mixed ones replay captured graphs, larger ones are launched one by
one.

Nothing here waits for the device: a plan goes there in one copy, sampled tokens stay there for the next plan,
and answers are copied to pinned memory behind the step. Rows that only want the best token never leave the
graph; others are sampled from the same logits behind it.

Specification: 0x03D, 0x03E; rulings "The plan", "Frontiers and depth", "Sampling", "Start-up".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.model.cuda.graphs import AdapterWork, DecodeGraphs
from loraplex.model.cuda.heads import GreedyHead
from loraplex.model.cuda.inputs import KvLengths, StepInputs
from loraplex.model.cuda.mixed import MixedGraphs, decode_first
from loraplex.model.cuda.step_attention import StepAttention
from loraplex.model.decoder import Decoder
from loraplex.model.executor import SampleLog, masks_of, score, wants_scores
from loraplex.model.results import Pending, Stopwatch, no_scores, to_host
from loraplex.model.sampler import Sampler
from loraplex.model.transfer import to_device
from loraplex.ops.dispatch import TRITON, make_operator
from loraplex.ops.interface import NoAdapters
from loraplex.ops.table import AdapterTable
from loraplex.ops.triton_ops import state_of

NOTHING: Final = torch.empty(0, dtype=torch.int64)


class CudaExecutor:
    """`Executor` over static buffers. graphs, mixed: captured before the first plan. family: of adapters
    elsewhere.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: AdapterTable,
        sampler: Sampler,
        inputs: StepInputs,
        attention: StepAttention,
        head: GreedyHead,
        graphs: DecodeGraphs,
        mixed: MixedGraphs,
        family: str = TRITON,
    ) -> None:
        self._decoder, self._table, self._sampler = decoder, table, sampler
        self.inputs, self.attention, self.head, self.graphs = inputs, attention, head, graphs
        self.mixed, self._family = mixed, family
        self._samples = SampleLog()
        self._newest_sampled = 0

    def check_references(self, plan: BatchPlan) -> None:
        """See `Executor.check_references`. The device keeps the tokens of the newest plan that sampled."""
        self._samples.check(plan)
        if (plan.tokens < 0).any() and plan.reference != self._newest_sampled:
            raise InternalFault(
                ErrorCode.STALE_PLAN_GENERATION,
                f"the device holds tokens of plan {self._newest_sampled}, the plan refers to "
                f"{plan.reference}",
            )

    def undone(self, slots: I32) -> None:
        """See `Executor.undone`."""
        self.inputs.forget(slots)

    def execute(self, plan: BatchPlan, packed: bytes, tables: I32, watch: Stopwatch) -> Pending:
        """See `Executor.execute`."""
        if len(plan.opens):
            self._sampler.open(plan.opens, plan.open_bias, plan.open_history)
        size, mixed = self._decode_bucket(plan), self.mixed.bucket(plan)
        work = self._work(plan, decode_first=mixed > 0)
        if work is None:
            size = mixed = 0
        lengths = KvLengths.of(plan, self.inputs.page_tokens, size)
        self.inputs.send(plan, packed, lengths, tables)
        if plan.rows == 0:
            self._samples.note(plan, NOTHING)
            return Pending(plan, watch, NOTHING, NOTHING, no_scores(0), no_scores(0))
        if size and work is not None:
            self.graphs.prepare(size, lengths)
            logits = self.graphs.run(size, work)[: plan.rows]
        elif mixed and work is not None:
            logits = self._mixed(mixed, plan, lengths, work)
        else:
            logits = self._launched(plan, lengths)
        return self._answer(plan, logits, watch)

    def _decode_bucket(self, plan: BatchPlan) -> int:
        """Bucket of a plan of decode rows alone; 0 for any other."""
        if plan.prefills or not plan.decodes or len(plan.prompt_logprobs):
            return 0
        return self.graphs.bucket(plan.decodes) or 0

    def _work(self, plan: BatchPlan, *, decode_first: bool) -> AdapterWork | None:
        """Captured adapter work that serves a plan, its lists filled; None where only the operator families
        can.
        """
        if not plan.group_rows.size:
            return AdapterWork.NONE
        if self._family != TRITON:
            return None
        self._table.check_plan(plan)
        state = state_of(self._table)
        state.plan(plan, decode_first=decode_first)
        return None if state.traits.rest else AdapterWork.covering(state.traits.groups)

    def _mixed(self, size: int, plan: BatchPlan, lengths: KvLengths, work: AdapterWork) -> torch.Tensor:
        """Logits [L, vocab] of a step that a bucket of `size` rows serves; greedy tokens of its
        samples, too.
        """
        self.mixed.prepare(size, plan, lengths)
        x, residual = self.mixed.run(size, work)
        rows = to_device(decode_first(plan.logit_rows, plan).astype(np.int64), self.inputs.device)
        return self._chosen(plan, self._decoder.head(x, residual, NoAdapters(), rows))

    def _launched(self, plan: BatchPlan, lengths: KvLengths) -> torch.Tensor:
        """Logits [L, vocab] of a step that no graph serves; greedy tokens of its samples, too."""
        inputs = self.inputs
        inputs.unpack(len(plan.requests))
        rows = to_device(plan.logit_rows.astype(np.int64), inputs.device)
        adapters = make_operator(plan, self._table, self._family)
        tokens, positions = inputs.tokens[: plan.rows], inputs.positions[: plan.rows]
        attention = self.attention.mixed(plan, lengths)
        return self._chosen(plan, self._decoder.forward(tokens, positions, attention, adapters, rows))

    def _chosen(self, plan: BatchPlan, logits: torch.Tensor) -> torch.Tensor:
        """The logits, with the greedy tokens of the plan's samples made from them."""
        if logits.shape[0]:
            self.head.run(logits, max(logits.shape[0], len(plan.samples)))
        return logits

    def _answer(self, plan: BatchPlan, logits: torch.Tensor, watch: Stopwatch) -> Pending:
        inputs, count = self.inputs, len(plan.samples)
        slots = plan.sample_slots
        if count and (plan.mask_samples.size or not self._sampler.takes_best(slots)):
            index = to_device(plan.samples.logit.astype(np.int64), inputs.device)
            rows = logits.index_select(0, index).float()
            order = np.arange(count, dtype=np.int32)
            drawn = self._sampler.sample(rows, order, slots, plan.samples.position, masks_of(plan))
            inputs.sampled[:count] = drawn.int()
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
