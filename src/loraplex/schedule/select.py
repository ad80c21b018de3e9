"""Selection of rows for one iteration: decode rows first, then prefill chunks, under a token budget.

Pure functions over the running table. A request that is past its prefill takes one row; others take as many
of their remaining prompt rows as the budget leaves, oldest first; a chunk ends where an activated adapter is
invoked.

Specification: 0x03 (phases), 0x08E (activation), 0x09B (selection among eligible requests).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraplex.core.packed import I32
from loraplex.schedule.running import Bools, RunningTable, Slots


@dataclass(frozen=True, slots=True)
class MixedBound:
    """Prefill rows of an iteration that also decodes: `rows`, and `each` for each decode row.

    A decode step takes longer the more rows it has, so the time between two tokens grows by about the same
    factor whatever is running. multiple: of rows of the whole iteration, prefill rows fill up to the next.
    """

    rows: int
    each: int = 0
    multiple: int = 1

    def prefill_rows(self, decodes: int) -> int:
        """Prefill rows at most beside so many decode rows, >= 1."""
        whole = self.rows + (self.each + 1) * decodes
        return -(-whole // self.multiple) * self.multiple - decodes


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of one iteration, in scheduler order (oldest first).

    slots [N]; rows [N] >= 1; decode [N]; samples [N]: whether the last row samples a token.
    """

    slots: Slots
    rows: I32
    decode: Bools
    samples: Bools

    def keep(self, mask: Bools) -> Selection:
        """The part of the selection under `mask`."""
        return Selection(self.slots[mask], self.rows[mask], self.decode[mask], self.samples[mask])


def select_rows(table: RunningTable, token_budget: int, mixed: MixedBound) -> Selection:
    """Choose rows for the next iteration. token_budget: rows at most, >= 1.

    mixed: bounds the prefill rows where anything decodes: its next token waits for them.
    """
    slots = table.runnable()
    remaining = table.remaining(slots)
    decode = table.decoding(slots)
    if slots.size <= token_budget and decode.all():
        return Selection(slots, np.ones(slots.size, dtype=np.int32), decode, remaining == 1)
    rows = np.where(decode, np.minimum(remaining, 1), 0).astype(np.int32)
    budget = token_budget - int(rows.sum())
    if budget < 0:
        kept = np.cumsum(rows) <= token_budget
        rows = np.where(kept, rows, 0).astype(np.int32)
        budget = 0
    elif rows.any():
        budget = min(budget, mixed.prefill_rows(int(rows.sum())))
    wanted = np.where(decode, 0, remaining)
    before = table.invoked[slots] - table.planned[slots]
    wanted = np.where(before > 0, np.minimum(wanted, before), wanted)
    before = np.cumsum(wanted) - wanted
    rows += np.clip(budget - before, 0, wanted).astype(np.int32)
    selection = Selection(slots, rows, decode, rows == remaining)
    return selection.keep(rows > 0)
