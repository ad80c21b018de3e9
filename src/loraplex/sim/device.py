"""A virtual device: runs packed plans over page contents that can be checked, with faults on demand.

It computes no model. A KV position holds a fingerprint of (token, position, adapter image); a sampled token is a hash
of all fingerprints of its history, read back through the page table. So a row that ran with a wrong adapter, a stale
page, a lost or doubled position produces another token than `expected_tokens`, which knows nothing of pages.

Specification: DESIGN 8 (simulator: a clock, a device and faults, nothing else).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import COPY_DIGEST_WORDS, BatchPlan, StepResult
from loraplex.core.plan_check import PlanBounds, check_plan

U64 = npt.NDArray[np.uint64]
POISON: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)


def _mix(values: U64) -> U64:
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    return values ^ (values >> np.uint64(29))


def fingerprints(tokens: I32, first: int, adapter: int) -> U64:
    """What KV positions first.. hold for `tokens` under `adapter` (0: base)."""
    positions = np.arange(first, first + tokens.size, dtype=np.uint64)
    return _mix(tokens.astype(np.uint64) * _MIX + positions * np.uint64(0x1_0000_01B3) + np.uint64(adapter))


def next_token(history: U64, vocab_size: int) -> int:
    """The token that a history of fingerprints leads to."""
    weights = _mix(np.arange(1, history.size + 1, dtype=np.uint64) * _MIX) | np.uint64(1)
    return int(_mix(np.atleast_1d((history * weights).sum(dtype=np.uint64)))[0] % np.uint64(vocab_size))


def next_allowed(token: int, words: I32) -> int:
    """The first token from `token` on, around the vocabulary, that a mask allows."""
    allowed = np.flatnonzero(np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % allowed.size])


def adapter_number(words: I32) -> int:
    """A number for an adapter image, from its digest's words."""
    return int.from_bytes(words.astype("<i4").tobytes()[:7], "little") | 1


