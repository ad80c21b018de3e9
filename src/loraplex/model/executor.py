"""How a checked plan runs: the interface between the runner and a device, and its plain form in torch
operators.

An executor owns the tokens that later plans refer to and the sampler's state. It never checks a plan against
state (the runner has) and never touches adapter slots. Specification: 0x03D, 0x03E; rulings "The plan",
"Sampling".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.model.attention.backend import AttentionBackend, Histories
from loraplex.model.cpu_layers import CpuLayers
from loraplex.model.decoder import Decoder
from loraplex.model.results import Pending, Scores, Stopwatch, no_scores, to_host
from loraplex.model.sampler import Sampler, TokenMasks
from loraplex.model.transfer import to_device
from loraplex.ops.dispatch import make_operator
from loraplex.ops.table import AdapterTable

KEPT_PLANS: Final = 2
"""Plans whose sampled tokens stay on the device for references: depth 1 needs the newest."""


class Executor(Protocol):
    """Runs plans that the runner has checked, in order."""

    def check_references(self, plan: BatchPlan) -> None:
        """Every token reference names a sample of the same request in a plan that ran.

        Raises `stale_plan_generation` or `plan_token_reference`; changes nothing.
        """
        ...

    def execute(self, plan: BatchPlan, packed: bytes, tables: I32, watch: Stopwatch) -> Pending:
        """Enqueue the step. packed: the plan's bytes. tables [R, entries]: page-table rows of its
        requests.
        """
        ...

    def undone(self, slots: I32) -> None:
        """A step failed after its deltas may have reached the device: page tables of `slots` count as
        unknown.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Request slot and incarnation [S] of each sample of one plan, and its tokens int64 [S] on the device."""

    slots: I32
    incarnations: I32
    tokens: torch.Tensor


class SampleLog:
    """Who owns the samples of the newest plans."""

    def __init__(self) -> None:
        self._plans: dict[int, Sampled] = {}

    def note(self, plan: BatchPlan, tokens: torch.Tensor) -> None:
        """Remember a plan's samples; the plan before the last is forgotten."""
        incarnations = plan.requests.incarnation[plan.samples.request]
        self._plans[plan.generation] = Sampled(plan.sample_slots, incarnations, tokens)
        self._plans.pop(plan.generation - KEPT_PLANS, None)

    def tokens(self, generation: int) -> torch.Tensor:
        """Tokens of a plan that is remembered."""
        return self._plans[generation].tokens

    def check(self, plan: BatchPlan) -> None:
        """See `Executor.check_references`."""
        rows = np.flatnonzero(plan.tokens < 0)
        if not rows.size:
            return
        source = self._plans.get(plan.reference)
        if source is None:
            raise InternalFault(
                ErrorCode.STALE_PLAN_GENERATION, f"tokens of plan {plan.reference} are not on the device"
            )
        samples = -1 - plan.tokens[rows]
        requests = plan.requests[np.repeat(np.arange(len(plan.requests)), plan.requests.rows)[rows]]
        inside = int(samples.max()) < source.slots.size
        if (
            not inside
            or not np.array_equal(source.slots[samples], requests.slot)
            or not np.array_equal(source.incarnations[samples], requests.incarnation)
        ):
            raise InternalFault(
                ErrorCode.PLAN_TOKEN_REFERENCE, "a token reference names no sample of its own request"
            )


