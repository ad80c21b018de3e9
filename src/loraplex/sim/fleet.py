"""Several engines behind one placer: requests are consolidated, and the newest moves where pages run short.

Every engine is the shipping one over a virtual device of its own; all make one step a tick. The placer is
`schedule.placement`'s, over snapshots of the engines' books. A request that moves is withdrawn where it is
and asked again elsewhere, with what it has answered behind its prompt, so its client sees one answer; each
token is compared with what the request alone would produce. Nothing fails here: `simulation` is for that.

Specification: 0x09E (placement, migration by recompute); rulings "Tests".
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

import msgspec
import numpy as np

from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.events import Event
from loraplex.core.messages import Abort, Ended, FromEngine, RegisterAdapter, Submit, ToEngine, Tokens
from loraplex.core.packed import I32
from loraplex.engine.deltas import digest_words
from loraplex.engine.request_state import Stage
from loraplex.engine.residency import room, victims
from loraplex.engine.step import Engine
from loraplex.schedule.placement import Move, Placed, Worker, migrate, place
from loraplex.sim.administrator import digest
from loraplex.sim.clients import greedy
from loraplex.sim.device import VirtualDevice
from loraplex.sim.faults import VOCAB, Setup, draw_setup
from loraplex.sim.simulation import Violation
from loraplex.sim.tokens import adapter_number, expected_tokens
from loraplex.sim.world import VirtualClock
from loraplex.sim.wrong import Wrong

TICK_NS: Final = 1_000


@dataclass(slots=True)
class FleetReport:
    """What a fleet did. placed: requests that began on each worker; busy: ticks in which it had any."""

    seed: int
    workers: int
    ticks: int = 0
    answered: int = 0
    moved: int = 0
    recomputed: int = 0
    placed: dict[str, int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    violation: Violation | None = None

    def record(self) -> dict[str, Any]:
        """The report as plain values."""
        return dict(msgspec.to_builtins(self))


@dataclass(slots=True)
class _Asked:
    """One request as its client sees it. attempt: how often it was placed; worker: where it is."""

    name: str
    arrival: int
    adapter: str | None
    prompt: I32
    max_tokens: int
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    worker: str = ""

    @property
    def request_id(self) -> str:
        """Of the present attempt; what comes for an earlier one is nobody's."""
        return f"{self.name}.{self.attempt}"

    @property
    def known(self) -> I32:
        """Its prompt and what it has answered."""
        return np.concatenate([self.prompt, np.array(self.tokens, dtype=np.int32)]).astype(np.int32)


class _Engine:
    """One worker: an engine, its device, and the mailbox between it and the fleet."""

    def __init__(self, name: str, setup: Setup, fleet: Fleet) -> None:
        self.name, self._fleet = name, fleet
        self.inbox: list[ToEngine] = []
        limits = setup.limits
        self.device = VirtualDevice(limits.bounds, limits.kv.page_tokens, clock=VirtualClock())
        self.device.plans = None
        self.engine = Engine(limits, self.device, self, self.device.clock, self)

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Everything sent since; never blocks."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def pause(self) -> None:
        """Ticks move the clock."""

    def send(self, messages: Sequence[FromEngine]) -> None:
        """To the client whose request it is."""
        for message in messages:
            self._fleet.hear(self.name, message)

    def emit(self, event: Event) -> None:
        """Nobody counts events here."""

    def step(self) -> None:
        """One tick of this worker."""
        self.device.advance(self.device.clock.now + TICK_NS)
        self.engine.step()
        self.engine.check()


