"""Which operator family serves a plan: by device, phase and rank only, never by adapter.

Specification: 0x02H, 0x06E; DESIGN 4 "Operators".
"""

from __future__ import annotations

from loraplex.core.plan import BatchPlan
from loraplex.ops.interface import AdapterOps, NoAdapters
from loraplex.ops.table import AdapterTable


def make_operator(plan: BatchPlan, table: AdapterTable) -> AdapterOps:
    """The operator of one plan. Raises `stale_slot_generation` where the plan and the table disagree."""
    table.check_plan(plan)
    if plan.group_rows.size == 0:
        return NoAdapters()
    raise NotImplementedError
