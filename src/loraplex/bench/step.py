"""`loraplex bench step`: what a step costs the host, with as many requests as a large device serves.

The real control plane over a backend that answers at once with tokens of its own: what remains is drain, admit, reserve,
plan, validate, pack, unpack and commit. Each part is timed around the call that `engine.step` makes; nothing is timed
inside. Times are processor time of the one thread, so that what else the machine does stays out of them.

Specification: DESIGN 7 (host time per step at 256 running and 2,000 waiting requests: under 1 ms).
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loraplex.core.events import Event
from loraplex.core.layout import KvShape
from loraplex.core.messages import EngineSampling, FromEngine, RegisterAdapter, Submit, ToEngine
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.engine.config import EngineLimits
from loraplex.engine.step import Engine

VOCAB = 128_256
PROMPT_TOKENS = 128
PARTS = ("drain", "admit", "reserve", "plan", "execute", "commit", "publish")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """running, waiting: requests in each state. adapters: distinct ones among the running. steps: timed ones."""

    running: int = 256
    waiting: int = 2_000
    adapters: int = 64
    steps: int = 200
    depth: int = 1


class _Instant:
    """A backend whose plans have run when they are launched."""

    def __init__(self) -> None:
        self._results: deque[bytes] = deque()
        self.outside_ns = 0

    def launch(self, plan: bytes) -> None:
        """Sample token 7 for everyone; every copy arrives intact."""
        started = time.thread_time_ns()
        unpacked = BatchPlan.unpack(plan)
        copied = np.ones((len(unpacked.copies), 3), dtype=np.int32)
        copied[:, :2] = unpacked.copies[:, 8:10]
        samples = len(unpacked.samples)
        result = StepResult(
            generation=unpacked.generation,
            execute_us=0,
            tokens=np.full(samples, 7, dtype=np.int32),
            logprob_indptr=np.zeros(samples + 1, dtype=np.int32),
            prompt_logprob_indptr=np.zeros(1, dtype=np.int32),
            copied=copied,
        )
        self._results.append(result.pack())
        self.outside_ns += time.thread_time_ns() - started

    def collect(self) -> bytes:
        """The oldest result."""
        return self._results.popleft()


class _Box:
    """A mailbox that forgets what it is sent."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Everything put since."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Gone."""


class _Clock:
    """The process's own clock."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.perf_counter_ns()


class _Sink:
    """Events that nobody reads."""

    def emit(self, event: Event) -> None:
        """Gone."""


def run_step(options: StepOptions) -> dict[str, Any]:
    """Processor microseconds of each part of a decode step (median, 99th percentile), and of the whole."""
    engine, box, backend = _engine(options)
    _fill(engine, box, options)
    spent: dict[str, list[int]] = defaultdict(list)
    for part in PARTS:
        _time(engine, f"_{part}", spent[part])
    total: list[int] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(options.steps):
            outside = backend.outside_ns
            started = time.thread_time_ns()
            engine.step()
            total.append(time.thread_time_ns() - started - (backend.outside_ns - outside))
            spent["execute"][-1] -= backend.outside_ns - outside
    finally:
        gc.enable()
    state = engine.state
    return {
        "running": len(state.by_slot),
        "waiting": len(state.queue),
        "adapters": options.adapters,
        "depth": options.depth,
        "steps": options.steps,
        "us": {name: _summary(spent[name]) for name in PARTS} | {"whole": _summary(total)},
    }


def _engine(options: StepOptions) -> tuple[Engine, _Box, _Instant]:
    limits = EngineLimits(
        kv=KvShape(32, 8, 128, 2, 16),
        num_pages=options.running * 40 + 4 * options.adapters + 2,
        max_requests=options.running,
        max_model_len=8_192,
        token_budget=8_192,
        vocab_size=VOCAB,
        depth=options.depth,
    )
    box, backend = _Box(), _Instant()
    return Engine(limits, backend, box, _Clock(), _Sink()), box, backend


def _fill(engine: Engine, box: _Box, options: StepOptions) -> None:
    """Run until all running requests decode and the others wait."""
    sampling = EngineSampling(
        max_tokens=options.steps + 200, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, logit_bias=(), stop_token_ids=(2,), logprobs=-1,
        prompt_logprobs=-1,
    )  # fmt: skip
    for number in range(options.adapters):
        box.inbox.append(
            RegisterAdapter(
                1 + number, f"a{number}", f"{number:064x}", 4, ((16, 128),), (0, 1, 2, 3), 27 << 20
            )
        )
    for _ in range(4 * options.adapters + 8):
        engine.step()
    prompt = np.arange(PROMPT_TOKENS, dtype="<i4").tobytes()
    for index in range(options.running + options.waiting):
        adapter = f"a{index % options.adapters}" if options.adapters else None
        box.inbox.append(Submit(f"r{index}", prompt, sampling, adapter))
    for _ in range(40):
        engine.step()


def _time(engine: Engine, name: str, into: list[int]) -> None:
    real: Callable[..., Any] = getattr(engine, name)

    def timed(*arguments: Any) -> Any:
        started = time.thread_time_ns()
        try:
            return real(*arguments)
        finally:
            into.append(time.thread_time_ns() - started)

    setattr(engine, name, timed)


def _summary(nanoseconds: list[int]) -> dict[str, float]:
    values = np.array(nanoseconds) / 1_000
    return {"median": round(float(np.median(values)), 1), "p99": round(float(np.percentile(values, 99)), 1)}


def step_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    head = (
        f"{report['running']} running, {report['waiting']} waiting, {report['adapters']} adapters, "
        f"depth {report['depth']}, {report['steps']} steps; processor microseconds"
    )
    rows = [f"{'part':<10}{'median':>10}{'p99':>10}"]
    rows += [
        f"{name:<10}{value['median']:>10.1f}{value['p99']:>10.1f}" for name, value in report["us"].items()
    ]
    return [head, *rows]
