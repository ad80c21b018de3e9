"""The adapter part of a plan seen from one row set: which rows run which slot, as segments and as groups.

Owns nothing of the plan: all packed rows are taken from it as they are; for the head's rows the same maps are
derived from its `logit_rows`. Specification: 0x02C, 0x02D, 0x03C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.core.packed import run_boundaries
from loraplex.core.plan import BatchPlan
from loraplex.ops.interface import RowSet

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row ownership of one row set of `rows` rows.

    adapters: int32 [rows] slot of each row. group_rows [Na], group_offsets [G + 1], group_adapters [G]:
    active rows stably grouped by slot, base left out. segment_offsets [K + 1], segment_adapters [K]:
    contiguous runs, base included. doff: first decode row.
    """

    rows: int
    adapters: I32
    group_rows: I32
    group_offsets: I32
    group_adapters: I32
    segment_offsets: I32
    segment_adapters: I32
    doff: int


def row_groups(plan: BatchPlan, rows: RowSet) -> RowGroups:
    """Row ownership of a row set of `plan`."""
    match rows:
        case RowSet.ALL:
            return RowGroups(
                rows=plan.rows,
                adapters=plan.row_adapters,
                group_rows=plan.group_rows,
                group_offsets=plan.group_offsets,
                group_adapters=plan.group_adapters,
                segment_offsets=plan.segment_offsets,
                segment_adapters=plan.segment_adapters,
                doff=plan.doff,
            )
        case RowSet.LOGIT:
            return _logit_groups(plan)


def _logit_groups(plan: BatchPlan) -> RowGroups:
    adapters = plan.row_adapters[plan.logit_rows]
    active = np.flatnonzero(adapters)
    grouped = active[np.argsort(adapters[active], kind="stable")].astype(np.int32)
    offsets, slots = run_boundaries(adapters[grouped])
    segment_offsets, segment_adapters = run_boundaries(adapters)
    return RowGroups(
        rows=int(adapters.size),
        adapters=adapters,
        group_rows=grouped,
        group_offsets=offsets,
        group_adapters=slots,
        segment_offsets=segment_offsets,
        segment_adapters=segment_adapters,
        doff=int(np.count_nonzero(plan.logit_rows < plan.doff)),
    )
