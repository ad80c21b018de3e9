"""0x02C, 0x02D, 0x03B, 0x03C, 0x03E: the specification's mixed batch through the shipping planner."""

from __future__ import annotations

import numpy as np
from tests.exact.worked import with_sentinel

from loraplex.core.packed import run_boundaries
from loraplex.core.plan import BatchPlan
from loraplex.core.plan_check import PlanBounds, check_plan
from loraplex.schedule.packing import Work, build_plan, group_rows

A, B, C = 1, 2, 3
BOUNDS = PlanBounds(
    max_requests=8, max_adapter_slots=8, num_pages=64, max_pages_per_request=8, vocab_size=100
)


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def five_requests() -> Work:
    """p0 (3 rows, a), p1 (2 rows, b), d0 (a), d1 (base), d2 (c), in scheduler order (0x03B)."""
    return Work(
        slot=i32(0, 1, 2, 3, 4),
        incarnation=i32(1, 1, 1, 1, 1),
        adapter_slot=i32(A, B, A, 0, C),
        adapter_generation=i32(1, 1, 1, 0, 1),
        kv_start=i32(0, 0, 4, 6, 9),
        rows=i32(3, 2, 1, 1, 1),
        frontier=i32(0, 0, 1, 1, 1),
        decode=np.array([False, False, True, True, True]),
        samples=np.ones(5, dtype=np.bool_),
        logprobs=i32(-1, -1, -1, -1, -1),
        prompt_logprobs=i32(-1, -1, -1, -1, -1),
        tokens=i32(10, 11, 12, 20, 21, 30, 40, 50),
        targets=np.full(8, -1, dtype=np.int32),
    )


def plan() -> BatchPlan:
    built = build_plan(five_requests(), generation=1)
    check_plan(built, BOUNDS)
    return BatchPlan.unpack(built.pack())


def test_packed_order_and_phase_metadata() -> None:
    p = plan()
    assert p.requests.scheduler_index.tolist() == [1, 0, 2, 3, 4]
    assert p.prefill_indptr.tolist() == [0, 2, 5]
    assert (p.doff, p.decodes, p.rows) == (5, 3, 8)
    assert p.tokens.tolist() == [20, 21, 10, 11, 12, 30, 40, 50]


def test_adapter_runs_cross_the_phase_boundary() -> None:
    p = plan()
    assert p.segment_adapters.tolist() == [B, A, 0, C]
    assert p.segment_offsets.tolist() == [0, 2, 6, 7, 8]


def test_request_identity_expands_to_token_identity() -> None:
    p = plan()
    assert p.requests.adapter_slot.tolist() == [B, A, A, 0, C]
    assert p.row_adapters.tolist() == [B, B, A, A, A, A, 0, C]
    assert p.segment_offsets[-1] == p.rows
    assert p.group_rows.size == 7


def test_sampling_rows_have_their_own_inverse() -> None:
    p = plan()
    assert p.sample_rows.tolist() == [4, 1, 5, 6, 7]
    assert p.requests.scheduler_index[p.samples.request].tolist() == [0, 1, 2, 3, 4]


def test_compacted_grouping_leaves_the_base_out() -> None:
    """0x02C."""
    adapters = i32(1, 2, 1, 0, 2, 2, 1, 0)
    rows, offsets, ids = group_rows(adapters)
    assert rows.tolist() == [0, 2, 6, 1, 4, 5]
    assert ids.tolist() == [1, 2]
    assert offsets.tolist() == [0, 3, 6]


def test_sentinel_grouping_gives_the_base_a_group_of_its_own() -> None:
    """0x02D."""
    rows, ids, counts, starts = with_sentinel(i32(1, 2, 1, 0, 2, 2, 1, 0))
    assert rows == [3, 7, 0, 2, 6, 1, 4, 5]
    assert ids == [-1, 1, 2]
    assert counts == [2, 3, 3]
    assert starts == [0, 2, 5, 8]


def test_repeated_pointers_stay_separate_runs() -> None:
    offsets, ids = run_boundaries(i32(1, 1, 2, 1))
    assert offsets.tolist() == [0, 2, 3, 4]
    assert ids.tolist() == [1, 2, 1]


def test_attention_splits_at_doff_whatever_the_adapter_runs_are() -> None:
    """0x03D: one projection over all rows, prefill attention over [0, doff), one decode handle for each later
    row.
    """
    p = plan()
    crossing = np.flatnonzero((p.segment_offsets[:-1] < p.doff) & (p.segment_offsets[1:] > p.doff))
    assert p.segment_adapters[crossing].tolist() == [A]
    assert p.prefill_indptr[-1] == p.doff
    assert np.diff(p.prefill_indptr).tolist() == p.requests.rows[: p.prefills].tolist()
    assert p.requests.slot[p.prefills :].tolist() == [2, 3, 4]
    assert p.requests.kv_start[p.prefills :].tolist() == [4, 6, 9]
    assert p.positions[p.doff :].tolist() == [4, 6, 9]
