"""Which operator family serves a plan: by device, phase and rank only, never by adapter.

Owns the choice and its reasons; never runs anything. Specification: 0x02H, 0x06E; rulings "Operators".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.plan import BatchPlan
from loraplex.ops.bgmv import BgmvOps
from loraplex.ops.cpu import compiled
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
class FamilyChoice:
    """The family of a plan and why it was chosen."""

    family: str
    reason: str


def warm_up(device: torch.device) -> str:
    """Build or find what the operators need on `device`; one line saying what will serve. Call it before
    `/ready`.
    """
    if device.type == "cpu":
        compiled.library()
        return f"adapter operators: {compiled.status()}"
    return "adapter operators: triton work lists"


REASONS: Final[dict[tuple[str, str], str]] = {
    (
        "cpu_kernel",
        "decode",
    ): "2.2 to 2.4 x the floor of its bytes at 1 to 64 rows, the best torch family 14.6",
    ("cpu_kernel", "prefill"): "2.4 x the floor of its bytes at 512 rows, the best torch family 11.3",
    ("segmented", "decode"): "14.6 x the floor of its bytes at 1 and 8 rows, other torch families 16 to 40",
    ("segmented", "prefill"): "11.3 x the floor of its bytes at 512 rows, other torch families 12 to 83",
    (TRITON, "decode"): "10.0 us at 64 rows of 64 adapters of rank 16 on an H200, floor 4.3, vLLM's pair 39",
    (TRITON, "prefill"): "44 us at 4096 rows of 64 adapters of rank 16 on an H200, floor 28, vLLM's pair 195",
}
"""What was measured for each (family, phase): docs/notes/cpu-operators.md, docs/notes/cuda-operators.md."""


def choose(plan: BatchPlan, table: AdapterTable) -> FamilyChoice:
    """The family that serves a plan with adapter rows, any rank: one family of a device was the fastest in
    both phases.
    """
    phase = "decode" if plan.prefills == 0 else "prefill"
    if table.pool.device.type == "cuda":
        family = TRITON
    elif compiled.library() is not None:
        family = "cpu_kernel"
    else:
        family = "segmented"
    return FamilyChoice(family, f"{phase}, any rank: {REASONS[family, phase]}")


def make_operator(plan: BatchPlan, table: AdapterTable, family: str | None = None) -> AdapterOps:
    """The operator of one plan.

    family: a name in `FAMILIES` in place of the choice. Raises `stale_slot_generation` where the plan and the
    table disagree, `operator_plan_unsupported` for an unknown family, and what the family refuses.
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
