"""A second ledger of service, from plans, results and what clients asked: each debit is compared with it.

Owns how far each prompt was served and who ended; it never reads the engine's accounts.

Specification: 0x09H, 0x09K (a counter moves at its own event alone).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loraplex.core.events import (
    Event,
    IterationCompleted,
    PlanDiscarded,
    RequestFinished,
    ServiceDebited,
    StepFailed,
)
from loraplex.core.packed import each
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.sim.clients import Clients
from loraplex.sim.wrong import Wrong

ADAPTER_BUCKET: Final = "<=8"
"""Every simulated adapter has rank 4."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a plan holds of one request: rows from start to end, and whether a token is sampled."""

    request_id: str
    tenant: str
    prompt: int
    start: int
    end: int
    samples: bool
    bucket: str


class ServiceBooks:
    """Books over one engine."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._plans: dict[int, list[_Work]] = {}
        self._faulty: dict[int, set[int]] = {}
        self._served: dict[str, int] = {}
        self._ended: set[str] = set()

    def on_plan(self, plan: BatchPlan, running: Mapping[int, str]) -> None:
        """A plan is about to be launched. running: of a request slot, the id of its request."""
        requests, work = plan.requests, []
        sampling = set(plan.samples.request.tolist())
        columns = each(requests.slot, requests.adapter_slot, requests.kv_start, requests.kv_end)
        for index, (slot, adapter, start, end) in enumerate(columns):
            ask = self._clients.live.get(running.get(slot, ""))
            if ask is not None:
                bucket = ADAPTER_BUCKET if adapter else "base"
                work.append(
                    _Work(ask.request_id, ask.tenant, ask.prompt.size, start, end, index in sampling, bucket)
                )
        self._plans[plan.generation] = work

    def on_result(self, result: StepResult) -> None:
        """A result was collected."""
        self._faulty[result.generation] = set(result.faults.request.tolist())

    def on_event(self, event: Event) -> None:
        """An event left the engine."""
        match event:
            case ServiceDebited() if event.step not in self._faulty:
                raise Wrong("service", f"plan {event.step} was debited before its result was there")
            case ServiceDebited():
                tenants, buckets = self._expected(event.step)
                if (_counts(event.tenants), _counts(event.buckets)) != (tenants, buckets):
                    raise Wrong(
                        "service",
                        f"plan {event.step} debited {event.tenants} and {event.buckets}, it completed "
                        f"{dict(tenants)} and {dict(buckets)}",
                    )
            case IterationCompleted() if event.step in self._plans:
                tenants, _ = self._expected(event.step)
                if tenants:
                    raise Wrong("service", f"plan {event.step} completed {dict(tenants)} and debited nothing")
            case StepFailed() | PlanDiscarded():
                self._plans.pop(event.step, None)
            case RequestFinished():
                self._ended.add(event.request_id)
            case _:
                pass

    def _expected(self, step: int) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
        """(name, kind) -> tokens that a plan completed, by tenant and by bucket; kind 0 is computed, 1
        cached, 2 output.
        """
        tenants: Counter[tuple[str, int]] = Counter()
        buckets: Counter[tuple[str, int]] = Counter()
        faulty = self._faulty.pop(step, set())
        for index, work in enumerate(self._plans.pop(step, [])):
            if work.request_id in self._ended or index in faulty:
                continue
            served = self._served.get(work.request_id, 0)
            first, last = min(work.start, work.prompt), min(work.end, work.prompt)
            tokens = (max(last - max(first, served), 0), max(first - served, 0), int(work.samples))
            self._served[work.request_id] = max(served, last)
            for kind, count in enumerate(tokens):
                if count:
                    tenants[work.tenant, kind] += count
                    buckets[work.bucket, kind] += count
        return tenants, buckets


def _counts(rows: tuple[tuple[str, int, int, int], ...]) -> Counter[tuple[str, int]]:
    return Counter(
        {(name, kind): count for name, *counts in rows for kind, count in enumerate(counts) if count}
    )