class TorchExecutor:
    """Every step in torch operators, launched one by one: the CPU's way, and any device's without fused
    kernels.

    compiled: layers that run in place of torch where they serve a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: AdapterTable,
        attention: AttentionBackend,
        sampler: Sampler,
        compiled: CpuLayers | None = None,
    ) -> None:
        self._decoder, self._table = decoder, table
        self._attention, self._sampler = attention, sampler
        self._device = decoder.weights.device
        self._compiled = compiled
        self._samples = SampleLog()

    def check_references(self, plan: BatchPlan) -> None:
        """See `Executor.check_references`."""
        self._samples.check(plan)

    def undone(self, slots: I32) -> None:
        """Page tables are read from each plan's own rows: there is nothing to correct."""

    def execute(self, plan: BatchPlan, packed: bytes, tables: I32, watch: Stopwatch) -> Pending:
        """See `Executor.execute`."""
        if len(plan.opens):
            self._sampler.open(plan.opens, plan.open_bias, plan.open_history)
        return self._sample(plan, self._forward(plan, tables), watch)

    def _tokens(self, plan: BatchPlan) -> torch.Tensor:
        """Token ids of all rows, int64 [T] on the device, references resolved there."""
        tokens = self._index(np.maximum(plan.tokens, 0))
        rows = np.flatnonzero(plan.tokens < 0)
        if rows.size:
            sampled = self._samples.tokens(plan.reference)
            tokens[self._index(rows)] = sampled[self._index(-1 - plan.tokens[rows])]
        return tokens

    def _forward(self, plan: BatchPlan, tables: I32) -> torch.Tensor:
        """Logits of the plan's logit rows, float32 [L, V]."""
        if plan.rows == 0:
            vocab = self._decoder.spec.vocab_size
            return torch.empty((0, vocab), dtype=torch.float32, device=self._device)
        histories = Histories(plan.prefills, plan.requests.kv_start, plan.requests.rows, tables)
        return self._decoder.forward(
            self._tokens(plan),
            self._index(plan.positions),
            self._attention.begin(histories),
            make_operator(plan, self._table),
            self._index(plan.logit_rows),
            self._compiled,
        ).float()

    def _sample(self, plan: BatchPlan, logits: torch.Tensor, watch: Stopwatch) -> Pending:
        """Tokens and log probabilities. A row that is not finite is reported; the sampler never
        mixes rows.
        """
        finite = torch.isfinite(logits.sum(dim=-1))
        tokens = torch.empty(0, dtype=torch.int64, device=self._device)
        if len(plan.samples):
            samples = plan.samples
            tokens = self._sampler.sample(
                logits, samples.logit, plan.sample_slots, samples.position, masks_of(plan)
            )
        scores, prompt_scores = score(self._sampler, plan, logits, tokens)
        self._samples.note(plan, tokens)
        return Pending(plan, watch, to_host(tokens), to_host(finite), scores, prompt_scores)

    def _index(self, values: I32 | np.ndarray) -> torch.Tensor:
        """Host integers as int64 on the device."""
        return to_device(values.astype(np.int64), self._device)


def masks_of(plan: BatchPlan) -> TokenMasks | None:
    """The plan's token masks, None where it has none."""
    return TokenMasks(plan.mask_samples, plan.masks) if plan.mask_samples.size else None


def wants_scores(plan: BatchPlan) -> bool:
    """Whether a plan asks for any log probability."""
    return bool(len(plan.prompt_logprobs)) or bool((plan.samples.logprobs >= 0).any())


def score(
    sampler: Sampler, plan: BatchPlan, logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[Scores, Scores]:
    """Log probabilities of samples and of prompt positions, on their way to the host. logits: [L, V]."""
    scores, prompt_scores = no_scores(len(plan.samples)), no_scores(0)
    if len(plan.prompt_logprobs):
        scored = plan.prompt_logprobs
        chosen = to_device(scored.target.astype(np.int64), logits.device)
        slots = plan.requests.slot[scored.request]
        prompt_scores = replace(
            _scores(sampler, logits, scored.logit, slots, chosen, scored.top),
            ranks=to_host(sampler.ranks(logits, scored.logit, chosen)),
        )
    if (plan.samples.logprobs >= 0).any():
        samples = plan.samples
        scores = _scores(sampler, logits, samples.logit, plan.sample_slots, tokens, samples.logprobs)
    return scores, prompt_scores


def _scores(
    sampler: Sampler,
    logits: torch.Tensor,
    index: I32,
    slots: I32,
    chosen: torch.Tensor,
    wanted: I32,
) -> Scores:
    ids, values = sampler.top_logprobs(logits, index, slots, chosen, np.maximum(wanted, 0))
    return Scores(wanted, to_host(ids), to_host(values))
