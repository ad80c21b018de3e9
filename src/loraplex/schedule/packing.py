"""Phase-major packing: selected work becomes a `BatchPlan`.

Owns the within-phase order and every map that undoes it; never decides what runs. Reordering is legal only
inside a phase, because the inverse is recorded: samples come back in scheduler order whatever the packed
order is. Everything is array arithmetic over the selected requests; nothing loops over rows.

Specification: 0x02C, 0x02D, 0x03A to 0x03G.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loraplex.core.packed import I32, empty, run_boundaries
from loraplex.core.plan import (
    NO_REFERENCE,
    BatchPlan,
    Deltas,
    PromptLogprobColumns,
    RequestColumns,
    SampleColumns,
)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Selected requests in scheduler order, N of them, as arrays.

    slot, incarnation, adapter_slot, adapter_generation, kv_start, rows, frontier [N] int32 as in
    `BatchPlan.requests`. decode [N] bool: a one-row decode step; else a prefill chunk. samples [N] bool: the
    last row samples a token (false for an unfinished chunk). logprobs, prompt_logprobs [N]: top entries
    wanted, -1 for none. tokens [sum rows]: token ids or references, request after request. targets [sum
    rows]: the next prompt token of a row whose prompt log probability is wanted, else -1. masked [N] bool:
    the sample takes the next row of masks, which has one row for each masked sample in scheduler order; None
    where there is none.
    """

    slot: I32
    incarnation: I32
    adapter_slot: I32
    adapter_generation: I32
    kv_start: I32
    rows: I32
    frontier: I32
    decode: Bools
    samples: Bools
    logprobs: I32
    prompt_logprobs: I32
    tokens: I32
    targets: I32
    masked: Bools | None = None
    masks: I32 = field(default_factory=lambda: empty(2))

    @staticmethod
    def none() -> Work:
        """No requests: for a plan that only carries deltas."""
        flag = np.empty(0, dtype=np.bool_)
        e = empty()
        return Work(
            slot=e,
            incarnation=e,
            adapter_slot=e,
            adapter_generation=e,
            kv_start=e,
            rows=e,
            frontier=e,
            decode=flag,
            samples=flag,
            logprobs=e,
            prompt_logprobs=e,
            tokens=e,
            targets=e,
        )


def first_appearance_order(keys: I32) -> npt.NDArray[np.int64]:
    """Stable permutation that groups equal keys, groups in order of first appearance. keys [n] >= 0
    -> [n].
    """
    if keys.size == 0:
        return np.empty(0, dtype=np.int64)
    first = np.empty(int(keys.max()) + 1, dtype=np.int64)
    first[keys[::-1]] = np.arange(keys.size - 1, -1, -1)  # the last write to a key is its first appearance
    return np.argsort(first[keys], kind="stable")


def packed_order(adapter_slot: I32, decode: Bools) -> npt.NDArray[np.int64]:
    """Scheduler indices in packed order: prefills before decodes, adapters grouped inside each phase.

    The last prefill group and the first decode group share an adapter where one exists, so that one
    projection run crosses `doff`; attention boundaries are untouched by that.
    """
    if decode.all():
        return first_appearance_order(adapter_slot)
    prefills, decodes = np.flatnonzero(~decode), np.flatnonzero(decode)
    prefills = prefills[first_appearance_order(adapter_slot[prefills])]
    decodes = decodes[first_appearance_order(adapter_slot[decodes])]
    shared = decodes[np.isin(adapter_slot[decodes], adapter_slot[prefills])]
    if shared.size:
        bridge = adapter_slot[shared[0]]
        prefills = prefills[np.argsort(adapter_slot[prefills] == bridge, kind="stable")]
        decodes = decodes[np.argsort(adapter_slot[decodes] != bridge, kind="stable")]
    return np.concatenate([prefills, decodes])


def group_rows(row_adapters: I32) -> tuple[I32, I32, I32]:
    """Adapter rows stably grouped by adapter slot, base rows left out (0x02C's g, 0x02D's o and c).

    row_adapters [T] -> rows [Na], offsets [G + 1], adapters [G].
    """
    active = np.flatnonzero(row_adapters)
    rows = active[np.argsort(row_adapters[active], kind="stable")].astype(np.int32)
    offsets, adapters = run_boundaries(row_adapters[rows])
    return rows, offsets, adapters


