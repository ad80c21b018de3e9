"""Figures of a session equal what its events and requests say."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tests.engine.rig import CACHED, Rig
from tests.prompts import prompt

from loraplex.core.events import (
    AdapterTransition,
    IterationCompleted,
    PlanDiscarded,
    PrefixGivenUp,
    PrefixMatched,
    PrefixPublished,
    RequestAdmitted,
    RequestPreempted,
    ServiceDebited,
    StepFailed,
)
from loraplex.engine.inspect import inspect_engine
from loraplex.telemetry.engine_metrics import EngineMetrics


def test_figures_follow_the_events_of_a_session_with_preemption_and_a_failed_step() -> None:
    rig = Rig(pages=19, growth_horizon=0)
    rig.register("a")
    for k in range(6):
        rig.submit(f"r{k}", list(range(1, 8 + k)), adapter="a" if k % 2 else None, max_tokens=20)
    rig.submit("stop", [1, 2], max_tokens=12, stop_token_ids=tuple(range(900)))
    rig.faults.fail_plans.add(30)
    rig.faults.stale_plans.add(9)
    rig.run()
    events = rig.log.events
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.observe(events[:10], 0)
    metrics.observe(events[10:], 3)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"loraplex_{name}", labels)

    iterations = [event for event in events if isinstance(event, IterationCompleted)]
    preempted = [event for event in events if isinstance(event, RequestPreempted)]
    admitted = [event for event in events if isinstance(event, RequestAdmitted)]
    failed = [event for event in events if isinstance(event, StepFailed)]
    discarded = [event for event in events if isinstance(event, PlanDiscarded)]
    assert preempted
    assert failed
    assert discarded
    assert value("iteration_rows_total", phase="prefill") == sum(e.prefill_rows for e in iterations)
    assert value("iteration_rows_total", phase="decode") == sum(e.decode_rows for e in iterations)
    assert value("iteration_execute_seconds_count") == len(iterations)
    assert value("iteration_adapters_sum") == sum(e.distinct_adapters for e in iterations) > 0
    assert value("adapter_runs_total", order="arrived") == sum(e.runs_before for e in iterations)
    assert value("adapter_runs_total", order="planned") == sum(e.runs for e in iterations)
    debits = [row for e in events if isinstance(e, ServiceDebited) for row in e.buckets]
    for at, kind in enumerate(("computed", "cached", "output"), 1):
        for bucket in ("base", "<=8"):
            told = value("service_tokens_total", rank_bucket=bucket, kind=kind)
            assert told == sum(row[at] for row in debits if row[0] == bucket)
    assert value("preempted_tokens_total") == sum(e.computed_tokens for e in preempted)
    assert value("queue_seconds_count") == sum(e.again == 0 for e in admitted) < len(admitted)
    ended = {reason: value("engine_requests_ended_total", reason=reason) for reason in ("length", "stop")}
    assert ended == {
        reason: float(sum(end.finish_reason == reason for (end,) in rig.mailbox.ended.values()))
        for reason in ended
    }
    for event in failed:
        assert value("steps_failed_total", code=event.code)
    for discard in discarded:
        assert value("plans_discarded_total", code=discard.code)
    loads = [e for e in events if isinstance(e, AdapterTransition) and e.before == "reserved"]
    assert value("adapter_transitions_total", before="reserved", after="loading") == len(loads) > 0
    assert value("events_lost_total") == 3


def test_figures_of_cached_prefixes_follow_their_events() -> None:
    rig = Rig(depth=1, pages=33, **CACHED)
    for index in range(12):
        rig.submit(f"r{index}", [*prompt(16, index % 3), index, 5, *prompt(8, 90 + index)], max_tokens=6)
        rig.run()
    registry = CollectorRegistry()
    EngineMetrics(registry).observe(rig.log.events, 0)
    matched = [event for event in rig.log.events if isinstance(event, PrefixMatched)]
    published = [event for event in rig.log.events if isinstance(event, PrefixPublished)]
    gone = [event for event in rig.log.events if isinstance(event, PrefixGivenUp)]
    assert gone

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"loraplex_prefix_{name}_total", labels)

    assert value("queried_tokens") == sum(event.queried for event in matched) == 12 * 26
    assert value("reused_tokens") == sum(event.reused for event in matched) > 0
    assert value("blocks_published") == sum(event.blocks for event in published)
    assert value("bytes_published") == sum(event.nbytes for event in published)
    assert value("blocks_given_up", by="kv") == sum(event.blocks for event in gone)
    figures = inspect_engine(rig.engine.state)["prefix"]
    assert figures["blocks"] == sum(e.blocks for e in published) - sum(e.blocks for e in gone)
    assert figures["bytes"] == sum(e.nbytes for e in published) - sum(e.nbytes for e in gone)
    assert (figures["queried_tokens"], figures["reused_tokens"]) == (12 * 26, value("reused_tokens"))
