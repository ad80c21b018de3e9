"""The step benchmark runs what it says, and its report has every part."""

from __future__ import annotations

import json

from loraplex.bench.step import PARTS, as_json, run_steps


def test_a_small_run() -> None:
    rows = run_steps(3, cases=((4, 0, 0), (6, 10, 3)))
    assert [(row.running, row.waiting, row.adapters) for row in rows] == [(4, 0, 0), (6, 10, 3)]
    assert all(tuple(row.parts_ms) == PARTS for row in rows)
    assert len(json.loads(as_json(rows, 3))["rows"]) == 2
