"""Scheduler snapshots and policies with one wrong field: each is refused with the code of what it breaks.

A case counts once for (record, field, kind of fault); the family of 0x09N has 64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.memory.residency import Residency
from loraplex.schedule.policy import DEFICIT
from loraplex.schedule.snapshot import (
    AdapterSnapshot,
    Capabilities,
    Need,
    RequestSnapshot,
    Room,
    SlotSnapshot,
    WorkerSnapshot,
)

ADAPTER = AdapterSnapshot(digest="A", generation=7, targets=(0, 2), ranks=(8, 8), layout="pages", basis="b")
NEED = Need(kv_pages=2, adapter_pages=4, least_pages=4, image_bytes=4096, slot=True)
ROOM = Room(pages=64, adapter_pages=64, adapter_slots=8, host_bytes=1 << 20, pinned_pages=1)
RESIDENT = SlotSnapshot(
    state=Residency.RESIDENT, published=7, copied=True, hosted=True, leases=frozenset("r")
)
COLD = SlotSnapshot(state=Residency.COLD, hosted=True)
ABLE = Capabilities(base="base", targets=frozenset({0, 2}), rank_limit=16)
REQUEST = RequestSnapshot(request_id="r", base="base", need=NEED, adapter=ADAPTER, lease=7)
WORKER = WorkerSnapshot(capabilities=ABLE, room=ROOM, slots={"A": RESIDENT})

COUNTS = {"negative": -1, "truth": True, "fraction": 1.5, "text": "1", "nothing": None}
NAMES = {"empty": "", "number": 7, "bytes": b"A"}


def counts(record: Any, *names: str) -> list[tuple[Any, str, str, Any, ErrorCode]]:
    return [
        (record, name, kind, value, ErrorCode.SNAPSHOT_COUNT)
        for name in names
        for kind, value in COUNTS.items()
    ]


def named(record: Any, *names: str, **more: Any) -> list[tuple[Any, str, str, Any, ErrorCode]]:
    return [
        (record, name, kind, value, ErrorCode.SNAPSHOT_IDENTITY)
        for name in names
        for kind, value in {**NAMES, **more}.items()
    ]


CASES: list[tuple[Any, str, str, Any, ErrorCode]] = [
    *named(ADAPTER, "digest", "layout", nothing=None),
    *named(ADAPTER, "basis"),
    (ADAPTER, "generation", "zero", 0, ErrorCode.SNAPSHOT_GENERATION),
    *[(ADAPTER, "generation", kind, value, ErrorCode.SNAPSHOT_GENERATION) for kind, value in COUNTS.items()],
    (ADAPTER, "targets", "negative", (0, -2), ErrorCode.SNAPSHOT_COUNT),
    (ADAPTER, "targets", "list", [0, 2], ErrorCode.SNAPSHOT_COUNT),
    (ADAPTER, "targets", "twice", (2, 2), ErrorCode.SNAPSHOT_SHAPE),
    (ADAPTER, "ranks", "negative", (8, -8), ErrorCode.SNAPSHOT_COUNT),
    (ADAPTER, "ranks", "fraction", (8, 0.5), ErrorCode.SNAPSHOT_COUNT),
    (ADAPTER, "ranks", "fewer", (8,), ErrorCode.SNAPSHOT_SHAPE),
    (ADAPTER, "ranks", "more", (8, 8, 8), ErrorCode.SNAPSHOT_SHAPE),
    *counts(NEED, "kv_pages", "adapter_pages", "least_pages", "image_bytes"),
    (NEED, "least_pages", "above", 5, ErrorCode.SNAPSHOT_SHAPE),
    (NEED, "slot", "count", 1, ErrorCode.SNAPSHOT_SHAPE),
    *counts(ROOM, "pages", "adapter_pages", "adapter_slots", "host_bytes"),
    *counts(ROOM, "pinned_pages", "pinned_adapters", "pinned_bytes"),
    (RESIDENT, "state", "word", "resident", ErrorCode.SNAPSHOT_RESIDENCY),
    (RESIDENT, "state", "cold", Residency.COLD, ErrorCode.SNAPSHOT_RESIDENCY),
    (RESIDENT, "state", "loading", Residency.LOADING, ErrorCode.SNAPSHOT_RESIDENCY),
    (RESIDENT, "state", "failed", Residency.FAILED, ErrorCode.SNAPSHOT_RESIDENCY),
    *counts(RESIDENT, "published"),
    (RESIDENT, "published", "zero", 0, ErrorCode.SNAPSHOT_RESIDENCY),
    (RESIDENT, "copied", "count", 1, ErrorCode.SNAPSHOT_SHAPE),
    (RESIDENT, "hosted", "nothing", None, ErrorCode.SNAPSHOT_SHAPE),
    (RESIDENT, "leases", "list", ["r"], ErrorCode.SNAPSHOT_IDENTITY),
    (RESIDENT, "leases", "empty", frozenset({""}), ErrorCode.SNAPSHOT_IDENTITY),
    (COLD, "published", "early", 7, ErrorCode.SNAPSHOT_RESIDENCY),
    (COLD, "copied", "early", True, ErrorCode.SNAPSHOT_RESIDENCY),
    *named(ABLE, "base", nothing=None),
    (ABLE, "targets", "set", {0, 2}, ErrorCode.SNAPSHOT_COUNT),
    (ABLE, "targets", "negative", frozenset({-1}), ErrorCode.SNAPSHOT_COUNT),
    *counts(ABLE, "rank_limit"),
    (ABLE, "layouts", "text", "pages", ErrorCode.SNAPSHOT_IDENTITY),
    (ABLE, "layouts", "number", frozenset({1}), ErrorCode.SNAPSHOT_IDENTITY),
    *named(REQUEST, "request_id", "base", nothing=None),
    *counts(REQUEST, "lease"),
    (REQUEST, "need", "nothing", None, ErrorCode.SNAPSHOT_SHAPE),
    (REQUEST, "adapter", "name", "A", ErrorCode.SNAPSHOT_SHAPE),
    (REQUEST, "adapter", "nothing", None, ErrorCode.SNAPSHOT_GENERATION),
    (replace(REQUEST, lease=0), "adapter", "nothing", None, ErrorCode.SNAPSHOT_SHAPE),
    (WORKER, "capabilities", "nothing", None, ErrorCode.SNAPSHOT_SHAPE),
    (WORKER, "room", "number", 64, ErrorCode.SNAPSHOT_SHAPE),
    (WORKER, "slots", "list", [RESIDENT], ErrorCode.SNAPSHOT_IDENTITY),
    (WORKER, "slots", "unnamed", {"": RESIDENT}, ErrorCode.SNAPSHOT_IDENTITY),
    (WORKER, "slots", "word", {"A": "resident"}, ErrorCode.SNAPSHOT_IDENTITY),
]


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda i: f"{type(CASES[i][0]).__name__}-{CASES[i][1]}-{CASES[i][2]}"
)
def test_a_snapshot_with_one_wrong_field_is_refused(index: int) -> None:
    record, field, _, value, code = CASES[index]
    with pytest.raises(InternalFault) as refused:
        replace(record, **{field: value})
    assert refused.value.code is code


@pytest.mark.parametrize("value", [(1,) * 7 + (-1,), (1,) * 7 + (0.5,), (True,) * 8])
def test_quanta_that_are_no_counts_are_refused(value: tuple[Any, ...]) -> None:
    with pytest.raises(CallerError) as refused:
        replace(DEFICIT, quanta=type(DEFICIT.quanta)(*value))
    assert refused.value.code is ErrorCode.CONFIG_INVALID


def test_the_family_is_larger_than_the_specifications() -> None:
    kinds = Counter((type(record).__name__, field, kind) for record, field, kind, *_ in CASES)
    assert len(kinds) > 64
    assert {code for *_, code in CASES} >= {code for code in ErrorCode if code.value.startswith("snapshot_")}
