"""The model runner: a `Backend` that runs packed plans on one device.

Owns the page pool, the mirrors of request and adapter state, and the tokens that later plans refer to. It obeys: pages,
slots and victims are the plan's. A step either answers its plan or fails as a whole with a code, and a failed step
leaves the mirrors as they were; adapter deltas are idempotent and may stand.

Two rules keep a pipeline honest. Plans run in order of generation, none twice and none left out. A plan that was
launched while the failure of an earlier one had not been collected was made for a state that never came: it is stale.

Specification: 0x01F, 0x03D, 0x03E; DESIGN 4 "The plan", "Frontiers and depth".
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault, LoraplexError
from loraplex.core.layout import KvShape
from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.core.plan_check import PlanBounds, check_plan
from loraplex.core.ports import ImageSource
from loraplex.model.attention.interface import AttentionBackend, Histories
from loraplex.model.attention.torch_paged import TorchPagedAttention
from loraplex.model.decoder import Decoder
from loraplex.model.linear import Arena
from loraplex.model.mirrors import RequestMirrors
from loraplex.model.residents import Residents
from loraplex.model.results import Pending, Scores, Stopwatch, no_scores, to_host
from loraplex.model.sampler import Sampler, TokenMasks
from loraplex.ops.dispatch import make_operator
from loraplex.ops.table import AdapterTable

_log = logging.getLogger(__name__)

KEPT_PLANS: Final = 2
"""Plans whose sampled tokens stay on the device for references: depth 1 needs the newest."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Tokens of one plan, int64 [S] on the device, and the (slot, incarnation) that each belongs to."""

    tokens: torch.Tensor
    owners: I32


def allocate_pool(
    num_pages: int, page_bytes: int, device: torch.device, *, poison: bool = False
) -> torch.Tensor:
    """The page pool, uint8 [num_pages, page_bytes]; with `poison`, every byte is 0xFF (tests)."""
    if device.type == "cpu":  # in large pages, where the system gives them
        pool = Arena(num_pages * page_bytes).take(num_pages * page_bytes).view(num_pages, page_bytes)
    else:
        pool = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
    return pool.fill_(0xFF) if poison else pool


