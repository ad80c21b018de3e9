"""What happened lately, kept from the engine's events for the operator's page: requests under way, the last
two minutes by second, who was served how much, and incidents.

Everything is bounded, and a few steps of work for each event. Owns no metric (`telemetry`) and asks nobody.

Specification: interface "HTTP" (`GET /ui/events`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Final, TypeVar

from loraplex.core import limits
from loraplex.core.errors import ErrorCode
from loraplex.core.events import (
    AdapterRevoked,
    AdapterTransition,
    AnyEvent,
    FirstToken,
    IterationCompleted,
    LoadFailed,
    LoadStarved,
    PlanDiscarded,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RestorationFailed,
    ServiceDebited,
    StepFailed,
    TenantStarved,
)
from loraplex.core.request import FinishReason
from loraplex.memory.residency import BINDABLE, AdapterState

_NS: Final = 1_000_000_000
_MERGE_NS: Final = 5 * _NS
_MERGED: Final = 4
"""Of the last incidents, how many another may be like."""
_WITHOUT_FAULT: Final = {*FinishReason, ErrorCode.ABORTED.value}
V = TypeVar("V")


class Level(StrEnum):
    """How much an incident asks of whoever looks."""

    INFO = "info"
    WARN = "warn"
    BAD = "bad"


@dataclass(slots=True)
class Live:
    """A request in the engine. since_ns: when it began to wait."""

    tenant: str
    adapter: str | None
    prompt_tokens: int
    since_ns: int
    running: bool = False


@dataclass(slots=True)
class Use:
    """Requests of an adapter by whether they found it on the device."""

    hits: int = 0
    misses: int = 0


@dataclass(slots=True)
class Served:
    """What a tenant was given since the server began. failed: ended by an error of any kind. computed_tokens,
    cached_tokens: of prompts.
    """

    ended: int = 0
    failed: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class Burst:
    """One tenant's, or everybody's, part of a second. tokens: of output. first_ms: from arrival to the first
    token.
    """

    tokens: int = 0
    ended: int = 0
    failed: int = 0
    first_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Second:
    """at_s: of the engine's clock. running, waiting: requests, the most of any step. bursts:
    by tenant, None for everybody together.
    """

    at_s: int
    steps: int = 0
    step_ns: int = 0
    running: int = 0
    waiting: int = 0
    bursts: dict[str | None, Burst] = field(default_factory=dict)


@dataclass(slots=True)
class Incident:
    """first, number: of the first and the last of those that are counted here, alike and close to each other.
    adapter: its semantic digest. tenant: whose request it was, where it was one's.
    """

    first: int
    number: int
    at_ns: int
    level: Level
    kind: str
    text: str
    adapter: str | None = None
    tenant: str | None = None
    count: int = 1


class Journal:
    """One server's. `observe` takes what the supervisor gets; the rest is to be read."""

    def __init__(self, restarts: Callable[[], int]) -> None:
        """restarts: how often the engine was started again, which ends whatever was under way."""
        self._restarts, self._life = restarts, restarts()
        self.live: dict[str, Live] = {}
        self.states: dict[str, str] = {}
        self.use: OrderedDict[str, Use] = OrderedDict()
        self.served: OrderedDict[str, Served] = OrderedDict()
        self.seconds: deque[Second] = deque(maxlen=limits.PAGE_SECONDS)
        self.incidents: deque[Incident] = deque(maxlen=limits.PAGE_INCIDENTS)
        self._number = 0

    def observe(self, events: Sequence[AnyEvent], lost: int) -> None:
        """Take events in order. lost: how many are missing before them; what they began or ended is not
        known.
        """
        if self._restarts() != self._life:
            self._life = self._restarts()
            self.live.clear()
            self.states.clear()
            at = events[0].at_ns if events else 0
            self._incident(at, Level.BAD, "engine_restarted", "the engine was started again")
        if lost:
            self.live.clear()
        for event in events:
            match event:
                case IterationCompleted():
                    second = self._second(event.at_ns)
                    second.steps += 1
                    second.step_ns += event.execute_ns
                    second.running = max(second.running, event.requests)
                    second.waiting = max(second.waiting, event.waiting)
                case ServiceDebited():
                    self._debited(event)
                case AdapterTransition():
                    self._moved(event)
                case RequestQueued() | RequestAdmitted() | RequestPreempted():
                    self._request(event)
                case FirstToken():
                    live = self.live.get(event.request_id)
                    for burst in self._bursts(event.at_ns, None if live is None else live.tenant):
                        if len(burst.first_ms) < limits.PAGE_SAMPLES:
                            burst.first_ms.append(event.since_arrival_ns / 1e6)
                case RequestFinished():
                    self._finished(event)
                case _:
                    self._fault(event)

    def newest(self) -> int:
        """The number of the last incident."""
        return self._number

    # Requests

    def _request(self, event: RequestQueued | RequestAdmitted | RequestPreempted) -> None:
        match event:
            case RequestQueued():
                self.live[event.request_id] = Live(
                    event.tenant, event.adapter, event.prompt_tokens, event.at_ns
                )
                if event.adapter is not None:
                    use = _recent(self.use, event.adapter, Use, limits.PAGE_ADAPTERS_REMEMBERED)
                    if self.states.get(event.adapter) in BINDABLE:
                        use.hits += 1
                    else:
                        use.misses += 1
            case RequestAdmitted():
                if (live := self.live.get(event.request_id)) is not None:
                    live.running = True
            case RequestPreempted():
                if (live := self.live.get(event.request_id)) is not None:
                    live.running, live.since_ns = False, event.at_ns
                self._incident(
                    event.at_ns,
                    Level.INFO,
                    "preempted",
                    "a running request gave its pages back and waits again",
                )

    def _finished(self, event: RequestFinished) -> None:
        self.live.pop(event.request_id, None)
        failed = event.reason not in _WITHOUT_FAULT
        served = self._served(event.tenant)
        served.ended += 1
        served.failed += failed
        for burst in self._bursts(event.at_ns, event.tenant):
            burst.ended += 1
            burst.failed += failed
        if failed:
            text = f"a request ended with {event.reason}"
            self._incident(event.at_ns, Level.WARN, "request_failed", text, event.adapter, event.tenant)

    def _debited(self, event: ServiceDebited) -> None:
        for tenant, computed, cached, output in event.tenants:
            served = self._served(tenant)
            served.computed_tokens += computed
            served.cached_tokens += cached
            served.output_tokens += output
            for burst in self._bursts(event.at_ns, tenant):
                burst.tokens += output

    def _served(self, tenant: str) -> Served:
        return _recent(self.served, tenant, Served, limits.PAGE_TENANTS_REMEMBERED)

    def _bursts(self, at_ns: int, tenant: str | None) -> list[Burst]:
        bursts = self._second(at_ns).bursts
        return [bursts.setdefault(who, Burst()) for who in {None, tenant}]

    def _second(self, at_ns: int) -> Second:
        """The second of a time; one that is older than the last belongs to the last."""
        at_s = at_ns // _NS
        if not self.seconds or self.seconds[-1].at_s < at_s:
            self.seconds.append(Second(at_s))
        return self.seconds[-1]

    # Adapters and faults

    def _moved(self, event: AdapterTransition) -> None:
        if event.after == AdapterState.ABSENT:
            self.states.pop(event.adapter, None)
        else:
            self.states[event.adapter] = event.after
        if event.before == AdapterState.RETIRING and event.after == AdapterState.HOST_READY:
            self._incident(event.at_ns, Level.INFO, "evicted", "an adapter left the device to make room")

    def _fault(self, event: AnyEvent) -> None:
        """Note what went wrong; other events are no incidents."""
        match event:
            case LoadFailed():
                what = "gave up" if event.final else f"attempt {event.attempt}, it is tried again"
                self._incident(
                    event.at_ns,
                    Level.BAD if event.final else Level.WARN,
                    "load_failed",
                    f"a load for {event.purpose} failed with {event.code}: {what}",
                    event.adapter,
                )
            case RestorationFailed():
                text = f"could not be brought back after a load that failed: {event.code}"
                self._incident(event.at_ns, Level.WARN, "restoration_failed", text, event.adapter)
            case AdapterRevoked():
                text = f"was revoked; requests that ended with it: {event.requests}"
                self._incident(event.at_ns, Level.BAD, "revoked", text, event.adapter)
            case StepFailed():
                text = f"a step failed with {event.code}; requests that ended with it: {event.requests}"
                self._incident(event.at_ns, Level.BAD, "step_failed", text)
            case PlanDiscarded():
                text = f"a plan was refused at launch ({event.code}) and is made again"
                self._incident(event.at_ns, Level.WARN, "plan_discarded", text)
            case TenantStarved():
                text = f"could have run and was given nothing for {event.waited_ns / 1e9:.1f} s"
                self._incident(event.at_ns, Level.WARN, "tenant_starved", text, tenant=event.tenant)
            case LoadStarved():
                text = f"is waited for since {event.waited_ns / 1e9:.1f} s, and was not loaded"
                self._incident(event.at_ns, Level.WARN, "load_starved", text, event.adapter)
            case _:
                pass

    def _incident(
        self,
        at_ns: int,
        level: Level,
        kind: str,
        text: str,
        adapter: str | None = None,
        tenant: str | None = None,
    ) -> None:
        """Note one; the same again within a few seconds only counts."""
        self._number += 1
        for last in islice(reversed(self.incidents), _MERGED):
            same = (last.kind, last.text, last.adapter, last.tenant) == (kind, text, adapter, tenant)
            if same and at_ns - last.at_ns < _MERGE_NS:
                last.number, last.at_ns, last.count = self._number, at_ns, last.count + 1
                return
        number = self._number
        self.incidents.append(Incident(number, number, at_ns, level, kind, text, adapter, tenant))


def _recent(known: OrderedDict[str, V], name: str, new: Callable[[], V], most: int) -> V:
    """The value of a name, which was used last now; the one that was not used for longest makes way."""
    if name in known:
        known.move_to_end(name)
    else:
        known[name] = new()
        if len(known) > most:
            known.popitem(last=False)
    return known[name]
