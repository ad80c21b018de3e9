"""Tenants that ask for much or little of one engine on virtual time: what each gets, and how long its first
tokens take.

Costs are of the kind that a large device has: a step takes as long as its weights, a row a hundredth of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from tests.engine.rig import sampling

from loraplex.core.events import Event, FirstToken, RequestQueued, ServiceDebited
from loraplex.core.layout import KvShape
from loraplex.core.messages import Ended, FromEngine, RegisterAdapter, SetTenants, Submit, ToEngine
from loraplex.core.tenants import TenantLimits
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.sim.device import Costs, VirtualDevice
from loraplex.sim.world import VirtualClock

COSTS = Costs(step_ns=4_600_000, row_ns=40_000, copy_ns=300_000, page_ns=100_000)
HOST_NS = 100_000
VOCAB = 997
ADAPTERS = 2_000


@dataclass(frozen=True)
class Tenant:
    """waiting: requests that it keeps unanswered; a flood has many. every_ns: instead, the mean time between
    its arrivals. outputs: on average. begins, ends: steps between which it asks. adapters: how many of all it
    uses, by Zipf's law.
    """

    name: str
    waiting: int = 0
    every_ns: int = 0
    prompt: int = 24
    outputs: int = 48
    begins: int = 0
    ends: int = 1 << 30
    adapters: int = ADAPTERS
    limits: TenantLimits | None = None


@dataclass
class Traffic:
    """One engine and everything that asks of it: both ports and the clock."""

    tenants: Sequence[Tenant]
    seed: int = 0
    limits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {
            "kv": KvShape(1, 1, 1, 4, 16), "num_pages": 1_400, "max_requests": 64, "max_model_len": 256,
            "token_budget": 1_024, "vocab_size": VOCAB, "depth": 1, "max_adapter_slots": 513,
            "adapter_pages": 600, "copies_in_flight": 16, "copy_starts": 4,
        }  # fmt: skip
        sizes = EngineLimits(**{**fields, **self.limits})
        self.clock = VirtualClock()
        self.device = VirtualDevice(
            sizes.bounds, sizes.kv.page_tokens, clock=self.clock, costs=COSTS, copy_stream=True, verify=False
        )
        self.device.plans = None
        self.engine = Engine(sizes, self.device, self, self.clock, self)
        self.inbox: list[ToEngine] = [
            RegisterAdapter(0, f"a{n}", f"{n + 2:064x}", 1, ((8, 2),), (0, 1), 1000) for n in range(ADAPTERS)
        ]
        self.inbox.append(SetTenants(0, tuple(t.limits for t in self.tenants if t.limits is not None)))
        self.rng = Random(f"traffic {self.seed}")
        self.open: dict[str, int] = dict.fromkeys((t.name for t in self.tenants), 0)
        self.due: dict[str, int] = {}
        self.first: dict[str, list[int]] = {t.name: [] for t in self.tenants}
        self.queued: dict[str, str] = {}
        self.service: list[dict[str, int]] = []
        self.sent = 0

    # ports

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def pause(self) -> None:
        """The clock moves between steps."""

    def send(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Ended):
                assert message.code is None, message
                self.open[message.request_id.partition(".")[0]] -= 1

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestQueued):
            self.queued[event.request_id] = event.tenant
        elif isinstance(event, FirstToken):
            self.first[self.queued[event.request_id]].append(event.since_arrival_ns)
        elif isinstance(event, ServiceDebited):
            for tenant, computed, _, outputs in event.tenants:
                served = self.service[-1]
                served[tenant] = served.get(tenant, 0) + computed + 2 * outputs

    # traffic

    def run(self, steps: int) -> Traffic:
        """So many steps of the engine; each tenant asks as it does."""
        for step in range(steps):
            self.service.append({})
            for tenant in self.tenants:
                if tenant.begins <= step < tenant.ends:
                    self._ask(tenant)
            self.device.advance(self.clock.now + HOST_NS)
            self.engine.step()
        return self

    def _ask(self, tenant: Tenant) -> None:
        while tenant.waiting and self.open[tenant.name] < tenant.waiting:
            self._submit(tenant, self.clock.now)
        if tenant.every_ns:
            due = self.due.setdefault(tenant.name, self.clock.now)
            while due <= self.clock.now:  # it came while a step was computed
                self._submit(tenant, due)
                due += int(self.rng.expovariate(1 / tenant.every_ns)) + 1
            self.due[tenant.name] = due

    def _submit(self, tenant: Tenant, arrival_ns: int) -> None:
        self.sent += 1
        self.open[tenant.name] += 1
        prompt = np.array([self.rng.randrange(VOCAB) for _ in range(tenant.prompt)], dtype="<i4")
        outputs = self.rng.randint(1, 2 * tenant.outputs - 1)
        # by Zipf's law with exponent 1: the rank is log-uniform
        adapter = min(int((tenant.adapters + 1) ** self.rng.random()), tenant.adapters) - 1
        message = Submit(
            f"{tenant.name}.{self.sent}", prompt.tobytes(), sampling(max_tokens=outputs), f"a{adapter}",
            tenant.name, arrival_ns=max(arrival_ns, 1),
        )  # fmt: skip
        self.inbox.append(message)

    # figures

    def served(self, tenant: str, begin: int = 0, end: int | None = None) -> int:
        """Weighted tokens of a tenant that were completed in these steps."""
        return sum(step.get(tenant, 0) for step in self.service[begin:end])

    def p99_first_ns(self, tenant: str, begin: int = 0) -> int:
        """The 99th percentile of its times to a first token, the earliest ones left out."""
        times = sorted(self.first[tenant][begin:])
        return times[min(int(len(times) * 0.99), len(times) - 1)]
