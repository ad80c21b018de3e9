"""Prometheus metrics that are computed from the engine's events alone; the others are in `server/metrics.py`.

Counts go on over a restart of the engine. Labels are from fixed sets: phases, states, codes and finish
reasons; never an adapter, a tenant or anything that a caller chose. Specification: 0x09K, rulings "Promise".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from loraplex.core.events import (
    AdapterRevoked,
    AdapterTransition,
    AnyEvent,
    CopyIgnored,
    FirstToken,
    HostDropped,
    HostFetched,
    IterationCompleted,
    LoadFailed,
    LoadStarved,
    PlanDiscarded,
    PrefetchReleased,
    PrefetchWithdrawn,
    PrefixGivenUp,
    PrefixMatched,
    PrefixPublished,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RestorationFailed,
    ServiceDebited,
    StepFailed,
    TenantStarved,
)

_NS: Final = 1e-9
STEP_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PLAN_BUCKETS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
QUEUE_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
SERVICE_KINDS: Final = ("computed", "cached", "output")
COUNT_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class EngineMetrics:
    """Counters and histograms of one server's engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"loraplex_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"loraplex_{name}", text, registry=registry, buckets=buckets)

        self._rows = counter("iteration_rows", "Rows of committed iterations.", "phase")
        self._runs = counter("adapter_runs", "Runs of rows under one adapter, by reordering.", "order")
        self._rank_rows = counter("adapter_rank_rows", "Rows times the rank of their adapter.")
        self._execute = histogram("iteration_execute_seconds", "Time on the device.", STEP_BUCKETS_S)
        self._plan = histogram("iteration_plan_seconds", "Time to make a plan.", PLAN_BUCKETS_S)
        self._requests = histogram("iteration_requests", "Requests in an iteration.", COUNT_BUCKETS)
        self._distinct = histogram("iteration_adapters", "Adapters in an iteration.", COUNT_BUCKETS)
        self._queued = histogram("queue_seconds", "From arrival to first admission.", QUEUE_BUCKETS_S)
        self._recomputed = counter("preempted_tokens", "Computed tokens that preemption gave up.")
        self._ended = counter("engine_requests_ended", "Requests by how the engine ended them.", "reason")
        self._service = counter(
            "service_tokens", "Completed tokens, by rank bucket of their adapter.", "rank_bucket", "kind"
        )
        self._starved = counter("starvations", "Starvations that were told, by what starved.", "of")
        self._discarded = counter("plans_discarded", "Plans that were refused at launch.", "code")
        self._failed = counter("steps_failed", "Launched steps that failed.", "code")
        self._transitions = counter("adapter_transitions", "Changes of residency.", "before", "after")
        self._load_failures = counter("load_failures", "Loads and fetches that failed.", "purpose", "code")
        self._restorations = counter("restoration_failures", "Evicted adapters that a rollback lost.")
        self._ignored = counter("copies_ignored", "Reports of copies that were not under way.")
        self._host_bytes = counter(
            "host_image_bytes", "Bytes of images to and from host memory.", "direction"
        )
        self._prefetched = counter("prefetches_ended", "Speculative loads by whether they were used.", "used")
        self._withdrawn = counter(
            "prefetches_withdrawn", "Loads ahead given up before their copies began, by why.", "reason"
        )
        self._wasted = counter("prefetch_wasted_pages", "Whole pages loaded on speculation and never used.")
        self._wasted_bytes = counter("prefetch_wasted_bytes", "Bytes loaded on speculation and never used.")
        self._queried = counter(
            "prefix_queried_tokens", "Prompt tokens that were looked up among cached prefixes."
        )
        self._reused = counter("prefix_reused_tokens", "Prompt tokens that a cached prefix saved computing.")
        self._published = counter("prefix_blocks_published", "Blocks of KV rows that were cached.")
        self._published_bytes = counter("prefix_bytes_published", "Bytes of KV rows that were cached.")
        self._given_up = counter(
            "prefix_blocks_given_up", "Cached blocks that went, by what took their page.", "by"
        )
        self._given_up_bytes = counter("prefix_bytes_given_up", "Bytes of cached blocks that went.", "by")
        self._revoked = counter("adapters_revoked", "Revisions revoked after publication.")
        self._lost = counter("events_lost", "Events that the engine could not hand over.")

    def observe(self, events: Sequence[AnyEvent], lost: int) -> None:
        """Count events in order. lost: how many are missing before them."""
        if lost:
            self._lost.inc(lost)
        for event in events:
            self._note(event)

    def _note(self, event: AnyEvent) -> None:
        match event:
            case IterationCompleted():
                self._note_iteration(event)
            case RequestAdmitted():
                if event.again == 0:
                    self._queued.observe(event.wait_ns * _NS)
            case RequestPreempted():
                self._recomputed.inc(event.computed_tokens)
            case RequestFinished():
                self._ended.labels(event.reason).inc()
            case PlanDiscarded():
                self._discarded.labels(event.code).inc()
            case StepFailed():
                self._failed.labels(event.code).inc()
            case ServiceDebited() | TenantStarved() | LoadStarved():
                self._note_service(event)
            case AdapterTransition():
                self._transitions.labels(event.before, event.after).inc()
            case PrefixMatched() | PrefixPublished() | PrefixGivenUp():
                self._note_prefix(event)
            case (
                LoadFailed()
                | RestorationFailed()
                | CopyIgnored()
                | HostFetched()
                | HostDropped()
                | PrefetchReleased()
                | PrefetchWithdrawn()
                | AdapterRevoked()
            ):
                self._note_residency(event)
            case FirstToken() | RequestQueued():
                pass  # a first token is timed where its client sees it; a request is counted when it ends

    def _note_service(self, event: ServiceDebited | TenantStarved | LoadStarved) -> None:
        match event:
            case ServiceDebited():
                for bucket, *counts in event.buckets:
                    for kind, count in zip(SERVICE_KINDS, counts, strict=True):
                        self._service.labels(bucket, kind).inc(count)
            case TenantStarved():
                self._starved.labels("tenant").inc()
            case LoadStarved():
                self._starved.labels("load").inc()

    def _note_residency(
        self,
        event: LoadFailed
        | RestorationFailed
        | CopyIgnored
        | HostFetched
        | HostDropped
        | PrefetchReleased
        | PrefetchWithdrawn
        | AdapterRevoked,
    ) -> None:
        match event:
            case LoadFailed():
                self._load_failures.labels(event.purpose, event.code).inc()
            case RestorationFailed():
                self._restorations.inc()
            case CopyIgnored():
                self._ignored.inc()
            case HostFetched():
                self._host_bytes.labels("in").inc(event.nbytes)
            case HostDropped():
                self._host_bytes.labels("out").inc(event.nbytes)
            case PrefetchReleased():
                self._prefetched.labels("yes" if event.used else "no").inc()
                self._wasted.inc(0 if event.used else event.pages)
                self._wasted_bytes.inc(0 if event.used else event.nbytes)
            case PrefetchWithdrawn():
                self._withdrawn.labels(event.reason).inc()
            case AdapterRevoked():
                self._revoked.inc()

    def _note_prefix(self, event: PrefixMatched | PrefixPublished | PrefixGivenUp) -> None:
        match event:
            case PrefixMatched():
                if event.again == 0:
                    self._queried.inc(event.queried)
                    self._reused.inc(event.reused)
            case PrefixPublished():
                self._published.inc(event.blocks)
                self._published_bytes.inc(event.nbytes)
            case PrefixGivenUp():
                self._given_up.labels(event.reason).inc(event.blocks)
                self._given_up_bytes.labels(event.reason).inc(event.nbytes)

    def _note_iteration(self, event: IterationCompleted) -> None:
        self._rows.labels("prefill").inc(event.prefill_rows)
        self._rows.labels("decode").inc(event.decode_rows)
        self._runs.labels("arrived").inc(event.runs_before)
        self._runs.labels("planned").inc(event.runs)
        self._rank_rows.inc(event.rank_rows)
        self._execute.observe(event.execute_ns * _NS)
        self._plan.observe(event.plan_ns * _NS)
        self._requests.observe(event.requests)
        self._distinct.observe(event.distinct_adapters)
