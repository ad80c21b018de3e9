"""`loraplex bench step`: processor time that the control plane takes for one iteration, with nothing behind
it.

The engine that a server runs, over a backend that answers each plan with made-up tokens at once; what the
backend takes is not counted. Every request decodes; others wait. Specification: benchmarks (host time a
step).
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
from loraplex.core.messages import EngineSampling, RegisterAdapter, Submit
from loraplex.core.plan import BatchPlan, CopiedColumns, StepResult
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox

VOCAB: Final = 128_256
ADAPTER_PAGES: Final = 13
WARM_STEPS: Final = 20
PARTS: Final = ("drain", "admit", "reserve", "plan", "execute", "commit", "publish")


@dataclass(frozen=True, slots=True)
class StepRow:
    """Milliseconds of processor time of a decode step: whole, and planning alone; medians and 99th
    percentile.

    adapters: distinct ones. parts_ms: medians of the step's seven calls; `execute` validates, packs and
    launches.
    """

    running: int
    waiting: int
    adapters: int
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
    """An engine with `running` requests decoding, over `adapters` adapters in turn, and `waiting` more in its
    queue.

    Every adapter is resident before the first request comes, so that the running ones do name so many.
    """

    def __init__(self, running: int, waiting: int, adapters: int, steps: int) -> None:
        kv = KvShape(32, 8, 128, 2, 16)
        limits = EngineLimits(
            kv=kv,
            num_pages=50_000,
            max_requests=running,
            max_model_len=8192,
            token_budget=8192,
            vocab_size=VOCAB,
        )
        self.running, self.waiting, self.adapters, self.steps = running, waiting, adapters, steps
        self.backend, self.mailbox, self.plans = _Echo(), LocalMailbox(), _Plans()
        self.engine = Engine(limits, self.backend, self.mailbox, MonotonicClock(), self.plans)
        keys = [f"{index:064x}" for index in range(1, adapters + 1)]
        for key in keys:
            self.mailbox.post(
                RegisterAdapter(0, key, key, ADAPTER_PAGES, ((16, 128),), (0, 1, 2, 3), 27 << 20)
            )
        self._until(lambda: sum(entry.resident for entry in self.engine.state.adapters.values()) == adapters)
        prompt = np.arange(128, dtype="<i4").tobytes()
        sampling = EngineSampling(
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
        for index in range(running + waiting):
            adapter = keys[index % adapters] if adapters else None
            self.mailbox.post(Submit(f"r{index}", prompt, sampling, adapter))

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
            started, before = time.thread_time_ns(), self.backend.spent_ns
            self.engine.step()
            times.append((time.thread_time_ns() - started - (self.backend.spent_ns - before)) / 1e6)
        return StepRow(
            self.running,
            self.waiting,
            self.adapters,
            statistics.median(times),
            float(np.percentile(times, 99)),
            statistics.median(self.plans.ns) / 1e6,
            {name: round(statistics.median(spent) / 1e6, 4) for name, spent in parts.items()},
        )

    def _decoding(self) -> bool:
        table = self.engine.state.table
        slots = table.runnable()
        return slots.size == self.running and bool(table.decoding(slots).all())

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


CASES: Final = ((64, 0, 0), (256, 2000, 0), (256, 2000, 64), (256, 2000, 256))
"""(running, waiting, adapters)."""


def run_steps(
    steps: int, tell: Callable[[str], None], cases: Sequence[tuple[int, int, int]] = CASES
) -> list[StepRow]:
    """One row a case. tell: called with what begins."""
    rows = []
    for running, waiting, adapters in cases:
        tell(f"{running} running, {waiting} waiting, {adapters} adapters")
        rows.append(StepBench(running, waiting, adapters, steps).measure())
    return rows


def as_json(rows: Sequence[StepRow], steps: int) -> str:
    """The run as JSON."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=2)
