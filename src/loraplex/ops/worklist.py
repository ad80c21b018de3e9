"""The adapter part of a plan as the kernels read it: blocks of rows that share an adapter, ordered by work.

A *block* is one adapter slot with up to `block_rows` rows of one phase: rows listed one by one in decode,
consecutive rows in prefill. Each block states, for each of the seven modules, where its records and its rows
of Z begin; both are prefix sums over true rank tiles, so mixed ranks cost what their bytes cost. Nothing here
depends on a layer or an address: the device fills those in once a step (`triton_kernels.records_kernel`).

Numpy only; made on the host, sent in one copy. Where its words lie: `work_layout`.
Specification: 0x02C, 0x02D, 0x03C, 0x06B; rulings "Operators".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.ops.work_layout import (
    BLOCK_COUNT_AT,
    BLOCK_LISTED_AT,
    BLOCK_RECORD_AT,
    BLOCK_ROW0_AT,
    BLOCK_SLOT_AT,
    BLOCK_WORDS,
    BLOCK_Z_AT,
    GROUPS,
    HEAD_BLOCKS_AT,
    HEAD_RECORDS_AT,
    HEAD_WIDE_AT,
    HEAD_WORDS,
    LISTED_WORDS,
)

I32 = npt.NDArray[np.int32]

RANK_TILE: Final = 16
MAX_LISTED_ROW: Final = 0xFFFF


class Phase(IntEnum):
    """Which rows a work list is about: they have kernels and block sizes of their own."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room that the device buffers of one phase have. block_rows: rows of a full block (at most 16 in
    decode). rank_tile: ranks that one record covers.
    """

    phase: Phase
    block_rows: int
    rank_tile: int
    blocks: int
    records: tuple[int, int, int, int]
    z_rows: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """One phase's blocks.

    packed: int32 [16 + blocks * 32]: head, then blocks. The head holds the number of blocks, the number of
    shrink records of each group, and for each group how many leading blocks hold all that have more than one
    rank tile. z_rows: rows of Z that the largest group writes.
    """

    packed: I32
    blocks: int
    records: tuple[int, int, int, int]
    z_rows: int


def _refuse(code: ErrorCode, message: str) -> InternalFault:
    return InternalFault(code, f"adapter work list refused: {message}")


def split_rows(
    rows: I32, offsets: I32, slots: I32, doff: int, phase: Phase, block_rows: int
) -> tuple[I32, I32, I32]:
    """Cut grouped rows into blocks: (slot [B], first index into the kept rows [B + 1], kept rows [N]).

    rows, offsets, slots: the plan's `group_rows`, `group_offsets`, `group_adapters`. Decode blocks are runs
    of up to `block_rows` rows of one adapter; prefill blocks also end where rows stop being consecutive.
    """
    owner = np.repeat(slots, np.diff(offsets))
    keep = rows >= doff if phase is Phase.DECODE else rows < doff
    rows, owner = rows[keep], owner[keep]
    if rows.size == 0:
        return np.zeros(0, np.int32), np.zeros(1, np.int32), rows
    starts = np.empty(rows.size, dtype=bool)
    starts[0] = True
    starts[1:] = owner[1:] != owner[:-1]
    if phase is Phase.PREFILL:
        starts[1:] |= rows[1:] != rows[:-1] + 1
    first = np.flatnonzero(starts)
    run = np.repeat(first, np.diff(np.append(first, rows.size)))
    starts |= (np.arange(rows.size) - run) % block_rows == 0
    first = np.flatnonzero(starts)
    bounds = np.append(first, rows.size).astype(np.int32)
    return owner[first].astype(np.int32), bounds, rows


def build(
    rows: I32, offsets: I32, slots: I32, doff: int, max_ranks: I32, room: Capacity, shift: int = 0
) -> WorkList:
    """The work list of one phase of a plan.

    rows, offsets, slots, doff: the plan's adapter groups. max_ranks: int32 [slots, 7], the largest rank of a
    module over the layers. shift: how far behind its place in the plan a row lies. Raises
    `operator_plan_unsupported` where the device buffers have no room, `plan_groups` for a row or slot out of
    range.
    """
    owner, bounds, kept = split_rows(rows, offsets, slots, doff, room.phase, room.block_rows)
    kept = kept + np.int32(shift)
    if owner.size and (owner.min() < 1 or owner.max() >= len(max_ranks)):
        raise _refuse(
            ErrorCode.PLAN_GROUPS, f"adapter slots must be 1 to {len(max_ranks) - 1}, got {owner.tolist()}"
        )
    if kept.size and (kept.min() < 0 or (room.phase is Phase.DECODE and kept.max() > MAX_LISTED_ROW)):
        raise _refuse(ErrorCode.PLAN_GROUPS, f"rows must be 0 to {MAX_LISTED_ROW}, got {int(kept.max())}")
    count = np.diff(bounds)
    tiles = -(-max_ranks[owner] // room.rank_tile)
    order = np.argsort(-(tiles.sum(axis=1)), kind="stable")
    owner, count, tiles, first = owner[order], count[order], tiles[order], bounds[:-1][order]
    blocks = np.zeros((owner.size, BLOCK_WORDS), dtype=np.int32)
    blocks[:, BLOCK_SLOT_AT], blocks[:, BLOCK_COUNT_AT] = owner, count
    if owner.size:
        blocks[:, BLOCK_ROW0_AT] = kept[first]
        if room.phase is Phase.DECODE:
            lanes = np.minimum(np.arange(2 * LISTED_WORDS)[None, :], (count - 1)[:, None]) + first[:, None]
            listed = kept[lanes].astype(np.uint16)
            blocks[:, BLOCK_LISTED_AT : BLOCK_LISTED_AT + LISTED_WORDS] = listed.view(np.int32)
    records, wide, z_rows = [], [], 0
    for group_first, group_last in GROUPS:
        group = tiles[:, group_first:group_last]
        used = group.reshape(-1).cumsum()
        z_used = (group * count[:, None]).reshape(-1).cumsum()
        starts = np.concatenate([[0], used[:-1]]).reshape(group.shape) if used.size else group
        z_starts = np.concatenate([[0], z_used[:-1]]).reshape(group.shape) if used.size else group
        blocks[:, BLOCK_RECORD_AT + group_first : BLOCK_RECORD_AT + group_last] = starts
        blocks[:, BLOCK_Z_AT + group_first : BLOCK_Z_AT + group_last] = z_starts
        records.append(int(used[-1]) if used.size else 0)
        many = np.flatnonzero((group > 1).any(axis=1))
        wide.append(int(many[-1]) + 1 if many.size else 0)
        z_rows = max(z_rows, int(z_used[-1]) if used.size else 0)
    if (
        owner.size > room.blocks
        or any(n > cap for n, cap in zip(records, room.records, strict=True))
        or z_rows > room.z_rows
    ):
        raise _refuse(
            ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
            f"{owner.size} blocks, {records} records and {z_rows} rows of Z, there is room for "
            f"{room.blocks}, "
            f"{list(room.records)} and {room.z_rows}",
        )
    head = np.zeros(HEAD_WORDS, dtype=np.int32)
    head[HEAD_BLOCKS_AT] = owner.size
    head[HEAD_RECORDS_AT : HEAD_RECORDS_AT + len(GROUPS)] = records
    head[HEAD_WIDE_AT : HEAD_WIDE_AT + len(GROUPS)] = wide
    return WorkList(
        packed=np.concatenate([head, blocks.reshape(-1)]),
        blocks=int(owner.size),
        records=(records[0], records[1], records[2], records[3]),
        z_rows=z_rows,
    )
