"""Which operator family serves a plan: by device, phase and rank only, never by adapter.

Owns the choice and its reasons; never runs anything. Specification: 0x02H, 0x06E; DESIGN 4 "Operators".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.plan import BatchPlan
from loraplex.ops.bgmv import BgmvOps
from loraplex.ops.cpu import build
from loraplex.ops.cpu_kernel import CpuKernelOps
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
    for family in (TorchLoopOps, GatherBmmOps, BgmvOps, SegmentedOps, IndexedOps, StackedOps, CpuKernelOps)
}
"""Every family that takes tensors, by name; the exact reference takes lists and stands apart."""


TRITON: Final = "triton"
"""The family of CUDA devices; imported only where it is wanted."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The family of a plan and why it was chosen."""

    family: str
    reason: str


def warm_up(device: torch.device) -> str:
    """Build or find what the operators need on `device`; one line saying what will serve. Call it before `/ready`."""
    if device.type == "cpu":
        build.library()
        return f"adapter operators: {build.status()}"
    return "adapter operators: triton work lists"


def choose(plan: BatchPlan, table: AdapterTable) -> Choice:
    """The family that serves a plan with adapter rows. Measured: docs/notes/cpu-operators.md, docs/bench-ops-h200.md."""
    phase = "decode" if plan.prefills == 0 else "prefill"
    if table.pool.device.type == "cpu" and build.library() is not None:
        return Choice(
            "cpu_kernel", f"compiled, any rank, {phase}: one call for all adapters, factors in place"
        )
    if table.pool.device.type == "cuda":
        return Choice(
            TRITON, f"work lists, any rank, {phase}: one launch pair a fused group, factors in place"
        )
    return Choice("segmented", f"torch, any rank, {phase}: the planner makes rows of an adapter contiguous")


def make_operator(plan: BatchPlan, table: AdapterTable, family: str | None = None) -> AdapterOps:
    """The operator of one plan.

    family: a name in `FAMILIES` in place of the choice. Raises `stale_slot_generation` where the plan and the table
    disagree, `operator_plan_unsupported` for an unknown family, and what the family refuses.
    """
    table.check_plan(plan)
    if plan.group_rows.size == 0:
        return NoAdapters()
    name = family or choose(plan, table).family
    if name == TRITON:
        from loraplex.ops.triton_ops import TritonOps  # not on every machine

        return TritonOps(plan, table)
    if name not in FAMILIES:
        raise InternalFault(
            ErrorCode.OPERATOR_PLAN_UNSUPPORTED, f"operator family {name!r} is not one of {sorted(FAMILIES)}"
        )
    return FAMILIES[name](plan, table)