class Fleet:
    """The placer, the workers, and the clients of both."""

    def __init__(self, setup: Setup, workers: int, arrivals: float) -> None:
        """arrivals: requests a tick, below 1."""
        self._setup, self._arrivals = setup, arrivals
        self._rng = Random(f"{setup.seed}/fleet")
        self._adapters = {digest(f"fleet/{n}"): digest(f"image/{n}") for n in range(setup.aliases)}
        self.workers = {name: _Engine(name, setup, self) for name in (f"gpu-{n}" for n in range(workers))}
        self.live: dict[str, _Asked] = {}
        self.unplaced: deque[_Asked] = deque()
        self.report = FleetReport(setup.seed, workers, placed=dict.fromkeys(self.workers, 0))
        self.report.busy = dict.fromkeys(self.workers, 0)
        self._sent = 0
        for worker in self.workers.values():
            worker.inbox += [self._registration(key, image) for key, image in self._adapters.items()]

    def _registration(self, key: str, image: str) -> RegisterAdapter:
        pages = self._setup.adapter_pages
        return RegisterAdapter(0, key, image, pages, ((4, 2),), (0, 1), 1000, 0, "", ())

    # ------------------------------------------------------------ clients

    def hear(self, worker: str, message: FromEngine) -> None:
        """A message of a worker: the next tokens of a request, or its end."""
        if not isinstance(message, Tokens | Ended):
            return
        name, _, attempt = message.request_id.rpartition(".")
        asked = self.live.get(name)
        if asked is None or asked.attempt != int(attempt):
            return  # it was withdrawn there
        if isinstance(message, Tokens):
            asked.tokens += message.token_ids
            if asked.tokens != asked.expected[: len(asked.tokens)]:
                raise Wrong(
                    "equal_output", f"{name} got {asked.tokens[-1]} from {worker} after {asked.attempt} moves"
                )
            return
        if message.code is not None or len(asked.tokens) != asked.max_tokens:
            raise Wrong("ends_once", f"{name} ended with {message.code} after {len(asked.tokens)} tokens")
        del self.live[name]
        self.report.answered += 1

    def _ask(self) -> None:
        rng, setup = self._rng, self._setup
        adapter = rng.choice(list(self._adapters)) if rng.random() >= setup.base_share else None
        size = rng.randint(1, setup.prompt_tokens)
        prompt = np.array([rng.randrange(VOCAB) for _ in range(size)], dtype=np.int32)
        count = rng.randint(1, setup.output_tokens)
        number = adapter_number(digest_words(self._adapters[adapter])) if adapter else 0
        self._sent += 1
        expected = expected_tokens(prompt, number, count, VOCAB)
        asked = _Asked(f"r{self._sent}", self._sent, adapter, prompt, count, expected)
        self.live[asked.name] = asked
        self.unplaced.append(asked)

    # ------------------------------------------------------------ the placer

    def _need(self, asked: _Asked) -> int:
        """Pages that a worker must have to begin with it: its known tokens, growth, its adapter if it is
        cold.
        """
        limits = self._setup.limits
        left = min(limits.growth_horizon, max(asked.max_tokens - len(asked.tokens) - 1, 0))
        pages = limits.kv.pages_for(asked.prompt.size + len(asked.tokens) + left)
        return pages + (self._setup.adapter_pages if asked.adapter else 0)

    def _on(self, worker: str) -> list[_Asked]:
        return [asked for asked in self.live.values() if asked.worker == worker]

    def _snapshot(self, worker: _Engine) -> Worker:
        state, here = worker.engine.state, self._on(worker.name)
        promised = sum(self._need(asked) for asked in here if not self._has_pages(worker, asked))
        free = state.available_pages + victims.reclaimable_pages(state) - room.committed_growth(state)
        return Worker(worker.name, len(here), state.limits.max_requests, free - promised)

    def _has_pages(self, worker: _Engine, asked: _Asked) -> bool:
        record = worker.engine.state.records.get(asked.request_id)
        return record is not None and record.stage in (Stage.RUNNING, Stage.LOADING)

    def _placed(self, worker: _Engine) -> list[Placed]:
        table, out = worker.engine.state.table, []
        for asked in self._on(worker.name):
            record = worker.engine.state.records.get(asked.request_id)
            running = record is not None and record.slot >= 0
            held = int(table.pages[record.slot]) if record is not None and running else self._need(asked)
            out.append(Placed(asked.name, asked.arrival, self._need(asked), held))
        return out

    def _place(self) -> None:
        """The oldest first; who finds no worker keeps its place before those behind it."""
        while self.unplaced:
            snapshots = [self._snapshot(worker) for worker in self.workers.values()]
            name = place(snapshots, self._need(self.unplaced[0]))
            if name is None:
                return
            self._send(self.unplaced.popleft(), name)
            self.report.placed[name] += 1

    def _migrate(self) -> None:
        snapshots = [self._snapshot(worker) for worker in self.workers.values()]
        placed = {name: self._placed(worker) for name, worker in self.workers.items()}
        for move in migrate(snapshots, placed):
            self._move(move)

    def _move(self, move: Move) -> None:
        asked = self.live[move.request_id]
        self.workers[move.source].inbox.append(Abort(asked.request_id))
        self.report.moved += 1
        self.report.recomputed += asked.known.size
        asked.attempt += 1
        self._send(asked, move.destination)

    def _send(self, asked: _Asked, worker: str) -> None:
        asked.worker = worker
        sampling = greedy(asked.max_tokens - len(asked.tokens))
        prompt = asked.known.astype("<i4").tobytes()
        self.workers[worker].inbox.append(Submit(asked.request_id, prompt, sampling, asked.adapter))

    # ------------------------------------------------------------ time

    def tick(self, *, quiet: bool) -> None:
        """Requests come, move and are placed; every worker makes a step. quiet: none comes."""
        self.report.ticks += 1
        if not quiet and self._rng.random() < self._arrivals:
            self._ask()
        self._migrate()
        self._place()
        for name, worker in self.workers.items():
            self.report.busy[name] += bool(self._on(name))
            worker.step()

    def run(self, ticks: int) -> FleetReport:
        """So many ticks with arrivals, then until everybody is answered; stops at the first violation."""
        report = self.report
        try:
            for _ in range(ticks):
                self.tick(quiet=False)
            bound = report.ticks + 200 + 40 * sum(asked.max_tokens + 4 for asked in self.live.values())
            while self.live or not all(worker.engine.idle for worker in self.workers.values()):
                if report.ticks >= bound:
                    raise Wrong("liveness", f"{sorted(self.live)} are open after {report.ticks} ticks")
                self.tick(quiet=True)
            for name, worker in self.workers.items():
                if worker.engine.state.pool.counts().kv:
                    raise Wrong("conservation", f"{name} is idle and has KV pages")
        except Wrong as wrong:
            report.violation = Violation(wrong.checker, report.ticks, str(wrong))
        except InternalFault as fault:
            report.violation = Violation("engine", report.ticks, str(fault))
        return report


def simulate_fleet(seed: int, ticks: int, workers: int, arrivals: float = 0.3) -> FleetReport:
    """Run one seed over so many engines, the machine of each as `draw_setup` draws it."""
    if workers < 2:
        raise CallerError(
            ErrorCode.CONFIG_INVALID, f"workers must be at least 2, got {workers}", param="workers"
        )
    setup = draw_setup(seed, faults=frozenset(), cached=False)
    limits = replace(setup.limits, max_waiting=1 << 16, max_adapter_slots=16, host_bytes=None)
    return Fleet(replace(setup, limits=limits), workers, arrivals).run(ticks)


def fleet_lines(report: FleetReport) -> list[str]:
    """Lines to print, the seed first."""
    lines = [
        f"seed {report.seed}: {report.workers} workers, {report.ticks} ticks",
        f"{report.answered} requests answered, {report.moved} moves, {report.recomputed} tokens recomputed",
    ]
    busy: Counter[str] = Counter(report.busy)
    lines += [f"  {name}: {report.placed[name]} placed, busy {busy[name]} ticks" for name in report.placed]
    if report.violation is not None:
        wrong = report.violation
        lines.append(f"VIOLATION of {wrong.checker} at tick {wrong.tick}: {wrong.message}")
    return lines