def expected_tokens(prompt: I32, adapter: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` tokens that a request alone would produce."""
    tokens = prompt.tolist()
    for _ in range(count):
        history = fingerprints(np.array(tokens, dtype=np.int32), 0, adapter)
        tokens.append(next_token(history, vocab_size))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class Faults:
    """Faults to inject, by plan generation or adapter number. Empty: none."""

    fail_plans: set[int] = field(default_factory=set)
    stale_plans: set[int] = field(default_factory=set)
    torn_copies: set[int] = field(default_factory=set)
    nan_plans: set[int] = field(default_factory=set)


class VirtualDevice:
    """`core.ports.Backend` over checkable memory; every plan is validated and every read is verified."""

    def __init__(self, bounds: PlanBounds, page_tokens: int, faults: Faults | None = None) -> None:
        self.bounds, self.page_tokens = bounds, page_tokens
        self.faults = faults or Faults()
        self.memory = np.full((bounds.num_pages, page_tokens), POISON, dtype=np.uint64)
        self.page_table = np.zeros((bounds.max_requests, bounds.max_pages_per_request), dtype=np.int32)
        self.incarnation = np.zeros(bounds.max_requests, dtype=np.int64)
        self.frontier = np.zeros(bounds.max_requests, dtype=np.int64)
        self.installed: dict[int, tuple[int, int, I32]] = {}
        self.published: dict[int, int] = {}
        self.sampled: dict[int, I32] = {}
        self.plans: list[bytes] = []
        self.on_plan: Callable[[BatchPlan], None] | None = None
        self._results: deque[bytes] = deque()

    def launch(self, plan: bytes) -> None:
        """Run a plan at once; its result waits for `collect`."""
        self.plans.append(plan)
        unpacked = BatchPlan.unpack(plan)
        if self.on_plan is not None:
            self.on_plan(unpacked)
        try:
            result = self._run(unpacked)
        except InternalFault as fault:
            result = StepResult.failure(unpacked.generation, f"{fault.code.value}: {fault.message}")
        self._results.append(result.pack())

    def collect(self) -> bytes:
        """Result of the oldest plan not collected."""
        return self._results.popleft()

    def _run(self, plan: BatchPlan) -> StepResult:
        check_plan(plan, self.bounds)
        if plan.generation in self.faults.stale_plans:
            self.faults.stale_plans.discard(plan.generation)
            raise InternalFault(ErrorCode.STALE_KV_FRONTIER, "injected")
        self._check_mirrors(plan)
        self._apply_deltas(plan)
        if plan.generation in self.faults.fail_plans:
            raise InternalFault(ErrorCode.BACKEND_FAILED, "injected")
        copied = self._copy(plan)
        tokens = self._resolve(plan)
        sampled = self._forward(plan, tokens)
        self.frontier[plan.requests[:, 0]] = plan.requests[:, 6] + 1
        self.sampled[plan.generation] = sampled
        faults = (
            np.array([[0, 1]], dtype=np.int32)
            if plan.generation in self.faults.nan_plans and len(plan.requests)
            else np.empty((0, 2), dtype=np.int32)
        )
        return StepResult(
            generation=plan.generation,
            execute_us=1,
            tokens=sampled,
            logprob_indptr=np.zeros(len(plan.samples) + 1, dtype=np.int32),
            prompt_logprob_indptr=np.zeros(len(plan.prompt_logprobs) + 1, dtype=np.int32),
            copied=copied,
            faults=faults,
        )

    def _check_mirrors(self, plan: BatchPlan) -> None:
        incarnation, frontier = self.incarnation.copy(), self.frontier.copy()
        incarnation[plan.opens[:, 0]] = plan.opens[:, 1]
        frontier[plan.opens[:, 0]] = 0
        slots = plan.requests[:, 0]
        if not np.array_equal(incarnation[slots], plan.requests[:, 1]):
            raise InternalFault(
                ErrorCode.STALE_REQUEST_GENERATION, "a request slot holds another incarnation"
            )
        if not np.array_equal(frontier[slots], plan.requests[:, 6]):
            raise InternalFault(ErrorCode.STALE_KV_FRONTIER, "a planned frontier is not the device's")
        if plan.reference > 0 and plan.reference not in self.sampled:
            raise InternalFault(ErrorCode.STALE_PLAN_GENERATION, f"plan {plan.reference} never ran")

    def _apply_deltas(self, plan: BatchPlan) -> None:
        self.incarnation[plan.opens[:, 0]] = plan.opens[:, 1]
        self.frontier[plan.opens[:, 0]] = 0
        for slot, generation in plan.publishes.tolist():
            if slot not in self.installed or self.installed[slot][0] != generation:
                raise InternalFault(ErrorCode.STALE_SLOT_GENERATION, f"slot {slot} was never filled")
            self.published[slot] = generation
        for slot, generation in plan.retires.tolist():
            if self.published.get(slot) == generation:
                del self.published[slot], self.installed[slot]
        self.memory[plan.scrub_pages] = POISON
        self.page_table[plan.page_deltas[:, 0], plan.page_deltas[:, 1]] = plan.page_deltas[:, 2]

    def _copy(self, plan: BatchPlan) -> I32:
        rows, offset = [], 0
        for copy in plan.copies:
            slot, generation, count = copy[COPY_DIGEST_WORDS:].tolist()
            pages = plan.copy_pages[offset : offset + count].copy()
            offset += count
            number = adapter_number(copy[:COPY_DIGEST_WORDS])
            self.memory[pages] = np.uint64(number)
            self.installed[slot] = (generation, number, pages)
            rows.append((slot, generation, 0 if number in self.faults.torn_copies else 1))
        return np.array(rows, dtype=np.int32).reshape(len(rows), 3)

    def _resolve(self, plan: BatchPlan) -> I32:
        tokens = plan.tokens.copy()
        refers = tokens < 0
        if refers.any():
            tokens[refers] = self.sampled[plan.reference][-1 - tokens[refers]]
        return tokens

    def _adapter(self, slot: int, generation: int) -> int:
        if slot == 0:
            return 0
        if self.published.get(slot) != generation:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION, f"slot {slot} is not published at {generation}"
            )
        _, number, pages = self.installed[slot]
        if (self.memory[pages] != np.uint64(number)).any():
            raise InternalFault(ErrorCode.COPY_CHECKSUM, f"factors of slot {slot} were overwritten")
        return number

    def _forward(self, plan: BatchPlan, tokens: I32) -> I32:
        indptr = plan.row_indptr
        histories: list[U64] = []
        for index, (slot, _, adapter_slot, generation, start, rows, _, _) in enumerate(
            plan.requests.tolist()
        ):
            adapter = self._adapter(adapter_slot, generation)
            lo = int(indptr[index])
            positions = np.arange(start, start + rows)
            pages = self.page_table[slot, positions // self.page_tokens]
            if (pages == 0).any():
                raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, f"request slot {slot} writes to the null page")
            self.memory[pages, positions % self.page_tokens] = fingerprints(
                tokens[lo : lo + rows], start, adapter
            )
            every = np.arange(start + rows)
            history = self.memory[self.page_table[slot, every // self.page_tokens], every % self.page_tokens]
            if (history == POISON).any():
                raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, f"request slot {slot} reads a free page")
            histories.append(history)
        vocab = self.bounds.vocab_size
        drawn = np.array([next_token(histories[row], vocab) for row in plan.samples[:, 1]], dtype=np.int32)
        for sample, words in zip(plan.mask_samples.tolist(), plan.masks, strict=True):
            drawn[sample] = next_allowed(int(drawn[sample]), words)
        return drawn
