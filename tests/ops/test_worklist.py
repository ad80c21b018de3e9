"""Work lists: every active row once, true rank tiles only, and room that is checked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.ops import work_layout as layout
from loraplex.ops import worklist as w
from loraplex.ops.worklist import Capacity, Phase

ROOM = Capacity(Phase.DECODE, 4, 16, 64, (256, 256, 256, 256), 1024)


def groups(owners: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    owner = np.array(owners, dtype=np.int32)
    rows = np.flatnonzero(owner).astype(np.int32)
    rows = rows[np.argsort(owner[rows], kind="stable")]
    slots, counts = np.unique(owner[rows], return_counts=True)
    return rows, np.concatenate([[0], counts.cumsum()]).astype(np.int32), slots.astype(np.int32)


def blocks_of(work: w.WorkList) -> np.ndarray:
    return work.packed[layout.HEAD_WORDS :].reshape(-1, layout.BLOCK_WORDS)


def rows_of(block: np.ndarray, phase: Phase) -> list[int]:
    count = int(block[layout.BLOCK_COUNT_AT])
    if phase is Phase.PREFILL:
        return list(range(block[layout.BLOCK_ROW0_AT], block[layout.BLOCK_ROW0_AT] + count))
    return (
        np.ascontiguousarray(block[layout.BLOCK_LISTED_AT : layout.BLOCK_LISTED_AT + layout.LISTED_WORDS])
        .view(np.uint16)[:count]
        .tolist()
    )


def test_the_worked_eight_rows_of_the_specification() -> None:
    """0x02C: adapters [1, 2, 1, 0, 2, 2, 1, 0] group to rows [0, 2, 6] and [1, 4, 5]."""
    ranks = np.zeros((3, 7), dtype=np.int32)
    ranks[1:, 0] = 2
    work = w.build(*groups([1, 2, 1, 0, 2, 2, 1, 0]), 0, ranks, ROOM)
    found = {int(b[layout.BLOCK_SLOT_AT]): rows_of(b, Phase.DECODE) for b in blocks_of(work)}
    assert found == {1: [0, 2, 6], 2: [1, 4, 5]}
    assert work.records == (2, 0, 0, 0)
    assert work.z_rows == 6


def test_ranks_count_as_tiles_and_wide_blocks_come_first() -> None:
    ranks = np.zeros((4, 7), dtype=np.int32)
    ranks[1], ranks[2], ranks[3, :3] = 16, 33, [8, 0, 17]
    work = w.build(*groups([1, 2, 3, 1]), 0, ranks, ROOM)
    blocks = blocks_of(work)
    assert blocks[:, layout.BLOCK_SLOT_AT].tolist() == [2, 1, 3]
    assert work.records == (3 * 3 + 3 * 1 + 1 + 0 + 2, 3 + 1, 6 + 2, 3 + 1)
    assert blocks[:, layout.BLOCK_RECORD_AT : layout.BLOCK_RECORD_AT + 3].tolist() == [
        [0, 3, 6],
        [9, 10, 11],
        [12, 13, 13],
    ]
    assert blocks[:, layout.BLOCK_Z_AT : layout.BLOCK_Z_AT + 3].tolist() == [
        [0, 3, 6],
        [9, 11, 13],
        [15, 16, 16],
    ]
    head = work.packed[: layout.HEAD_WORDS]
    assert head[layout.HEAD_BLOCKS_AT] == 3
    assert head[layout.HEAD_RECORDS_AT : layout.HEAD_RECORDS_AT + 4].tolist() == list(work.records)
    assert head[layout.HEAD_WIDE_AT : layout.HEAD_WIDE_AT + 4].tolist() == [3, 1, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_random_plans_cover_each_row_of_a_phase_once(seed) -> None:
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 6, int(rng.integers(1, 60)))
    if seed % 2:
        owners = np.sort(owners)
    doff = int(rng.integers(0, owners.size + 1))
    ranks = rng.integers(0, 70, (6, 7)).astype(np.int32)
    for phase, block_rows in ((Phase.PREFILL, 16), (Phase.DECODE, 4)):
        room = Capacity(phase, block_rows, 16, 64, (4096,) * 4, 8192)
        work = w.build(*groups(owners.tolist()), doff, ranks, room)
        seen: list[int] = []
        z_used: list[tuple[int, int]] = []
        for block in blocks_of(work):
            rows = rows_of(block, phase)
            assert 0 < len(rows) <= block_rows
            assert (owners[rows] == block[layout.BLOCK_SLOT_AT]).all()
            seen += rows
            tiles = -(-ranks[block[layout.BLOCK_SLOT_AT], :3] // 16)
            for module in range(3):
                start = int(block[layout.BLOCK_Z_AT + module])
                z_used.append((start, start + int(tiles[module]) * len(rows)))
        inside = [r for r in np.flatnonzero(owners) if (r >= doff) == (phase is Phase.DECODE)]
        assert sorted(seen) == inside
        spans = sorted(span for span in z_used if span[1] > span[0])
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("owners", "room", "code"),
    [
        ([1] * 300, ROOM, ErrorCode.OPERATOR_PLAN_UNSUPPORTED),
        (
            [1, 1],
            Capacity(Phase.DECODE, 4, 16, 64, (0, 256, 256, 256), 1024),
            ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
        ),
        ([1, 1], Capacity(Phase.DECODE, 4, 16, 64, (256,) * 4, 1), ErrorCode.OPERATOR_PLAN_UNSUPPORTED),
        ([9], ROOM, ErrorCode.PLAN_GROUPS),
        ([0] * 70_000 + [1], ROOM, ErrorCode.PLAN_GROUPS),
    ],
)
def test_what_does_not_fit_is_refused(owners, room, code) -> None:
    with pytest.raises(InternalFault) as fault:
        w.build(*groups(owners), 0, np.full((2, 7), 16, dtype=np.int32), room)
    assert fault.value.code == code
