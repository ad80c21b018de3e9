"""One simulation: the real engine over virtual clients, clock and device; a safety phase, then a liveness
phase.

In the safety phase faults strike and nothing wrong may happen. Then faults and arrivals stop, and everything
that is open must finish within a bound. One seed is one timeline, whatever the process's hash seed.

Specification: rulings "Tests"; 0x05H, 0x07L (the local oracles this replaces with shipping code).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import msgspec

from loraplex.core.errors import InternalFault
from loraplex.core.events import Event
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.engine.step import Engine
from loraplex.sim.checks import Checkers
from loraplex.sim.clients import Clients
from loraplex.sim.device import VirtualDevice
from loraplex.sim.faults import Fault, Injector, Setup, draw_setup
from loraplex.sim.virtual_loader import VirtualLoader
from loraplex.sim.world import VirtualClock
from loraplex.sim.wrong import Wrong

HOST_NS: Final = 40_000
"""Virtual nanoseconds of host work between two steps, at most doubled by chance."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What went wrong, who saw it, and when."""

    checker: str
    tick: int
    message: str


@dataclass(slots=True)
class SimReport:
    """What a simulation did. timeline: SHA-256 over every plan, message and event in order."""

    seed: int
    setup: dict[str, object]
    safety_ticks: int = 0
    liveness_ticks: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)
    timeline: str = ""
    violation: Violation | None = None

    @property
    def ticks(self) -> int:
        """Steps of the engine in both phases."""
        return self.safety_ticks + self.liveness_ticks

    def record(self) -> dict[str, Any]:
        """The report as plain values."""
        return dict(msgspec.to_builtins(self))


class _Replica:
    """An engine, its device and the books about it."""

    def __init__(self, world: Simulation) -> None:
        setup = world.setup
        self.faults = world.injector.device_faults()
        self.device = VirtualDevice(
            setup.limits.bounds,
            setup.limits.kv.page_tokens,
            self.faults,
            clock=world.clock,
            costs=setup.costs,
            copy_stream=not setup.limits.copies_on_compute_stream,
            verify=False,
        )
        self.device.plans = None
        self.device.on_plan = self._on_plan
        self.device.on_result = self._on_result
        self._world = world
        self.loader = VirtualLoader(world.clock, world.injector, setup.fetch_ns)
        self.engine = Engine(setup.limits, self.device, world.clients, world.clock, self, loader=self.loader)
        self.checkers = Checkers(setup, world.clients, self.engine.state)

    def emit(self, event: Event) -> None:
        """`core.ports.EventSink`: into the timeline and the books."""
        self._world.note(msgspec.msgpack.encode(event))
        self._world.figures[type(event).__name__] += 1
        self.checkers.on_event(event)

    def _on_plan(self, plan: BatchPlan, data: bytes) -> None:
        self._world.note(data)
        self.checkers.on_plan(plan)
        self._strike(plan)

    def _on_result(self, result: StepResult) -> None:
        self.checkers.on_result(result)

    def _strike(self, plan: BatchPlan) -> None:
        """Faults of this plan; what they make legal for its requests is noted with the requests."""
        injector = self._world.injector
        if injector.strikes(Fault.STALE_PLAN):
            self.faults.stale_plans.add(plan.generation)
        elif injector.strikes(Fault.FAILED_STEP):
            self.faults.fail_plans.add(plan.generation)
            self._allow(plan, range(len(plan.requests)), "backend_failed")
        elif len(plan.requests) and injector.strikes(Fault.NOT_FINITE):
            self.faults.nan_plans.add(plan.generation)
            self._allow(plan, [0], "numeric_fault")

    def _allow(self, plan: BatchPlan, indices: Any, code: str) -> None:
        for index in indices:
            record = self.engine.state.by_slot.get(int(plan.requests.slot[index]))
            ask = self._world.clients.live.get(record.request_id) if record is not None else None
            if ask is not None:
                ask.allowed.add(code)


class Simulation:
    """Everything of one seed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        self.injector = Injector(setup)
        self.clients = Clients(setup, self.clock, self.injector)
        self.figures: Counter[str] = Counter()
        self._rng = Random(f"{setup.seed}/world")
        self._hash = hashlib.sha256()
        self.tick = 0
        self.replica = _Replica(self)

    def note(self, data: bytes) -> None:
        """Append to the timeline."""
        self._hash.update(len(data).to_bytes(4, "little") + data)

    def run(self, ticks: int) -> SimReport:
        """A safety phase of `ticks` steps, then a liveness phase; stops at the first violation."""
        report = SimReport(self.setup.seed, self.setup.record())
        try:
            for _ in range(ticks):
                self.step(quiet=False)
                report.safety_ticks += 1
            self.injector.stopped = True
            bound = self._bound()
            while not self._finished():
                if report.liveness_ticks >= bound:
                    raise Wrong("liveness", f"not finished {bound} ticks after the last fault")
                self.step(quiet=True)
                report.liveness_ticks += 1
            self.replica.checkers.at_end()
            self.replica.engine.check()
        except Wrong as wrong:
            report.violation = Violation(wrong.checker, self.tick, str(wrong))
        except InternalFault as fault:
            report.violation = Violation("engine", self.tick, str(fault))
        except Exception as error:  # noqa: BLE001 - an engine that crashes is a finding like any other
            report.violation = Violation("crash", self.tick, f"{type(error).__name__}: {error}")
        report.faults = {kind.value: self.injector.counts[kind] for kind in sorted(self.setup.faults)}
        report.outcomes = dict(sorted(self.clients.outcomes.items()))
        report.figures = dict(sorted(self.figures.items()))
        report.timeline = self._hash.hexdigest()
        return report

    def step(self, *, quiet: bool) -> None:
        """One tick: clients act, time passes, the engine makes one step, the books are compared."""
        self.tick += 1
        if not quiet:
            if self.injector.strikes(Fault.REPLICA_RESTART):
                self.clients.replica_died()
                self.replica = _Replica(self)
            self.clients.act()
        self.replica.device.advance(self.clock.now + HOST_NS + self._rng.randrange(HOST_NS))
        self.replica.engine.step()
        self.replica.checkers.after_step()

    def _finished(self) -> bool:
        clients = self.clients
        return (
            self.replica.engine.idle
            and not clients.inbox
            and not clients.live
            and not clients.names.open_calls
        )

    def _bound(self) -> int:
        """Steps that what is open may take: each request alone, twice, and each adapter's load a few
        times.
        """
        work = sum(ask.prompt.size + ask.max_tokens for ask in self.clients.live.values())
        return 2_000 + 4 * work + 200 * self.setup.aliases


def simulate(seed: int, ticks: int, *, setup: Setup | None = None) -> SimReport:
    """Run one seed. setup: instead of the one that the seed draws."""
    return Simulation(setup or draw_setup(seed)).run(ticks)
