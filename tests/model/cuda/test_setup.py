"""What start-up decides before it touches a device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.model.tiny import spec_of
from tests.sections import changed

from loraplex.core.plan_check import PlanBounds, check_plan
from loraplex.model.cuda.graphs import AdapterWork, bucket_sizes
from loraplex.model.cuda.inputs import KvLengths
from loraplex.model.cuda.mixed import row_buckets
from loraplex.model.cuda.setup import missing_for_fused, padding_plan


@pytest.mark.parametrize(("rows", "longest"), [(1, 8), (8, 8), (20, 8), (512, 100)])
def test_the_warm_up_plan_is_a_valid_plan_but_for_its_slots(rows: int, longest: int) -> None:
    plan = padding_plan(rows, longest)
    count = len(plan.requests)
    every = np.arange(count)  # the null page needs no slot of its own
    requests = changed(plan.requests, every, slot=every, scheduler_index=every)
    check_plan(replace(plan, requests=requests), PlanBounds(count, 2, 2, 1000, 131))
    assert plan.rows == rows
    assert int(plan.positions.max()) < longest


@pytest.mark.parametrize("most", [1, 3, 16, 100, 256, 300])
def test_buckets_rise_to_the_most_requests(most: int) -> None:
    sizes = bucket_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(size <= most for size in row_buckets(most))


def test_the_least_work_that_serves_is_chosen() -> None:
    assert AdapterWork.covering(frozenset()) is AdapterWork.NONE
    assert AdapterWork.covering(frozenset({1})) is AdapterWork.ATTENTION
    assert AdapterWork.covering(frozenset({0, 3})) is AdapterWork.ALL


def test_models_without_fused_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.model.cuda.setup.installed", lambda package: True)
    assert missing_for_fused(spec_of("llama"), torch.bfloat16) is None
    assert missing_for_fused(spec_of("mistral-window"), torch.float16) is None
    assert "float32" in str(missing_for_fused(spec_of("llama"), torch.float32))
    assert "windows" in str(missing_for_fused(spec_of("qwen2-mixed-window"), torch.bfloat16))
    monkeypatch.setattr("loraplex.model.cuda.setup.installed", lambda package: False)
    assert "not installed" in str(missing_for_fused(spec_of("llama"), torch.bfloat16))


def test_padded_lengths_are_one_position_on_one_page() -> None:
    plan = padding_plan(20, 8)
    lengths = KvLengths.of(plan, 3, padded=5)
    assert lengths.totals.tolist() == [8, 8, 4, 1, 1]
    assert lengths.indptr.tolist() == [0, 3, 6, 8, 9, 10]
    assert lengths.last.tolist() == [2, 2, 1, 1, 1]
