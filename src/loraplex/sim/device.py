"""A virtual device: runs packed plans over page contents that can be checked, on virtual time, with faults on
demand.

It computes no model (see `tokens`): factors are their image's number, KV positions are fingerprints, and
every read goes through the page tables that plans made. Plans run in order on a compute stream and do their
work at their end, as late as possible; adapter copies run in that order too, or beside it on a copy stream,
where the first half of the bytes lands when the copy starts and the rest when it ends. A block of a slab page
is a run of that page's cells. A copy is started once for each (slot, generation), also when the plan that
carried it fails and another carries it again. Free pages hold poison.

Owns time, bytes and what goes wrong with them; it never chooses anything. Without a clock every plan takes no
time.

Specification: rulings "Tests" (a clock, a device and faults, nothing else); 0x04B (load time), 0x04F (late
writes).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32, each
from loraplex.core.plan import BatchPlan, CopiedColumns, FaultColumns, StepResult, adapter_pairs
from loraplex.core.plan_check import PlanBounds, check_plan
from loraplex.sim.tokens import (
    adapter_number,
    fingerprint_rows,
    next_allowed,
    position_weights,
    sampled,
    split,
)
from loraplex.sim.world import VirtualClock

I64 = npt.NDArray[np.int64]
POISON: Final = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
INJECTED: Final = "injected"
BUILT_ON_FAILURE: Final = "the plan builds on one that failed"


class CopyFate(StrEnum):
    """What becomes of an adapter copy."""

    INTACT = "intact"
    FAILED = "failed"
    TORN = "torn"
    CORRUPT = "corrupt"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Costs:
    """Virtual nanoseconds: of a step, of each of its rows, of a copy, of each of its pages."""

    step_ns: int = 0
    row_ns: int = 0
    copy_ns: int = 0
    page_ns: int = 0


def cells_of(pages: npt.NDArray[np.integer], page_tokens: int, size_class: int = 0, block: int = 0) -> I64:
    """Flat indices of the cells of whole pages, or of one block of each."""
    width = page_tokens >> size_class
    first = pages.astype(np.int64)[:, None] * page_tokens + block * width
    return (first + np.arange(width)).reshape(-1)


@dataclass(slots=True)
class Faults:
    """Faults to inject, by plan generation or image number. Empty: none.

    fate: what happens to a copy of an image, and how many times slower it is; None leaves `torn_copies` to
    decide. report: what becomes of a finished copy's row: how many results later it is told, and how often.
    slower: how many times longer a plan takes.
    """

    fail_plans: set[int] = field(default_factory=set)
    stale_plans: set[int] = field(default_factory=set)
    torn_copies: set[int] = field(default_factory=set)
    nan_plans: set[int] = field(default_factory=set)
    fate: Callable[[int], tuple[CopyFate, int]] | None = None
    report: Callable[[], tuple[int, int]] | None = None
    slower: Callable[[], int] | None = None


@dataclass(slots=True)
class _Copy:
    """One copy: where to, of which image, how it goes, when it ends; cells that its own plan scrubs before
    it.

    cells: flat indices into the memory. by: the plan that made it, on the compute stream.
    """

    slot: int
    generation: int
    cells: I64
    number: int
    fate: CopyFate
    cost_ns: int
    scrubs: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    by: int = 0


@dataclass(slots=True)
class _Launched:
    """A plan on the compute stream. result: set when it has run. doomed: a plan before it failed."""

    data: bytes
    end_ns: int
    copies: list[_Copy]
    result: StepResult | None = None
    doomed: bool = False


class VirtualDevice:
    """`core.ports.Backend` over checkable memory; every plan is validated and every read is verified."""

    def __init__(
        self,
        bounds: PlanBounds,
        page_tokens: int,
        faults: Faults | None = None,
        *,
        clock: VirtualClock | None = None,
        costs: Costs | None = None,
        copy_stream: bool = False,
        verify: bool = True,
    ) -> None:
        """copy_stream: copies run beside compute. verify: check each plan against itself, as a
        runner does.
        """
        self.bounds, self.page_tokens = bounds, page_tokens
        self.faults = faults or Faults()
        self.clock = clock or VirtualClock()
        self.costs = costs or Costs()
        self.copy_stream, self.verify = copy_stream, verify
        self.memory = np.full((bounds.num_pages, page_tokens), POISON, dtype=np.uint64)
        self._cells = self.memory.reshape(-1)  # a view
        self.page_table = np.zeros((bounds.max_requests, bounds.max_pages_per_request), dtype=np.int32)
        self.incarnation = np.zeros(bounds.max_requests, dtype=np.int64)
        self.frontier = np.zeros(bounds.max_requests, dtype=np.int64)
        self.kv = np.zeros(bounds.max_requests, dtype=np.int64)
        self.installed: dict[tuple[int, int], tuple[int, I64]] = {}
        self.published: dict[int, int] = {}
        self.sampled: dict[int, I32] = {}
        self.plans: list[bytes] | None = []
        self.on_plan: Callable[[BatchPlan, bytes], None] | None = None
        self.on_result: Callable[[StepResult], None] | None = None
        self._weights = position_weights(bounds.max_pages_per_request * page_tokens)
        self._launched: deque[_Launched] = deque()
        self._timeline: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._compute_free_ns = self._copy_free_ns = 0
        self._started: dict[int, int] = {}
        self._scrubbed: set[int] = set()
        self._unreported: list[tuple[int, tuple[int, int, int], int]] = []

    # ------------------------------------------------------------ the port

    def launch(self, plan: bytes) -> None:
        """Put a plan on the compute stream; copies of a copy stream start at once."""
        if self.plans is not None:
            self.plans.append(plan)
        unpacked = BatchPlan.unpack(plan)
        if self.on_plan is not None:
            self.on_plan(unpacked, plan)
        refusal = self._refusal(unpacked)
        if refusal is not None:
            self._launched.append(_Launched(plan, self.clock.now, [], refusal))
            return
        copies = self._planned_copies(unpacked)
        cost = self.costs.step_ns + self.costs.row_ns * unpacked.rows
        if self.faults.slower is not None:
            cost *= self.faults.slower()
        if not self.copy_stream:
            cost += sum(copy.cost_ns for copy in copies)
        start = max(self.clock.now, self._compute_free_ns)
        launched = _Launched(plan, start + cost, [] if self.copy_stream else copies)
        self._compute_free_ns = launched.end_ns
        self._launched.append(launched)
        if self.copy_stream:
            for copy in filter(self._begins, copies):
                copy.scrubs = copy.cells[np.isin(copy.cells, self._scrubs(unpacked))]
                self._start_copy(copy)
        self._at(launched.end_ns, lambda: self._execute(launched))

    def _refusal(self, plan: BatchPlan) -> StepResult | None:
        """What is wrong with a plan before anything of it starts: itself, or a failure that it did not know
        of.
        """
        try:
            if self.verify:
                check_plan(plan, self.bounds)
            if any(earlier.result is not None and earlier.result.error.size for earlier in self._launched):
                raise InternalFault(ErrorCode.STALE_PLAN_GENERATION, BUILT_ON_FAILURE)
            if plan.generation in self.faults.stale_plans:
                raise InternalFault(ErrorCode.STALE_KV_FRONTIER, INJECTED)
        except InternalFault as fault:
            return StepResult.failure(plan.generation, f"{fault.code.value}: {fault.message}")
        return None

    def collect(self) -> bytes:
        """Result of the oldest plan not collected; time passes until it is there."""
        oldest = self._launched.popleft()
        self.advance(oldest.end_ns)
        result = oldest.result
        assert result is not None
        if not result.error.size:
            result = self._with_copies(result)
        if self.on_result is not None:
            self.on_result(result)
        return result.pack()

    def advance(self, until_ns: int) -> None:
        """Let everything happen that happens up to `until_ns`, in the order of its time."""
        while self._timeline and self._timeline[0][0] <= until_ns:
            heapq.heappop(self._timeline)[2]()
        self.clock.now = max(self.clock.now, until_ns)

    def _at(self, at_ns: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._timeline, (at_ns, self._sequence, action))

    # ------------------------------------------------------------ copies

    def _planned_copies(self, plan: BatchPlan) -> list[_Copy]:
        copies, out, offset = plan.copies, [], 0
        places = each(
            copies.adapter_slot, copies.adapter_generation, copies.pages, copies.size_class, copies.block
        )
        for digest, (slot, generation, count, size_class, block) in zip(copies.digest, places, strict=True):
            cells = cells_of(plan.copy_pages[offset : offset + count], self.page_tokens, size_class, block)
            offset += count
            number = adapter_number(digest)
            if self.faults.fate is not None:
                fate, slower = self.faults.fate(number)
            else:
                fate, slower = CopyFate.TORN if number in self.faults.torn_copies else CopyFate.INTACT, 1
            cost = (self.costs.copy_ns + self.costs.page_ns * count) * slower
            out.append(_Copy(slot, generation, cells, number, fate, cost))
        return out

    def _scrubs(self, plan: BatchPlan) -> I64:
        scrubs = plan.scrub_blocks
        blocks = [
            cells_of(np.array([page]), self.page_tokens, size_class, block)
            for page, size_class, block in each(scrubs.page, scrubs.size_class, scrubs.block)
        ]
        return np.concatenate([cells_of(plan.scrub_pages, self.page_tokens), *blocks])

    def _begins(self, copy: _Copy) -> bool:
        """Whether this copy starts now; False when an earlier plan started it."""
        fresh = self._started.get(copy.slot, 0) < copy.generation
        if fresh:
            self._started[copy.slot] = copy.generation
        return fresh

    def _start_copy(self, copy: _Copy) -> None:
        start = max(self.clock.now, self._copy_free_ns)
        self._copy_free_ns = start + copy.cost_ns
        self._at(start, lambda: self._first_half(copy))
        self._at(self._copy_free_ns, lambda: self._second_half(copy))

    def _first_half(self, copy: _Copy) -> None:
        self._cells[copy.scrubs] = POISON
        self._scrubbed.update(copy.scrubs.tolist())
        if copy.fate not in (CopyFate.FAILED, CopyFate.LOST):
            half = copy.cells[: copy.cells.size // 2]
            self._cells[half] = self._bytes_of(copy)

    def _second_half(self, copy: _Copy) -> None:
        """The rest of the bytes, then the checksum of each page against the image's."""
        if copy.fate in (CopyFate.INTACT, CopyFate.CORRUPT):
            self._cells[copy.cells[copy.cells.size // 2 :]] = self._bytes_of(copy)
        whole = copy.fate is not CopyFate.LOST and bool(
            (self._cells[copy.cells] == np.uint64(copy.number)).all()
        )
        if whole:
            self.installed[copy.slot, copy.generation] = (copy.number, copy.cells)
        later, times = self.faults.report() if self.faults.report is not None else (0, 1)
        row = (copy.slot, copy.generation, int(whole))
        self._unreported += [(later + extra, row, copy.by) for extra in range(times)]

    @staticmethod
    def _bytes_of(copy: _Copy) -> np.uint64:
        return np.uint64(copy.number ^ 2 if copy.fate is CopyFate.CORRUPT else copy.number)

    def _with_copies(self, result: StepResult) -> StepResult:
        plan = result.generation
        due = [row for wait, row, by in self._unreported if wait <= 0 and by <= plan]
        self._unreported = [
            (wait - 1 if by <= plan else wait, row, by)
            for wait, row, by in self._unreported
            if wait > 0 or by > plan
        ]
        if not due:
            return result
        copied = CopiedColumns.filled(
            len(due),
            adapter_slot=[slot for slot, _, _ in due],
            adapter_generation=[generation for _, generation, _ in due],
            intact=[intact for _, _, intact in due],
        )
        return replace(result, copied=copied)

    # ------------------------------------------------------------ compute

    def _execute(self, launched: _Launched) -> None:
        plan = BatchPlan.unpack(launched.data)
        try:
            if launched.doomed:
                raise InternalFault(ErrorCode.STALE_PLAN_GENERATION, BUILT_ON_FAILURE)
            launched.result = self._run(plan, launched.copies)
        except InternalFault as fault:
            for later in self._launched:
                later.doomed |= later.result is None
            launched.result = StepResult.failure(plan.generation, f"{fault.code.value}: {fault.message}")

    def _run(self, plan: BatchPlan, copies: list[_Copy]) -> StepResult:
        self._check_mirrors(plan)
        self._apply_deltas(plan)
        for copy in filter(self._begins, copies):
            copy.by = plan.generation  # what a later plan brings to its end is not this one's to report
            self._first_half(copy)
            self._second_half(copy)
        if plan.generation in self.faults.fail_plans:
            raise InternalFault(ErrorCode.BACKEND_FAILED, INJECTED)
        tokens = self._forward(plan, self._resolve(plan))
        self.frontier[plan.requests.slot] = plan.requests.frontier + 1
        self.kv[plan.requests.slot] = plan.requests.kv_end
        self.sampled[plan.generation] = tokens
        self.sampled.pop(plan.generation - 2, None)
        return self.result_of(plan, tokens)

    def result_of(self, plan: BatchPlan, tokens: I32) -> StepResult:
        """What the plan's rows gave, without log probabilities. tokens: [S]."""
        bad = plan.generation in self.faults.nan_plans and len(plan.requests) > 0
        return StepResult(
            generation=plan.generation,
            execute_us=1,
            tokens=tokens,
            logprob_indptr=np.zeros(len(plan.samples) + 1, dtype=np.int32),
            prompt_logprob_indptr=np.zeros(len(plan.prompt_logprobs) + 1, dtype=np.int32),
            prompt_logprob_ranks=np.zeros(len(plan.prompt_logprobs), dtype=np.int32),
            faults=FaultColumns.filled(int(bad), request=0, not_finite=1),
        )

    def _check_mirrors(self, plan: BatchPlan) -> None:
        incarnation, frontier, kv = self.incarnation, self.frontier, self.kv
        if len(plan.opens):
            incarnation, frontier, kv = incarnation.copy(), frontier.copy(), kv.copy()
            incarnation[plan.opens.slot] = plan.opens.incarnation
            frontier[plan.opens.slot] = 0
            kv[plan.opens.slot] = plan.opens.kv_start
        slots = plan.requests.slot
        if not np.array_equal(incarnation[slots], plan.requests.incarnation):
            raise InternalFault(
                ErrorCode.STALE_REQUEST_GENERATION, "a request slot holds another incarnation"
            )
        if not np.array_equal(frontier[slots], plan.requests.frontier):
            raise InternalFault(ErrorCode.STALE_KV_FRONTIER, "a planned frontier is not the device's")
        if not np.array_equal(kv[slots], plan.requests.kv_start):
            raise InternalFault(ErrorCode.STALE_KV_FRONTIER, "a request begins behind other KV than it has")
        if plan.reference > 0 and plan.reference not in self.sampled:
            raise InternalFault(ErrorCode.STALE_PLAN_GENERATION, f"plan {plan.reference} never ran")

    def _apply_deltas(self, plan: BatchPlan) -> None:
        self.incarnation[plan.opens.slot] = plan.opens.incarnation
        self.frontier[plan.opens.slot] = 0
        self.kv[plan.opens.slot] = plan.opens.kv_start
        for slot, generation in adapter_pairs(plan.publishes):
            if self.published.get(slot) != generation:
                if (slot, generation) not in self.installed:
                    raise InternalFault(ErrorCode.STALE_SLOT_GENERATION, f"slot {slot} was never filled")
                self.published[slot] = generation
        for slot, generation in adapter_pairs(plan.retires):
            if self.published.get(slot) == generation:
                del self.published[slot], self.installed[slot, generation]
        if plan.scrub_pages.size or len(plan.scrub_blocks):
            scrubs = self._scrubs(plan)
            self._cells[scrubs[~np.isin(scrubs, list(self._scrubbed))]] = POISON
            self._scrubbed.difference_update(scrubs.tolist())
        if len(plan.page_deltas):
            self.page_table[plan.page_deltas.slot, plan.page_deltas.index] = plan.page_deltas.page

    def _resolve(self, plan: BatchPlan) -> I32:
        refers = plan.tokens < 0
        if not refers.any():
            return plan.tokens
        tokens = plan.tokens.copy()
        tokens[refers] = self.sampled[plan.reference][-1 - tokens[refers]]
        return tokens

    def _adapter(self, slot: int, generation: int) -> int:
        if slot == 0:
            return 0
        if self.published.get(slot) != generation:
            raise InternalFault(
                ErrorCode.STALE_SLOT_GENERATION, f"slot {slot} is not published at {generation}"
            )
        number, cells = self.installed[slot, generation]
        if (self._cells[cells] != np.uint64(number)).any():
            raise InternalFault(ErrorCode.COPY_CHECKSUM, f"factors of slot {slot} were overwritten")
        return number

    def _forward(self, plan: BatchPlan, tokens: I32) -> I32:
        """Write every row's fingerprint, read every history back, sample. Returns the tokens [S]."""
        if not plan.rows:
            return np.empty(0, dtype=np.int32)
        slots, rows, ends = plan.requests.slot, plan.requests.rows, plan.requests.kv_end
        pairs = adapter_pairs(plan.requests)
        numbers = {pair: split(self._adapter(*pair)) for pair in dict.fromkeys(pairs)}
        of_request = np.array([numbers[pair][0] for pair in pairs], dtype=np.uint64)
        heads = np.array([numbers[pair][1] for pair in pairs], dtype=np.uint64)
        row_slots, positions = np.repeat(slots, rows), plan.positions
        pages = self.page_table[row_slots, positions // self.page_tokens]
        if (pages == 0).any():
            raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, "a row writes to the null page")
        self.memory[pages, positions % self.page_tokens] = fingerprint_rows(
            tokens, positions, np.repeat(of_request, rows)
        )
        stops = np.cumsum(ends)
        every = np.arange(int(stops[-1])) - np.repeat(stops - ends, ends)
        read_from = self.page_table[np.repeat(slots, ends), every // self.page_tokens]
        history = self.memory[read_from, every % self.page_tokens]
        if (history == POISON).any():
            raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, "a history has a free page")
        sums = np.add.reduceat(history * self._weights[every], stops - ends)
        drawn = sampled((sums + heads)[plan.samples.request], self.bounds.vocab_size)
        for sample, words in zip(plan.mask_samples.tolist(), plan.masks, strict=True):
            drawn[sample] = next_allowed(int(drawn[sample]), words)
        return drawn
