"""The benchmark of a step reaches its steady state and counts every request."""

from __future__ import annotations

import json

import pytest

from loraplex.bench.step_time import CACHES, PARTS, StepBench, StepCase, as_json, run_steps, table


def test_everybody_who_fits_decodes_and_the_others_wait() -> None:
    bench = StepBench(StepCase(running=8, waiting=5, adapters=3), steps=4)
    row = bench.measure()
    assert (row.running, row.waiting, row.adapters) == (8, 5, 3)
    assert row.step_ms > 0
    state = bench.engine.state
    assert len(state.by_slot) == 8
    assert len(state.queue) == 5
    assert json.loads(as_json([row], 4))["rows"][0]["running"] == 8


def test_the_running_requests_name_as_many_adapters_as_the_case_says() -> None:
    bench = StepBench(StepCase(running=8, waiting=40, adapters=8), steps=2)
    bench.measure()
    table = bench.engine.state.table
    assert len(set(table.adapter_slot[table.runnable()].tolist())) == 8


def test_the_report_has_every_call_of_a_step() -> None:
    told: list[str] = []
    rows = run_steps(3, told.append, cases=(StepCase(4, 0, 0), StepCase(6, 10, 3)))
    assert told == [
        "4 running, 0 waiting, 0 adapters, cache off",
        "6 running, 10 waiting, 3 adapters, cache off",
    ]
    assert [(row.running, row.waiting, row.adapters) for row in rows] == [(4, 0, 0), (6, 10, 3)]
    assert all(tuple(row.parts_ms) == PARTS for row in rows)
    assert [len(line.split()) for line in table(rows)[1:]] == [11 + len(PARTS)] * 2


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_changes_neither_who_runs_nor_what_is_resident(cache: str) -> None:
    bench = StepBench(StepCase(running=8, waiting=4, adapters=8, cache=cache), steps=40)
    state = bench.engine.state
    full = state.prefix.unreferenced
    assert (full > 0.9 * state.pool.usable) is (cache == "full")
    row = bench.measure()
    assert (row.cache, row.start_ms > 0, row.step_mean_ms > 0) == (cache, True, True)
    assert len(state.by_slot) == 8
    assert all(entry.resident for entry in state.adapters.values())
    assert (state.reuse.published > full) is (cache != "off")
    assert (state.reuse.given_up.get("kv", 0) > 0) is (cache == "full")
    assert state.reuse.reused == 0


def test_with_a_turnover_as_many_are_let_in_as_end() -> None:
    bench = StepBench(StepCase(running=8, waiting=20, adapters=3, tenants=4, turnover=2), steps=5)
    row = bench.measure()
    assert (row.tenants, row.turnover) == (4, 2)
    state = bench.engine.state
    assert len(state.records) == 28
    assert len(state.by_slot) >= 8 - 2
    assert {record.tenant for record in state.records.values()} == {"t0", "t1", "t2", "t3"}
    assert state.arrivals == 28 + 5 * 2
