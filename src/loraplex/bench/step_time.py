"""`loraplex bench step`: processor time that the control plane takes for one iteration, with nothing behind
it.

The engine that a server runs, over a backend that answers each plan with made-up tokens at once; what the
backend takes is not counted. Every request decodes; others wait, of several tenants. With a turnover some
end in each step and as many come, so that the step also chooses who is let in. With a prefix cache, no two
requests share anything, so that an empty cache and one that fills the pool have the same work: what the full
one adds is giving up its blocks. Specification: benchmarks (host time a step).
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Final

import numpy as np

from loraplex.bench.load_engine import greedy
from loraplex.catalog.records import DEFAULT_NAMESPACE
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import Event, IterationCompleted
from loraplex.core.layout import KvShape
from loraplex.core.messages import Abort, PinAdapter, RegisterAdapter, Submit
from loraplex.core.plan import BatchPlan, CopiedColumns, StepResult
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.identity.canonical import digest
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.identity.execution import adapter_execution
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox
from loraplex.schedule.policy import DEFICIT, POLICIES, Policy
from loraplex.text.prefix_keys import NOT_INVOKED, Acting, CacheTerms, prompt_keys

VOCAB: Final = 128_256
ADAPTER_PAGES: Final = 13
POOL_PAGES: Final = 50_000
LONGEST: Final = 8192
FREE_PAGES: Final = 8
"""That a full cache leaves free at most."""
CACHES: Final = ("off", "empty", "full")
WARM_STEPS: Final = 20
PARTS: Final = ("drain", "admit", "reserve", "plan", "execute", "commit", "publish")


@dataclass(frozen=True, slots=True)
class StepCase:
    """What runs and waits. Requests are of `tenants` tenants in turn; turnover: see `StepRow`. cache: one of
    `CACHES`; a full one holds blocks of prompts that nobody asks again.
    """

    running: int
    waiting: int
    adapters: int
    tenants: int = 1
    turnover: int = 0
    cache: str = "off"


@dataclass(frozen=True, slots=True)
class StepRow:
    """Milliseconds of processor time of a decode step: whole, and planning alone; medians, 99th percentile,
    and the mean, to which steps count that complete a block for everybody.

    adapters: distinct ones. turnover: requests that end, and come, in each step. cache: `off`, `empty` or
    `full` when the requests came. start_ms: of all steps from then until everybody who fits decodes.
    parts_ms: medians of the step's seven calls; `execute` validates, packs and launches.
    """

    running: int
    waiting: int
    adapters: int
    tenants: int
    turnover: int
    cache: str
    start_ms: float
    step_ms: float
    step_p99_ms: float
    step_mean_ms: float
    plan_ms: float
    parts_ms: dict[str, float]


class _Echo:
    """A backend that answers at once; counts its own time."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._results: deque[bytes] = deque()

    def launch(self, plan: bytes) -> None:
        started = time.thread_time_ns()
        read = BatchPlan.unpack(plan)
        count = len(read.samples)
        copies = read.copies
        copied = CopiedColumns.filled(
            len(copies),
            adapter_slot=copies.adapter_slot,
            adapter_generation=copies.adapter_generation,
            intact=1,
        )
        result = StepResult(
            generation=read.generation,
            execute_us=1,
            tokens=np.full(count, 7, np.int32),
            logprob_indptr=np.zeros(count + 1, np.int32),
            copied=copied,
        )
        self._results.append(result.pack())
        self.spent_ns += time.thread_time_ns() - started

    def collect(self) -> bytes:
        started = time.thread_time_ns()
        result = self._results.popleft()
        self.spent_ns += time.thread_time_ns() - started
        return result


class _Plans:
    """Keeps planning times."""

    def __init__(self) -> None:
        self.ns: list[int] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, IterationCompleted):
            self.ns.append(event.plan_ns)


