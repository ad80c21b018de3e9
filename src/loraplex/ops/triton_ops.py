"""The Triton family behind the operator interface: decoder layers by work lists, the rest by torch.

Owns when device buffers are made and filled; the launches are `triton_lora`'s. The head, embedding adapters,
input vectors h, and calls for a part of a fused group run through the segmented torch family, which reads the
same pages. A step that is captured in a graph uses `TritonState` itself: `plan` outside the graph, `apply`
inside.

Specification: 0x02H, 0x06E; rulings "Operators".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from loraplex.core.errors import InternalFault
from loraplex.core.ids import Module
from loraplex.core.layout import Factor
from loraplex.core.plan import BatchPlan
from loraplex.ops import worklist
from loraplex.ops.factor_table import FactorTable
from loraplex.ops.interface import RowSet
from loraplex.ops.segmented import SegmentedOps
from loraplex.ops.table import AdapterTable, ResidentAdapter
from loraplex.ops.torch_common import check_operands
from loraplex.ops.triton_lora import LoraStep, Tuning, group_index, shrink_expand
from loraplex.ops.work_layout import GROUPS
from loraplex.ops.worklist import Phase


@dataclass(frozen=True, slots=True)
class Traits:
    """What adapters need. groups: fused groups with any adapted module. rest: whether they need anything that
    the work lists do not serve: head, embedding or input vectors.
    """

    groups: frozenset[int]
    rest: bool

    @staticmethod
    def of(adapter: ResidentAdapter) -> Traits:
        """Traits of one published adapter."""
        present = np.asarray((adapter.index >= 0).any(axis=0))
        groups = frozenset(index for index, (lo, hi) in enumerate(GROUPS) if present[lo:hi].any())
        outside = bool(present[Module.LM_HEAD] or present[Module.EMBED])
        return Traits(groups, outside or adapter.has(Factor.H))


class TritonState:
    """Mirror of the adapter table and the buffers of both phases, kept from step to step.

    decode_rows, prefill_rows: rows that there is room for; `reserve` grows them, which must not happen while
    a captured graph holds the old buffers. tunings: of prefill and decode, for tests.
    """

    def __init__(
        self,
        table: AdapterTable,
        decode_rows: int = 0,
        prefill_rows: int = 0,
        runs: int = 256,
        tunings: tuple[Tuning, Tuning] | None = None,
    ) -> None:
        self.table = table
        self.mirror = FactorTable.mirror_of(table)
        self.runs = runs
        self.tunings = tunings
        self.steps: dict[Phase, LoraStep] = {}
        self._key: tuple[object, ...] = ()
        self._active: tuple[Phase, ...] = ()
        self._traits: dict[int, tuple[int, Traits]] = {}
        self.traits = Traits(frozenset(), False)
        self._rows = {Phase.DECODE: 0, Phase.PREFILL: 0}
        self._filled = {Phase.DECODE: False, Phase.PREFILL: False}
        self.reserve(Phase.DECODE, decode_rows)
        self.reserve(Phase.PREFILL, prefill_rows)

    def reserve(self, phase: Phase, rows: int, runs: int = 0) -> None:
        """Make room for `rows` rows of a phase in at most `runs` adapter runs; does nothing where there is
        room.
        """
        if rows <= self._rows[phase] and runs <= self.runs:
            return
        self.runs = max(runs, self.runs)
        self._rows[phase] = max(rows, 2 * self._rows[phase])
        self.steps[phase] = LoraStep(
            self.mirror,
            self.table.pool,
            self.table.dtype,
            phase,
            self._rows[phase],
            self.runs,
            tuning=None if self.tunings is None else self.tunings[phase],
        )

    def plan(self, plan: BatchPlan, *, decode_first: bool = False) -> tuple[Phase, ...]:
        """Follow the table, send and fill the work lists of a plan; the phases that have adapter rows.

        decode_first: decode rows lie before prefill rows, unlike in the plan. The list of a phase without any
        is emptied, so that captured launches over it add nothing. Does nothing where the last plan had the
        same rows and adapters, as most decode steps have.
        """
        groups = (plan.group_rows, plan.group_offsets, plan.group_adapters)
        shifts = {Phase.PREFILL: plan.decodes, Phase.DECODE: -plan.doff} if decode_first else {}
        key = (self.table.revision, plan.doff, decode_first, *(part.tobytes() for part in groups))
        if key == self._key:
            return self._active
        self._key = ()
        self.mirror.sync(self.table)
        active = []
        for phase in Phase:
            rows = plan.group_rows
            mine = int((rows >= plan.doff).sum()) if phase is Phase.DECODE else int((rows < plan.doff).sum())
            if not mine:
                self._empty(phase)
                continue
            self.reserve(phase, mine, plan.segment_adapters.size)
            step = self.steps[phase]
            step.prepare(
                worklist.build(
                    rows,
                    plan.group_offsets,
                    plan.group_adapters,
                    plan.doff,
                    self.mirror.max_ranks,
                    step.room,
                    shifts.get(phase, 0),
                )
            )
            self._filled[phase] = True
            active.append(phase)
        self.traits = self._traits_of(plan.group_adapters.tolist())
        self._key, self._active = key, tuple(active)
        return self._active

    def _empty(self, phase: Phase) -> None:
        if self._filled[phase]:
            self.steps[phase].clear()
            self._filled[phase] = False

    def _traits_of(self, slots: list[int]) -> Traits:
        """Traits of all these adapters together."""
        groups: set[int] = set()
        rest = False
        for slot in slots:
            generation = int(self.table.published[slot])
            known = self._traits.get(slot)
            if known is None or known[0] != generation:
                known = self._traits[slot] = (generation, Traits.of(self.table.adapter(slot)))
            groups |= known[1].groups
            rest = rest or known[1].rest
        return Traits(frozenset(groups), rest)

    def apply(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, group: int, phases: tuple[Phase, ...]
    ) -> None:
        """One launch pair for each phase. y: [rows, sum of d_out]; x: [rows, d_in]."""
        for phase in phases:
            shrink_expand(y, x, self.steps[phase], layer, group)


def state_of(table: AdapterTable) -> TritonState:
    """The state that belongs to a table, made on first use."""
    if not isinstance(table.kernel_state, TritonState):
        table.kernel_state = TritonState(table)
    return table.kernel_state


class TritonOps(SegmentedOps):
    """One launch pair for each fused group, phase and layer, whatever the adapters."""

    family: ClassVar[str] = "triton"

    def __init__(self, plan: BatchPlan, table: AdapterTable) -> None:
        super().__init__(plan, table)
        self._state = state_of(table)
        self._phases = self._state.plan(plan)

    def apply(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        modules: tuple[Module, ...],
        rows: RowSet = RowSet.ALL,
    ) -> None:
        """See `AdapterOps.apply`."""
        try:
            group = group_index(modules)
        except InternalFault:
            super().apply(y, x, layer, modules, rows)
            return
        check_operands(self._table, y, x, modules, self.groups(rows).rows)
        self._state.apply(y, x, layer, group, self._phases)
