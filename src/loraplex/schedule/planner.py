"""From a selection to the arrays that packing freezes into a plan.

Reads the running table; writes only the frontier that planning owns. A token that is still on the device is
named by reference to the plan that samples it.

Specification: 0x03C, 0x03G; rulings "Frontiers and depth".
"""

from __future__ import annotations

import numpy as np

from loraplex.core.packed import I32, empty
from loraplex.core.plan import NO_REFERENCE, BatchPlan, Deltas
from loraplex.schedule.packing import Work, build_plan
from loraplex.schedule.running import RunningTable
from loraplex.schedule.select import Selection


def plan_selection(
    table: RunningTable,
    selection: Selection,
    *,
    generation: int,
    newest_launched: int,
    deltas: Deltas,
    masks: I32 | None = None,
) -> BatchPlan:
    """The plan for `selection`. newest_launched: plan that uncommitted tokens come from, 0 when none is in
    flight.

    masks: token masks of the masked samples, in the selection's order; None when there is none.
    """
    slots = selection.slots
    tokens, targets, referenced = _row_tokens(table, selection)
    adapters, generations = table.acting(slots)
    work = Work(
        slot=slots.astype(np.int32),
        incarnation=table.incarnation[slots],
        adapter_slot=adapters,
        adapter_generation=generations,
        kv_start=table.planned[slots],
        rows=selection.rows,
        frontier=table.planned_generation[slots],
        decode=selection.decode,
        samples=selection.samples,
        logprobs=table.logprobs[slots],
        prompt_logprobs=table.prompt_logprobs[slots],
        tokens=tokens,
        targets=targets,
        masked=table.masking(slots) & selection.samples,
        masks=empty(2) if masks is None else masks,
    )
    reference = newest_launched if referenced else NO_REFERENCE
    return build_plan(work, generation=generation, reference=reference, deltas=deltas)


def _row_tokens(table: RunningTable, selection: Selection) -> tuple[I32, I32, bool]:
    """Tokens and prompt-logprob targets of all rows in scheduler order, and whether any token is a
    reference.
    """
    slots, rows = selection.slots, selection.rows
    total = int(rows.sum())
    starts = np.cumsum(rows) - rows
    tokens = np.empty(total, dtype=np.int32)
    targets = np.full(total, -1, dtype=np.int32)
    references = table.reference[slots]
    one = selection.decode
    tokens[starts[one]] = np.where(references[one] >= 0, -1 - references[one], table.last_token[slots[one]])
    for index in np.flatnonzero(~one).tolist():
        slot, begin, count = int(slots[index]), int(starts[index]), int(rows[index])
        first = int(table.planned[slot])
        tokens[begin : begin + count] = table.tokens[slot][first : first + count]
        if table.prompt_logprobs[slot] >= 0:
            targets[begin : begin + count] = _prompt_targets(table, slot, first, count)
    return tokens, targets, bool((references[one] >= 0).any())


def _prompt_targets(table: RunningTable, slot: int, first: int, count: int) -> I32:
    """Next prompt token of rows [first, first + count) whose log probability is still owed, else -1."""
    following = np.arange(first + 1, first + count + 1)
    owed = (following < table.prompt[slot]) & (following > table.scored[slot])
    known = table.tokens[slot][np.minimum(following, table.prompt[slot] - 1)]
    return np.where(owed, known, -1).astype(np.int32)