class StepBench:
    """An engine with a case's requests decoding, over its adapters and tenants in turn, and more in its
    queue.

    Every adapter is resident and pinned before the first request comes, so that the running ones do name so
    many, beside a full cache too.
    """

    def __init__(self, case: StepCase, steps: int, policy: Policy = DEFICIT) -> None:
        kv = KvShape(32, 8, 128, 2, 16)
        on = case.cache != "off"
        self._terms = CacheTerms(digest("base"), digest("cache"), GRAPH_REVISION, kv.page_tokens, on)
        self._rng = np.random.default_rng(0)
        limits = EngineLimits(
            kv=kv,
            num_pages=POOL_PAGES,
            max_requests=case.running,
            policy=policy,
            max_model_len=LONGEST,
            token_budget=LONGEST,
            vocab_size=VOCAB,
            prefix_cache=on,
            base_abi=self._terms.base if on else "",
            cache_abi=self._terms.cache_abi if on else "",
        )
        self.case, self.steps = case, steps
        self.backend, self.mailbox, self.plans = _Echo(), LocalMailbox(), _Plans()
        self.engine = Engine(limits, self.backend, self.mailbox, MonotonicClock(), self.plans)
        self._keys = [f"{index:064x}" for index in range(1, case.adapters + 1)]
        for key in self._keys:
            self.mailbox.post(
                RegisterAdapter(0, key, key, ADAPTER_PAGES, ((16, 128),), (0, 1, 2, 3), 27 << 20)
            )
        entries = self.engine.state.adapters
        self._until(lambda: sum(entry.resident for entry in entries.values()) == case.adapters)
        for key in self._keys:
            self.mailbox.post(PinAdapter(0, key, True))
        self._until(lambda: not self.mailbox.pending)
        if case.cache == "full":
            self._fill()
        self._sent = 0
        self._come(case.running + case.waiting)

    def _come(self, count: int) -> None:
        """So many requests, of the adapters and tenants in turn."""
        for index in range(self._sent, self._sent + count):
            adapter = self._keys[index % len(self._keys)] if self._keys else None
            tenant = f"t{index % self.case.tenants}"
            self._submit(f"r{index}", 128, WARM_STEPS + 2 * self.steps + 200, adapter, tenant)
        self._sent += count

    def _turn_over(self) -> None:
        """As many end as the case says, the ones that ran longest, and as many come."""
        running = sorted(self.engine.state.by_slot.values(), key=lambda record: record.ticket.order)
        for record in running[: self.case.turnover]:
            self.mailbox.post(Abort(record.request_id))
        self._come(self.case.turnover)

    def _submit(
        self,
        request: str,
        size: int,
        count: int,
        adapter: str | None,
        tenant: str = DEFAULT_NAMESPACE,
    ) -> None:
        """A request of `size` random tokens that asks for `count`."""
        prompt = self._rng.integers(0, VOCAB, size).astype("<i4")
        acting = None if adapter is None else Acting(adapter_execution(adapter), ())
        keys = prompt_keys(prompt.tolist(), acting, NOT_INVOKED, self._terms, tenant)
        self.mailbox.post(
            Submit(
                request,
                prompt.tobytes(),
                greedy(count),
                adapter,
                tenant,
                namespace=tenant,
                block_keys=keys.block_keys,
            )
        )

    def _fill(self) -> None:
        """Have the base compute prompts until their blocks fill the pool."""
        state, page_tokens = self.engine.state, self.engine.state.limits.kv.page_tokens
        while state.pool.free > FREE_PAGES:
            size = min(LONGEST - page_tokens, (state.pool.free - FREE_PAGES // 2) * page_tokens)
            self._submit(f"filler {state.pool.free}", size, 1, None)
            self._until(lambda: self.engine.idle and not self.mailbox.pending)

    def measure(self) -> StepRow:
        """Step until everybody who fits decodes, then time `steps` steps. Garbage of what was before is
        collected first: it would fall into the steps of one row or another.
        """
        gc.collect()
        started, before = time.thread_time_ns(), self.backend.spent_ns
        self._until(self._decoding)
        start_ms = (time.thread_time_ns() - started - (self.backend.spent_ns - before)) / 1e6
        for _ in range(WARM_STEPS):
            self.engine.step()
        self.plans.ns.clear()
        times = []
        parts = {name: self._timed(f"_{name}") for name in PARTS}
        for _ in range(self.steps):
            self.mailbox.take()
            if self.case.turnover:
                self._turn_over()
            started, before = time.thread_time_ns(), self.backend.spent_ns
            self.engine.step()
            times.append((time.thread_time_ns() - started - (self.backend.spent_ns - before)) / 1e6)
        case = self.case
        return StepRow(
            case.running,
            case.waiting,
            case.adapters,
            case.tenants,
            case.turnover,
            case.cache,
            start_ms,
            statistics.median(times),
            float(np.percentile(times, 99)),
            statistics.fmean(times),
            statistics.median(self.plans.ns) / 1e6,
            {name: round(statistics.median(spent) / 1e6, 4) for name, spent in parts.items()},
        )

    def _decoding(self) -> bool:
        table = self.engine.state.table
        slots = table.runnable()
        return slots.size == self.case.running and bool(table.decoding(slots).all())

    def _until(self, reached: Callable[[], bool]) -> None:
        for _ in range(2000):
            if reached():
                return
            self.engine.step()
            self.mailbox.take()
        raise InternalFault(ErrorCode.INTERNAL, "the engine did not come to where its steps are timed")

    def _timed(self, name: str) -> list[int]:
        """Processor time of one of the step's calls, without the backend's, from now on."""
        real, spent = getattr(self.engine, name), list[int]()

        def timed(*arguments: object) -> object:
            started, before = time.thread_time_ns(), self.backend.spent_ns
            try:
                return real(*arguments)
            finally:
                spent.append(time.thread_time_ns() - started - (self.backend.spent_ns - before))

        setattr(self.engine, name, timed)
        return spent


CASES: Final = (
    StepCase(64, 0, 0),
    StepCase(256, 2000, 0),
    StepCase(256, 2000, 64),
    StepCase(256, 2000, 256),
    *(StepCase(256, waiting, 1000, 200, turnover) for turnover in (0, 2) for waiting in (2000, 20_000)),
)


def run_steps(
    steps: int,
    tell: Callable[[str], None],
    cases: Sequence[StepCase] = CASES,
    policy: str = DEFICIT.name,
    caches: Sequence[str] = ("off",),
) -> list[StepRow]:
    """One row a case and cache. tell: called with what begins. policy: its name."""
    rows = []
    for case in cases:
        for cache in caches:
            tell(f"{case.running} running, {case.waiting} waiting, {case.adapters} adapters, cache {cache}")
            rows.append(StepBench(replace(case, cache=cache), steps, POLICIES[policy]).measure())
    return rows


def table(rows: Sequence[StepRow]) -> list[str]:
    """The rows as lines of text."""
    names = (
        "running",
        "waiting",
        "adapters",
        "tenants",
        "turnover",
        "cache",
        "start ms",
        "step ms",
        "p99 ms",
        "mean ms",
        "plan ms",
    )
    lines = [[*names, *PARTS], *map(_cells, rows)]
    return [" ".join(cell.rjust(8) for cell in line) for line in lines]


def _cells(row: StepRow) -> list[str]:
    return [
        *(
            str(getattr(row, name))
            for name in ("running", "waiting", "adapters", "tenants", "turnover", "cache")
        ),
        f"{row.start_ms:.1f}",
        *(f"{ms:.2f}" for ms in (row.step_ms, row.step_p99_ms, row.step_mean_ms, row.plan_ms)),
        *(f"{row.parts_ms[part]:.3f}" for part in PARTS),
    ]


def as_json(rows: Sequence[StepRow], steps: int) -> str:
    """The run as JSON."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=2)
