"""The adapter branch on CUDA: Y[rows, slice] += s (X A^T) B^T for every adapter of a step, one launch pair a
group.

A `LoraStep` owns the device buffers of one phase (decode or prefill). Once a step `prepare` sends the work
list and fills in the addresses of all layers; then each layer calls `shrink_expand` for q-k-v, o, gate-up and
down, or `shrink` and `expand` apart, so that the shrink can run beside the base GEMM. Grids, constexprs and
buffers depend on the model's shapes, the phase and the tuning only, so one captured graph serves every mix of
adapters and ranks.

Never here: which rows belong to which adapter (`worklist`), where factors lie (`factor_table`), which family
serves a plan (`dispatch`). Specification: 0x02, 0x06; rulings "Operators"; benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.limits import MAX_RANK
from loraplex.ops import triton_kernels as kernels
from loraplex.ops.factor_table import FactorTable
from loraplex.ops.work_layout import (
    BLOCK_WORDS,
    EXPAND_WORDS,
    GROUPS,
    HEAD_RECORDS_AT,
    HEAD_WIDE_AT,
    HEAD_WORDS,
    META_WORDS,
    MODULES,
    SHRINK_WORDS,
)
from loraplex.ops.worklist import RANK_TILE, Capacity, Phase, WorkList


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one phase runs. Results are bitwise functions of `splits`, `chunk_floor`, `max_bk` and `rank_tile`,
    not of the rest.

    block_rows: rows of a block. splits: most chunks of d_in; chunk_floor: fewest elements of a chunk. max_bk:
    elements loaded at once; a longer chunk is a loop with `stages` stages. bn: columns of an expand tile.
    *_warps, *_ctas: warps of a program, programs of the grid for each multiprocessor. pdl: programmatic
    dependent launch. rank_tile: ranks of a record. max_run: most column tiles of one expand program.
    """

    block_rows: int
    splits: int
    chunk_floor: int
    max_bk: int
    bn: int
    shrink_warps: int
    expand_warps: int
    shrink_ctas: int
    expand_ctas: int
    stages: int = 1
    pdl: bool = True
    rank_tile: int = RANK_TILE
    max_run: int = 8


DECODE: Final = Tuning(
    block_rows=4,
    splits=16,
    chunk_floor=64,
    max_bk=256,
    bn=128,
    shrink_warps=1,
    expand_warps=1,
    shrink_ctas=16,
    expand_ctas=8,
    stages=3,
)
PREFILL: Final = Tuning(
    block_rows=32,
    splits=2,
    chunk_floor=128,
    max_bk=128,
    bn=128,
    shrink_warps=4,
    expand_warps=4,
    shrink_ctas=3,
    expand_ctas=16,
    stages=4,
    rank_tile=32,
    max_run=1,
)


@dataclass(frozen=True, slots=True)
class Chunks:
    """How d_in is cut: `splits` chunks of `steps` loads of `bk` elements; partial sums are stored `z_splits`
    apart.
    """

    bk: int
    steps: int
    splits: int
    z_splits: int