def build_plan(
    work: Work, *, generation: int, reference: int = NO_REFERENCE, deltas: Deltas | None = None
) -> BatchPlan:
    """The frozen plan for `work` (0x03G). generation: number of the plan; reference: see `BatchPlan`."""
    deltas = deltas or Deltas()
    order = packed_order(work.adapter_slot, work.decode)
    rows, adapters, kv_start = work.rows[order], work.adapter_slot[order], work.kv_start[order]
    indptr = np.zeros(order.size + 1, dtype=np.int32)
    np.cumsum(rows, out=indptr[1:])
    prefills = order.size - int(np.count_nonzero(work.decode))
    doff, total = int(indptr[prefills]), int(indptr[-1])
    owner = np.repeat(np.arange(order.size), rows)  # packed request of each row
    within = np.arange(total, dtype=np.int32) - indptr[owner]
    gather = (np.cumsum(work.rows) - work.rows)[order][owner] + within
    row_adapters = adapters[owner]
    segment_offsets, segment_adapters = run_boundaries(row_adapters)
    grouped, group_offsets, group_adapters = group_rows(row_adapters)
    requests = RequestColumns.filled(
        order.size,
        slot=work.slot[order],
        incarnation=work.incarnation[order],
        adapter_slot=adapters,
        adapter_generation=work.adapter_generation[order],
        kv_start=kv_start,
        rows=rows,
        frontier=work.frontier[order],
        scheduler_index=order,
    )
    logit_rows, samples, prompt_logprobs = _logit_maps(work, order, indptr, gather)
    return BatchPlan(
        generation=generation,
        reference=reference,
        prefills=prefills,
        decodes=order.size - prefills,
        doff=doff,
        tokens=work.tokens[gather],
        positions=kv_start[owner] + within,
        requests=requests,
        prefill_indptr=indptr[: prefills + 1],
        segment_offsets=segment_offsets,
        segment_adapters=segment_adapters,
        group_rows=grouped,
        group_offsets=group_offsets,
        group_adapters=group_adapters,
        logit_rows=logit_rows,
        samples=samples,
        prompt_logprobs=prompt_logprobs,
        mask_samples=_masked_samples(work),
        mask_words=work.masks.reshape(-1),
        opens=deltas.opens,
        open_bias=deltas.open_bias,
        open_history=deltas.open_history,
        page_deltas=deltas.page_deltas,
        copies=deltas.copies,
        copy_pages=deltas.copy_pages,
        publishes=deltas.publishes,
        retires=deltas.retires,
        scrub_pages=deltas.scrub_pages,
        scrub_blocks=deltas.scrub_blocks,
    )


def _masked_samples(work: Work) -> I32:
    """Which samples take a mask, in scheduler order."""
    if work.masked is None:
        return empty()
    return np.flatnonzero(work.masked[work.samples]).astype(np.int32)


def _logit_maps(
    work: Work, order: npt.NDArray[np.int64], indptr: I32, gather: npt.NDArray[np.int64]
) -> tuple[I32, SampleColumns, PromptLogprobColumns]:
    """Rows that need logits, the samples in scheduler order, and the prompt log probabilities."""
    packed_of = np.empty(order.size, dtype=np.int64)
    packed_of[order] = np.arange(order.size)
    sampling = np.flatnonzero(work.samples)
    sample_packed = packed_of[sampling]
    sample_rows = indptr[1:][sample_packed] - 1
    targets = work.targets[gather]
    scored_rows = np.flatnonzero(targets >= 0)
    need = np.zeros(int(indptr[-1]), dtype=np.bool_)
    need[sample_rows] = True
    need[scored_rows] = True
    logit_rows = np.flatnonzero(need).astype(np.int32)
    logit_of = np.cumsum(need, dtype=np.int32) - 1
    samples = SampleColumns.filled(
        sampling.size,
        logit=logit_of[sample_rows],
        request=sample_packed,
        position=work.kv_start[sampling] + work.rows[sampling],
        logprobs=work.logprobs[sampling],
    )
    if not scored_rows.size:
        return logit_rows, samples, PromptLogprobColumns.none()
    scored_packed = np.searchsorted(indptr[1:], scored_rows, side="right")
    scored = PromptLogprobColumns.filled(
        scored_rows.size,
        logit=logit_of[scored_rows],
        request=scored_packed,
        target=targets[scored_rows],
        top=work.prompt_logprobs[order][scored_packed],
    )
    return logit_rows, samples, scored
