"""`bench trace`: what comes when, what figures are made, and a small real server under every trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.model.tiny import save

from loraplex.bench.http_target import write_tokenizer
from loraplex.bench.http_traffic import HttpOptions
from loraplex.bench.trace_report import sized
from loraplex.bench.trace_run import TraceOptions, plots, run_traces
from loraplex.bench.traces import (
    FLOOD,
    LIGHT,
    Outcome,
    Trace,
    arrivals,
    line,
    row,
    satisfaction,
    traces,
    waits,
)
from loraplex.core.errors import CallerError

KNOWN = {trace.name: trace for trace in traces(100, 20.0, 300.0, 512)}


def counts(trace: Trace) -> np.ndarray:
    return np.bincount([one.adapter for one in arrivals(trace, 1)], minlength=trace.adapters)


@pytest.mark.parametrize("name", KNOWN)
def test_a_trace_keeps_its_rate_its_lengths_and_its_seed(name: str) -> None:
    trace = KNOWN[name]
    come = arrivals(trace, 1)
    assert [one.at for one in come] == sorted(one.at for one in come)
    assert come[0].at > 0
    assert come[-1].at < trace.seconds
    assert len(come) == pytest.approx(6000, rel=0.1)
    for values in ([one.prompt for one in come], [one.new for one in come]):
        assert (min(values), max(values)) == (8, 512)
        assert np.mean(values) == pytest.approx(260, rel=0.05)
    assert come == arrivals(trace, 1) != arrivals(trace, 2)


def test_popularity_follows_its_law() -> None:
    paper, zipf, code = (counts(KNOWN[name]) for name in ("slora", "zipf", "slora-code"))
    for found in (paper, zipf):
        assert found[0] / found[9] == pytest.approx(10, rel=0.35)
    # power(.3): the share below the first hundredth is .01 ** .3
    assert code[0] / code.sum() == pytest.approx(0.01**0.3, rel=0.1)
    assert KNOWN["zipf"].adapters == 100  # ten requests each and more
    assert traces(100, 1.0, 60.0, 8)[3].adapters == 6


def test_arrivals_vary_as_told() -> None:
    def spread(cv: float) -> float:
        trace = Trace(name="x", adapters=1, rate=50.0, seconds=200.0, cv=cv)
        gaps = np.diff([one.at for one in arrivals(trace, 3)])
        return float(gaps.std() / gaps.mean())

    assert spread(1.0) == pytest.approx(1.0, rel=0.1)
    assert spread(4.0) == pytest.approx(4.0, rel=0.25)


def test_one_tenant_floods() -> None:
    asked = [one.tenant for one in arrivals(KNOWN["flood"], 1)]
    light = np.mean([asked.count(tenant) for tenant in LIGHT])
    assert asked.count(FLOOD) / light == pytest.approx(10, rel=0.1)
    assert {one.tenant for one in arrivals(KNOWN["zipf"], 1)} == {"default"}


def test_figures_count_everybody_who_was_offered() -> None:
    outcomes = [
        Outcome("light0", 3.0, [0.1, 0.3], 3),
        Outcome(FLOOD, 6.0, [], 1),
        Outcome(FLOOD, -1.0, [], 0, "early_abort"),
        Outcome("light1", 0.0, [0.2], 2),
    ]
    figures = row(KNOWN["flood"], "p", outcomes, 10.0, 4)
    assert (figures.offered, figures.completed, figures.refused) == (4, 3, {"early_abort": 1})
    assert figures.throughput == pytest.approx(0.3)
    assert figures.tokens_per_s == pytest.approx(0.6)
    assert figures.attainment == 0.5
    assert figures.satisfaction == pytest.approx((0.75 + 0 + 0 + 1) / 4)
    assert figures.ttft[0] == 3.0
    assert figures.gap[0] == pytest.approx(0.2)
    assert figures.light == (1.5, 2.97)
    assert figures.swaps == 4
    assert "flood" in line(figures)
    assert row(KNOWN["zipf"], "p", [], 0.0, 0).attainment == 0.0


def test_satisfaction_is_none_for_who_was_refused_or_late() -> None:
    assert [satisfaction(ttft) for ttft in (-1.0, 0.0, 3.0, 6.0, 9.0)] == [0.0, 1.0, 0.75, 0.0, 0.0]


def test_waiting_times_as_points() -> None:
    assert waits([3.0, 1.0, 0.0, 2.0]) == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]
    assert len(waits([1.0 + index for index in range(5000)])) == 200


def test_traces_are_chosen_by_name_and_sized() -> None:
    [one] = sized("cpu", (7, 2.0, 5.0, 9), ("churn",))
    assert (one.name, one.adapters, one.rate, one.seconds, one.lengths) == ("churn", 1, 2.0, 5.0, (8, 9))
    assert len(sized("cuda", (None, None, None, None), ())) == 6
    with pytest.raises(CallerError, match="--only takes slora, "):
        sized("cpu", (None, None, None, None), ("punica",))
    with pytest.raises(CallerError, match="must all be above 0"):
        sized("cpu", (0, None, None, None), ())


@pytest.mark.e2e
def test_a_server_under_every_trace(tmp_path: Path) -> None:
    """Every request has an outcome, revisions change meanwhile, tenants are told apart."""
    model = write_tokenizer(save("llama", tmp_path / "llama"))
    options = TraceOptions(HttpOptions(model, "cpu", "float32", rank=2), ("fcfs",), early_abort_s=60.0)
    chosen = [trace for trace in traces(4, 12.0, 2.5, 6) if trace.name in ("slora", "churn", "flood")]
    said: list[str] = []
    runs = run_traces(options, chosen, said.append)
    assert [run.row.trace for run in runs] == ["slora", "churn", "flood"]
    for run, trace in zip(runs, chosen, strict=True):
        assert run.row.offered == len(arrivals(trace, 0))
        assert run.row.completed + sum(run.row.refused.values()) == run.row.offered
        assert run.row.completed > 0
        assert run.row.policy == "fcfs"
    assert runs[1].row.swaps == 2
    assert runs[2].row.flood is not None
    drawn = plots(runs)
    assert drawn.count("<g ") == 6
    assert "fcfs, light" in drawn
