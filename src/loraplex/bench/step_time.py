"""`loraplex bench step`: processor time that the control plane takes for one iteration, with nothing behind
it.

The engine that a server runs, over a backend that answers each plan with made-up tokens at once; what the
backend takes is not counted. Every request decodes; others wait, of several tenants. With a turnover some end
in each step and as many come, so that the step also chooses who is let in. Specification: benchmarks (host
time a step).
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import Event, IterationCompleted
from loraplex.core.layout import KvShape
from loraplex.core.messages import Abort, EngineSampling, RegisterAdapter, Submit
from loraplex.core.plan import BatchPlan, CopiedColumns, StepResult
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox
from loraplex.schedule.policy import DEFICIT, POLICIES, Policy

VOCAB: Final = 128_256
ADAPTER_PAGES: Final = 13
WARM_STEPS: Final = 20
PARTS: Final = ("drain", "admit", "reserve", "plan", "execute", "commit", "publish")


@dataclass(frozen=True, slots=True)
class StepCase:
    """What runs and waits. Requests are of `tenants` tenants in turn; turnover: see `StepRow`."""

    running: int
    waiting: int
    adapters: int
    tenants: int = 1
    turnover: int = 0


@dataclass(frozen=True, slots=True)
class StepRow:
    """Milliseconds of processor time of a decode step: whole, and planning alone; medians and 99th
    percentile.

    adapters: distinct ones. turnover: requests that end, and come, in each step. parts_ms: medians of the
    step's seven calls; `execute` validates, packs and launches.
    """

    running: int
    waiting: int
    adapters: int
    tenants: int
    turnover: int
    step_ms: float
    step_p99_ms: float
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

    Every adapter is resident before the first request comes, so that the running ones do name so many.
    """

    def __init__(self, case: StepCase, steps: int, policy: Policy = DEFICIT) -> None:
        kv = KvShape(32, 8, 128, 2, 16)
        limits = EngineLimits(
            kv=kv,
            num_pages=50_000,
            max_requests=case.running,
            policy=policy,
            max_model_len=8192,
            token_budget=8192,
            vocab_size=VOCAB,
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
        self._prompt = np.arange(128, dtype="<i4").tobytes()
        self._sampling = EngineSampling(
            max_tokens=WARM_STEPS + 2 * steps + 200,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=(),
            stop_token_ids=(),
            logprobs=-1,
            prompt_logprobs=-1,
        )
        self._sent = 0
        self._submit(case.running + case.waiting)

    def _submit(self, count: int) -> None:
        keys = self._keys
        for index in range(self._sent, self._sent + count):
            adapter = keys[index % len(keys)] if keys else None
            tenant = f"t{index % self.case.tenants}"
            self.mailbox.post(Submit(f"r{index}", self._prompt, self._sampling, adapter, tenant))
        self._sent += count

    def _turn_over(self) -> None:
        """As many end as the case says, the ones that ran longest, and as many come."""
        running = sorted(self.engine.state.by_slot.values(), key=lambda record: record.ticket.order)
        for record in running[: self.case.turnover]:
            self.mailbox.post(Abort(record.request_id))
        self._submit(self.case.turnover)

    def measure(self) -> StepRow:
        """Step until everybody who fits decodes, then time `steps` steps."""
        self._until(self._decoding)
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
            statistics.median(times),
            float(np.percentile(times, 99)),
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
) -> list[StepRow]:
    """One row a case. tell: called with what begins. policy: its name."""
    rows = []
    for case in cases:
        tell(f"{case.running} running, {case.waiting} waiting, {case.adapters} adapters")
        rows.append(StepBench(case, steps, POLICIES[policy]).measure())
    return rows


def as_json(rows: Sequence[StepRow], steps: int) -> str:
    """The run as JSON."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=2)