class ModelRunner:
    """`core.ports.Backend` over a decoder.

    kv: shape of a KV page. bounds: sizes that plans must respect, as the control plane has them. pool: from
    `allocate_pool`, or None to make it. sampled_vocab: ids from here on are never drawn. attention: None is plain torch.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KvShape,
        bounds: PlanBounds,
        images: ImageSource,
        *,
        sampled_vocab: int | None = None,
        pool: torch.Tensor | None = None,
        attention: AttentionBackend | None = None,
    ) -> None:
        spec, dtype = decoder.spec, decoder.weights.dtype
        self.device = decoder.weights.device
        if kv != spec.kv_shape(dtype.itemsize, kv.page_tokens) or bounds.vocab_size != spec.vocab_size:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"{kv} with {bounds.vocab_size} tokens does not belong to this model",
            )
        self.decoder, self.bounds = decoder, bounds
        self.pool = allocate_pool(bounds.num_pages, kv.page_bytes, self.device) if pool is None else pool
        self.table = AdapterTable(self.pool, dtype, bounds.max_adapter_slots, spec.module_dims())
        if attention is None:
            if self.device.type != "cpu":
                _log.warning(
                    "attention runs in plain torch on %s: correct, and slow; no fused kernel was given",
                    self.device,
                )
            attention = TorchPagedAttention(self.pool, kv, dtype, spec.heads, spec.windows)
        self._attention = attention
        self._compiled = decoder.compiled_over(self.pool, kv)
        self._mirrors = RequestMirrors(bounds, kv.page_tokens)
        self._residents = Residents(self.table, images)
        self._sampler = Sampler(
            bounds.max_requests, spec.vocab_size, sampled_vocab or spec.vocab_size, self.device
        )
        self._sampled: dict[int, _Sampled] = {}
        self._last = 0
        self._launched: deque[Pending | StepResult] = deque()

    def launch(self, plan: bytes) -> None:
        """Run a packed plan; on a CPU it has run when this returns. Never raises for what a plan says."""
        generation = self._last + 1
        try:
            unpacked = BatchPlan.unpack(plan)
            generation = unpacked.generation
            self._launched.append(self._launch(unpacked))
        except LoraplexError as error:
            self._launched.append(StepResult.failure(generation, f"{error.code.value}: {error.message}"))
        except Exception as error:  # noqa: BLE001 - the step's boundary: any failure becomes its typed result
            _log.exception("plan %d failed", generation)
            message = f"{ErrorCode.BACKEND_FAILED.value}: {type(error).__name__}: {error}"
            self._launched.append(StepResult.failure(generation, message))
        if generation == self._last + 1:
            self._last = generation

    def collect(self) -> bytes:
        """Packed result of the oldest plan not collected; waits for it."""
        if not self._launched:
            raise InternalFault(ErrorCode.BACKEND_FAILED, "no launched plan is left to collect")
        oldest = self._launched.popleft()
        return (oldest if isinstance(oldest, StepResult) else oldest.finish(self._residents)).pack()

    @torch.inference_mode()
    def _launch(self, plan: BatchPlan) -> Pending:
        watch = Stopwatch(self.device)
        self._check_order(plan)
        check_plan(plan, self.bounds)
        self._check_references(plan)
        self._residents.check(plan)
        with self._mirrors.step(plan) as tables:
            self._residents.apply(plan)
            if len(plan.opens):
                self._sampler.open(plan.opens, plan.open_bias, plan.open_history)
            logits = self._forward(plan, tables)
            pending = self._sample(plan, logits, watch)
        watch.stop()
        return pending

    def _check_order(self, plan: BatchPlan) -> None:
        code = ErrorCode.STALE_PLAN_GENERATION
        if plan.generation != self._last + 1:
            raise InternalFault(code, f"plan {plan.generation} came after plan {self._last}")
        if any(isinstance(step, StepResult) for step in self._launched):
            raise InternalFault(code, f"plan {plan.generation} builds on a plan that failed")

    def _check_references(self, plan: BatchPlan) -> None:
        """Every token reference names a sample of the same request in a plan that ran."""
        rows = np.flatnonzero(plan.tokens < 0)
        if not rows.size:
            return
        source = self._sampled.get(plan.reference)
        if source is None:
            raise InternalFault(
                ErrorCode.STALE_PLAN_GENERATION, f"tokens of plan {plan.reference} are not on the device"
            )
        samples = -1 - plan.tokens[rows]
        owners = np.repeat(plan.requests[:, :2], plan.requests[:, 5], axis=0)[rows]
        inside = int(samples.max()) < len(source.owners)
        if not inside or not np.array_equal(source.owners[samples], owners):
            raise InternalFault(
                ErrorCode.PLAN_TOKEN_REFERENCE, "a token reference names no sample of its own request"
            )

    def _tokens(self, plan: BatchPlan) -> torch.Tensor:
        """Token ids of all rows, int64 [T] on the device, references resolved there."""
        tokens = self._index(np.maximum(plan.tokens, 0))
        rows = np.flatnonzero(plan.tokens < 0)
        if rows.size:
            sampled = self._sampled[plan.reference].tokens
            tokens[self._index(rows)] = sampled[self._index(-1 - plan.tokens[rows])]
        return tokens

    def _forward(self, plan: BatchPlan, tables: I32) -> torch.Tensor:
        """Logits of the plan's logit rows, float32 [L, V]."""
        if plan.rows == 0:
            return torch.empty((0, self.bounds.vocab_size), dtype=torch.float32, device=self.device)
        histories = Histories(plan.prefills, plan.requests[:, 4], plan.requests[:, 5], tables)
        return self.decoder.forward(
            self._tokens(plan),
            self._index(plan.positions),
            self._attention.begin(histories),
            make_operator(plan, self.table),
            self._index(plan.logit_rows),
            self._compiled,
        )

    def _sample(self, plan: BatchPlan, logits: torch.Tensor, watch: Stopwatch) -> Pending:
        """Tokens and log probabilities. A row that is not finite is reported; the sampler never mixes rows."""
        finite = torch.isfinite(logits.sum(dim=-1))
        owners = plan.requests[plan.samples[:, 1], :2]
        tokens = torch.empty(0, dtype=torch.int64, device=self.device)
        scores, prompt_scores = no_scores(len(plan.samples)), no_scores(0)
        if len(plan.prompt_logprobs):
            index, _, targets, wanted = plan.prompt_logprobs.T
            prompt_scores = self._scores(logits, index, self._index(targets), wanted)
        if len(plan.samples):
            index, _, positions, wanted = plan.samples.T
            masks = TokenMasks(plan.mask_samples, plan.masks) if plan.mask_samples.size else None
            tokens = self._sampler.sample(logits, index, owners[:, 0], positions, masks)
            if (wanted >= 0).any():
                scores = self._scores(logits, index, tokens, wanted)
        self._sampled[plan.generation] = _Sampled(tokens, owners.copy())
        self._sampled.pop(plan.generation - KEPT_PLANS, None)
        return Pending(plan, watch, to_host(tokens), to_host(finite), scores, prompt_scores)

    def _scores(self, logits: torch.Tensor, index: I32, chosen: torch.Tensor, wanted: I32) -> Scores:
        ids, values = self._sampler.top_logprobs(logits, index, chosen, np.maximum(wanted, 0))
        return Scores(wanted, to_host(ids), to_host(values))

    def _index(self, values: I32 | np.ndarray) -> torch.Tensor:
        """Host integers as int64 on the device."""
        return torch.from_numpy(values.astype(np.int64)).to(self.device, non_blocking=True)
