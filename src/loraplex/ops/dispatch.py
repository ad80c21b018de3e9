"""Which operator family serves a plan: by device, phase and rank only, never by adapter.

Owns the choice and its reasons; never runs anything. Specification: 0x02H, 0x06E; DESIGN 4 "Operators".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.plan import BatchPlan
from loraplex.ops.bgmv import BgmvOps
from loraplex.ops.gather_bmm import GatherBmmOps
from loraplex.ops.indexed import IndexedOps
from loraplex.ops.interface import AdapterOps, NoAdapters
from loraplex.ops.segmented import SegmentedOps
from loraplex.ops.stacked import StackedOps
from loraplex.ops.table import AdapterTable
from loraplex.ops.torch_loop import TorchLoopOps

Family = Callable[[BatchPlan, AdapterTable], AdapterOps]

FAMILIES: Final[dict[str, Family]] = {
    family.family: family
    for family in (TorchLoopOps, GatherBmmOps, BgmvOps, SegmentedOps, IndexedOps, StackedOps)
}
"""Every family that takes tensors, by name; the exact reference takes lists and stands apart."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The family of a plan and why it was chosen."""

    family: str
    reason: str


def choose(plan: BatchPlan, table: AdapterTable) -> Choice:
    """The family that serves a plan with adapter rows."""
    if plan.prefills == 0:
        return Choice("stacked", "decode rows are few: two products a module beat two for each adapter")
    return Choice("segmented", "prefill rows of one adapter are contiguous: slices, no gather")


def make_operator(plan: BatchPlan, table: AdapterTable, family: str | None = None) -> AdapterOps:
    """The operator of one plan.

    family: a name in `FAMILIES` in place of the choice. Raises `stale_slot_generation` where the plan and the table
    disagree, `operator_plan_unsupported` for an unknown family, and what the family refuses.
    """
    table.check_plan(plan)
    if plan.group_rows.size == 0:
        return NoAdapters()
    name = family or choose(plan, table).family
    if name not in FAMILIES:
        raise InternalFault(
            ErrorCode.OPERATOR_PLAN_UNSUPPORTED, f"operator family {name!r} is not one of {sorted(FAMILIES)}"
        )
    return FAMILIES[name](plan, table)