def chunks(d_in: int, tuning: Tuning) -> Chunks:
    """The cut of one input dimension; depends on d_in and the tuning only."""
    wanted = max(tuning.chunk_floor, -(-d_in // tuning.splits))
    bk = min(tuning.max_bk, triton.next_power_of_2(wanted))
    steps = -(-wanted // bk)
    splits = -(-d_in // (bk * steps))
    return Chunks(bk, steps, splits, triton.next_power_of_2(splits))


def _common(phase: Phase, tuning: Tuning, interpreted: bool) -> dict[str, Any]:
    pdl = tuning.pdl and not interpreted
    out: dict[str, Any] = {"GATHER": phase is Phase.DECODE, "F32_DOT": interpreted, "PDL": pdl}
    return out | ({"launch_pdl": True} if pdl else {})


def shrink_constants(
    d_in: Sequence[int], group: int, cut: Chunks, phase: Phase, tuning: Tuning, interpreted: bool
) -> dict[str, Any]:
    """Constexprs and launch options of a group's shrink."""
    return {
        "D_IN": d_in[GROUPS[group][0]],
        "BM": tuning.block_rows,
        "BK": cut.bk,
        "STEPS": cut.steps,
        "SPLITS": cut.splits,
        "Z_SPLITS": cut.z_splits,
        "STAGES": tuning.stages,
        "TILE": tuning.rank_tile,
        "num_warps": tuning.shrink_warps,
        **_common(phase, tuning, interpreted),
    }


def expand_constants(
    d_out: Sequence[int], group: int, cut: Chunks, phase: Phase, tuning: Tuning, interpreted: bool
) -> dict[str, Any]:
    """Constexprs and launch options of a group's expand."""
    first, last = GROUPS[group]
    widths = [*d_out[first:last], 0, 0][:3]
    return {
        "M0": widths[0],
        "M1": widths[1],
        "M2": widths[2],
        "BM": tuning.block_rows,
        "BN": tuning.bn,
        "SPLITS": cut.splits,
        "Z_SPLITS": cut.z_splits,
        "VECTORS": True,
        "TILE": tuning.rank_tile,
        "MAX_RUN": tuning.max_run,
        "num_warps": tuning.expand_warps,
        **_common(phase, tuning, interpreted),
    }


def capacity(phase: Phase, rows: int, runs: int, max_rank: int, tuning: Tuning) -> Capacity:
    """Room for any batch of `rows` rows in at most `runs` adapter runs with ranks up to `max_rank`."""
    blocks = rows if phase is Phase.DECODE else -(-rows // tuning.block_rows) + runs
    tiles = -(-max_rank // tuning.rank_tile)
    records = [(last - first) * tiles * blocks for first, last in GROUPS]
    widest = max(last - first for first, last in GROUPS)
    return Capacity(
        phase,
        tuning.block_rows,
        tuning.rank_tile,
        blocks,
        (records[0], records[1], records[2], records[3]),
        widest * tiles * rows,
    )


def module_bases(records: Sequence[int]) -> tuple[int, ...]:
    """Where each module's group begins in the record lists; records: room of each group."""
    return tuple(
        sum(records[:group]) for group, (first, last) in enumerate(GROUPS) for _ in range(first, last)
    )


class LoraStep:
    """Device buffers and launches of one phase.

    table: where factors lie. pool: the page pool, uint8, contiguous. dtype: of X, Y and the factors. rows:
    most rows of the phase in a step; runs: most adapter runs (prefill). max_rank: largest rank that the
    buffers have room for. All calls are enqueued on the current stream; Z is shared by the groups, so at most
    one pair is in flight.
    """

    def __init__(
        self,
        table: FactorTable,
        pool: torch.Tensor,
        dtype: torch.dtype,
        phase: Phase,
        rows: int,
        runs: int = 0,
        max_rank: int = MAX_RANK,
        tuning: Tuning | None = None,
        multiprocessors: int = 0,
    ) -> None:
        self.table, self.phase, self.dtype = table, phase, dtype
        self.tuning = tuning or (DECODE if phase is Phase.DECODE else PREFILL)
        flat = pool.view(-1)
        if pool.dtype is not torch.uint8 or table.itemsize != dtype.itemsize or flat.numel() % 4:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"a uint8 pool of whole {dtype} elements expected, got {pool.dtype}",
            )
        self.room = capacity(phase, rows, runs, max_rank, self.tuning)
        self.pool, self.pool32 = flat.view(dtype), flat.view(torch.float32)
        self.interpreted = pool.device.type != "cuda"
        self.multiprocessors = multiprocessors or (
            1 if self.interpreted else torch.cuda.get_device_properties(pool.device).multi_processor_count
        )
        self._allocate(pool.device)
        self._chunks = [chunks(table.d_in[first], self.tuning) for first, _ in GROUPS]

    def _allocate(self, device: torch.device) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        layers, blocks = self.table.layers, self.room.blocks
        self.records = sum(self.room.records)
        self.head = ints(HEAD_WORDS + blocks * BLOCK_WORDS)
        self.blocks = self.head[HEAD_WORDS:]
        self.meta = ints(self.records, META_WORDS)
        self.shrink_records = ints(layers, self.records, SHRINK_WORDS)
        self.expand_records = ints(layers, blocks * MODULES, EXPAND_WORDS)
        self.fence = ints(1)
        self.starts = [sum(self.room.records[:group]) for group in range(len(GROUPS))]
        z_splits = max(chunks(d_in, self.tuning).z_splits for d_in in self.table.d_in)
        self.z = torch.zeros(
            self.room.z_rows * z_splits * self.tuning.rank_tile, dtype=torch.float32, device=device
        )

    def send(self, packed: torch.Tensor) -> None:
        """Copy a work list (int32, host, pinned if it is to be asynchronous) into the static buffer."""
        if packed.dtype is not torch.int32 or packed.numel() > self.head.numel():
            raise InternalFault(
                ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
                f"a work list of {packed.numel()} int32 words at most {self.head.numel()} expected, got "
                f"{packed.dtype}",
            )
        self.head[: packed.numel()].copy_(packed, non_blocking=True)

    def fill(self) -> None:
        """Make the records of all layers from the work list on the device."""
        table = self.table
        grid = (self.room.blocks, table.layers)
        kernels.records_kernel[grid](
            self.head,
            self.blocks,
            table.addresses,
            table.ranks,
            table.scales.view(torch.int32),
            table.flags,
            table.max_ranks_device,
            self.meta,
            self.shrink_records,
            self.shrink_records.view(torch.int64),
            self.expand_records,
            self.expand_records.view(torch.int64),
            table.layers,
            self.room.blocks,
            self.records,
            D_IN=table.d_in,
            BASES=module_bases(self.room.records),
            TILE=self.tuning.rank_tile,
            MAX_TILES=MAX_RANK // self.tuning.rank_tile,
            num_warps=1,
        )
        # A shrink reads its records before it waits for the kernel in front of it; this one stands between
        # and waits for the records itself.
        self.fence.zero_()

    def prepare(self, work: WorkList) -> None:
        """`send` and `fill` for a step that is not captured."""
        packed = torch.from_numpy(work.packed)
        self.send(packed if self.interpreted else packed.pin_memory())
        self.fill()

    def clear(self) -> None:
        """Empty the work list: launches over it do nothing."""
        self.head[:HEAD_WORDS].zero_()

    def shrink(self, x: torch.Tensor, layer: int, group: int) -> None:
        """Z partials of one group. x: [rows, d_in] of the model's dtype, unit column stride."""
        first, _ = GROUPS[group]
        self._check(x, self.table.d_in[first], layer)
        cut, start, cap = self._chunks[group], self.starts[group], self.room.records[group]
        meta = self.meta[start : start + cap]
        records = self.shrink_records[layer, start : start + cap]
        kernels.shrink_kernel[(self.multiprocessors * self.tuning.shrink_ctas,)](
            x,
            self.pool,
            self.z,
            self.head,
            meta,
            meta.view(torch.int16),
            records,
            records.view(torch.int64),
            self.table.row_list,
            x.stride(0),
            cap,
            COUNT_AT=HEAD_RECORDS_AT + group,
            **shrink_constants(self.table.d_in, group, cut, self.phase, self.tuning, self.interpreted),
        )

    def expand(self, y: torch.Tensor, layer: int, group: int) -> None:
        """Add s Z B^T to y, then g and c. y: [rows, sum of d_out], the group's modules side by side, in
        place.
        """
        first, last = GROUPS[group]
        self._check(y, sum(self.table.d_out[first:last]), layer)
        records = self.expand_records[layer]
        kernels.expand_kernel[(self.multiprocessors * self.tuning.expand_ctas,)](
            y,
            self.pool,
            self.pool32,
            self.z,
            self.head,
            self.blocks,
            self.blocks.view(torch.int16),
            records,
            records.view(torch.int64),
            self.table.row_list,
            self.table.vectors,
            y.stride(0),
            FIRST_MODULE=first,
            WIDE_AT=HEAD_WIDE_AT + group,
            **expand_constants(
                self.table.d_out, group, self._chunks[group], self.phase, self.tuning, self.interpreted
            ),
        )

    def _check(self, tensor: torch.Tensor, width: int, layer: int) -> None:
        if (
            tensor.dtype is not self.dtype
            or tensor.dim() != 2
            or tensor.shape[1] != width
            or tensor.stride(1) != 1
        ):
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT,
                f"a {self.dtype} matrix of {width} columns with unit stride expected, got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}",
            )
        if not 0 <= layer < self.table.layers:
            raise InternalFault(
                ErrorCode.OPERATOR_LAYOUT, f"layer must be 0 to {self.table.layers - 1}, got {layer}"
            )


def shrink_expand(y: torch.Tensor, x: torch.Tensor, step: LoraStep, layer: int, group: int) -> None:
    """y[rows, slices] = g * (y + s (x A^T) B^T) + c for the adapter rows of the step; other rows keep their
    bits.
    """
    step.shrink(x, layer, group)
    step.expand(y, layer, group)


def group_index(modules: Sequence[int]) -> int:
    """The group of modules that share an input, given in their order; raises `operator_plan_unsupported`."""
    wanted = tuple(int(m) for m in modules)
    for index, (first, last) in enumerate(GROUPS):
        if wanted == tuple(range(first, last)):
            return index
    raise InternalFault(
        ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
        f"modules {list(wanted)} are not one of the fused groups {GROUPS}",
    )
