"""What a plan's adapter branch amounts to: rank-row values, multiply-adds and bytes, and how it is spread
over phases.

Counts logical work from the plan and ranks alone; predicts no latency and measures nothing. Exact integers
and fractions. Specification: 0x03F (fragmentation by phase), 0x06B (true and padded rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from loraplex.core.ids import BASE_SLOT
from loraplex.core.plan import BatchPlan

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RankLedger:
    """One projection of one iteration. true_rank_rows: sum of ranks over active rows; executed_rank_rows:
    what runs.
    """

    active_rows: int
    true_rank_rows: int
    executed_rank_rows: int
    d_in: int
    d_out: int

    @property
    def true_flops(self) -> int:
        """2 (d_in + d_out) sum of ranks."""
        return 2 * (self.d_in + self.d_out) * self.true_rank_rows

    @property
    def executed_flops(self) -> int:
        """The same for what runs."""
        return 2 * (self.d_in + self.d_out) * self.executed_rank_rows

    @property
    def padding_ratio(self) -> Fraction:
        """Executed over true work; 1 where nothing is active."""
        return Fraction(self.executed_rank_rows, self.true_rank_rows) if self.true_rank_rows else Fraction(1)

    @property
    def wasted_rank_rows(self) -> int:
        """Rank-row values that only padding computes."""
        return self.executed_rank_rows - self.true_rank_rows


def rank_ledger(ranks: I32, d_in: int, d_out: int, physical_rank: int | None = None) -> RankLedger:
    """The ledger of rows with these logical ranks, 0 for base rows. physical_rank: None runs true ranks."""
    active = ranks[ranks > 0]
    true = int(active.sum())
    executed = true if physical_rank is None else int(active.size) * physical_rank
    return RankLedger(int(active.size), true, executed, d_in, d_out)


def branch_bytes(ranks_by_slot: dict[int, int], rows: int, d_in: int, d_out: int, itemsize: int) -> int:
    """Bytes that the branch of one projection must move: factors once, x read, y read and written for each
    row.
    """
    return factor_bytes(ranks_by_slot, d_in, d_out, itemsize) + rows * (d_in + 2 * d_out) * itemsize


def factor_bytes(ranks_by_slot: dict[int, int], d_in: int, d_out: int, itemsize: int) -> int:
    """Bytes of factors that must be read once for one projection: each distinct adapter once, at
    true rank.
    """
    return sum(ranks_by_slot.values()) * (d_in + d_out) * itemsize


@dataclass(frozen=True, slots=True)
class PhaseLedger:
    """Adapter rows of one phase.

    rows, requests: with an adapter. concentration: of the most popular one, 0 if none. by_adapter: adapter
    slot -> (rows, requests). ranks: rank -> rows, empty where no ranks were given.
    """

    rows: int
    requests: int
    adapters: int
    concentration: Fraction
    by_adapter: dict[int, tuple[int, int]]
    ranks: dict[int, int]


@dataclass(frozen=True, slots=True)
class IterationLedger:
    """Both phases, the whole, and contiguous adapter runs before and after reordering (base runs count)."""

    prefill: PhaseLedger
    decode: PhaseLedger
    all: PhaseLedger
    runs_before: int
    runs_after: int


def iteration_ledger(plan: BatchPlan, ranks: I32 | None = None) -> IterationLedger:
    """How the adapter rows of a plan are spread (0x03F). ranks: int32 [slots], the rank of one module by
    adapter slot.
    """
    slots, rows = plan.requests.adapter_slot, plan.requests.rows
    in_prefill = np.arange(slots.size) < plan.prefills
    order = np.argsort(plan.requests.scheduler_index, kind="stable")
    return IterationLedger(
        prefill=_phase(slots[in_prefill], rows[in_prefill], ranks),
        decode=_phase(slots[~in_prefill], rows[~in_prefill], ranks),
        all=_phase(slots, rows, ranks),
        runs_before=_runs(slots[order]),
        runs_after=_runs(slots),
    )


def _phase(slots: I32, rows: I32, ranks: I32 | None) -> PhaseLedger:
    active = slots != BASE_SLOT
    counts = np.bincount(slots[active], weights=rows[active]).astype(np.int64)
    requests = np.bincount(slots[active])
    total = int(counts.sum())
    present = np.flatnonzero(counts)
    histogram: dict[int, int] = {}
    if ranks is not None:
        for slot in present.tolist():
            rank = int(ranks[slot])
            histogram[rank] = histogram.get(rank, 0) + int(counts[slot])
    return PhaseLedger(
        rows=total,
        requests=int(np.count_nonzero(active)),
        adapters=int(np.count_nonzero(counts)),
        concentration=Fraction(int(counts.max()), total) if total else Fraction(0),
        by_adapter={slot: (int(counts[slot]), int(requests[slot])) for slot in present.tolist()},
        ranks=histogram,
    )


def _runs(slots: I32) -> int:
    return int(slots.size > 0) + int(np.count_nonzero(np.diff(slots)))
