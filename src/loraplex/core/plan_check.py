"""Validation of a plan's own invariants: vectorised, always on, on both sides of the boundary.

Checks what a plan says against itself and against fixed bounds. What it says against current state
(generations, frontiers, ownership) is launch validation, which each side does with its own tables.

Specification: 0x02D, 0x03C, 0x06E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.layout import MAX_SIZE_CLASS
from loraplex.core.packed import I32, empty
from loraplex.core.plan import NO_REFERENCE, BatchPlan, mask_width

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Fixed sizes that a plan's indices must respect."""

    max_requests: int
    max_adapter_slots: int
    num_pages: int
    max_pages_per_request: int
    vocab_size: int


def _require(condition: object, code: ErrorCode, message: str) -> None:
    if not condition:
        raise InternalFault(code, message)


def _within(values: I32, low: int, high: int) -> bool:
    return values.size == 0 or (int(values.min()) >= low and int(values.max()) < high)


def _at_least(values: I32, low: int) -> bool:
    return values.size == 0 or int(values.min()) >= low


def _same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.shape == right.shape and bool((left == right).all())


def _rising(values: I32) -> bool:
    return values.size < 2 or bool((values[1:] > values[:-1]).all())


def _mark(values: I32, bound: int) -> Bools:
    """[bound]: which of 0 to bound - 1 occur in `values`, all of which lie there."""
    marks = np.zeros(bound, dtype=np.bool_)
    marks[values] = True
    return marks


def _distinct(values: I32, bound: int) -> bool:
    """Whether no two of `values`, all from 0 to bound - 1, are equal."""
    return values.size < 2 or int(np.count_nonzero(_mark(values, bound))) == values.size


def _offsets_tile(offsets: I32, end: int) -> bool:
    """Whether offsets start at 0, grow strictly and end at `end` ([0] alone when `end` is 0)."""
    return bool(offsets.size >= 1 and offsets[0] == 0 and offsets[-1] == end and _rising(offsets))


def check_plan(plan: BatchPlan, bounds: PlanBounds) -> None:
    """Raise the stable code of the first invariant that `plan` breaks."""
    indptr = plan.row_indptr
    _check_rows(plan, bounds, indptr)
    _check_tokens(plan, bounds)
    _check_phases(plan, indptr)
    row_adapters = plan.row_adapters
    _check_segments(plan, row_adapters)
    _check_groups(plan, bounds, row_adapters)
    _check_logits(plan, bounds, indptr)
    _check_masks(plan, bounds)
    _check_deltas(plan, bounds)


def _check_rows(plan: BatchPlan, bounds: PlanBounds, indptr: I32) -> None:
    requests, total = plan.requests, plan.rows
    code = ErrorCode.PLAN_ROW_COVERAGE
    _require(
        plan.generation >= 1,
        ErrorCode.PLAN_MALFORMED,
        f"plan generation is {plan.generation}, at least 1 needed",
    )
    count = len(requests)
    _require(
        plan.prefills >= 0 and plan.decodes >= 0 and plan.prefills + plan.decodes == count,
        code,
        f"{plan.prefills} prefills and {plan.decodes} decodes do not make {count} requests",
    )
    slots, rows = requests.slot, requests.rows
    _require(_at_least(rows, 1), code, "a request has no rows")
    _require(int(indptr[-1]) == total, code, f"requests own {int(indptr[-1])} rows of {total}")
    _require(plan.positions.size == total, code, f"{plan.positions.size} positions for {total} rows")
    _require(_within(slots, 0, bounds.max_requests), code, "a request slot is out of bounds")
    _require(_distinct(slots, bounds.max_requests), code, "a request slot appears twice")
    _require(
        _within(requests.adapter_slot, 0, bounds.max_adapter_slots),
        ErrorCode.PLAN_SEGMENTS,
        "an adapter slot is out of bounds",
    )
    order = requests.scheduler_index
    _require(
        _within(order, 0, count) and _distinct(order, count),
        code,
        "scheduler indices are not a permutation",
    )
    kv_start = requests.kv_start
    _require(_at_least(kv_start, 0), ErrorCode.PLAN_POSITION, "a request starts before position 0")
    expected = np.arange(total) - np.repeat(indptr[:-1] - kv_start, rows)
    _require(
        _same(plan.positions, expected),
        ErrorCode.PLAN_POSITION,
        "positions of a request's rows are not consecutive from its KV frontier",
    )


def _check_tokens(plan: BatchPlan, bounds: PlanBounds) -> None:
    code = ErrorCode.PLAN_TOKEN_REFERENCE
    _require(
        _within(plan.tokens, -(1 << 30), bounds.vocab_size),
        code,
        f"a token id lies outside the vocabulary of {bounds.vocab_size}",
    )
    _require(
        plan.reference != NO_REFERENCE or _at_least(plan.tokens, 0),
        code,
        "a token refers to an earlier plan, but the plan names none",
    )
    _require(
        plan.reference == NO_REFERENCE or 0 < plan.reference < plan.generation,
        code,
        f"plan {plan.generation} cannot refer to plan {plan.reference}",
    )


def _check_phases(plan: BatchPlan, indptr: I32) -> None:
    code = ErrorCode.PLAN_PHASE_BOUNDARY
    _require(
        _same(plan.prefill_indptr, indptr[: plan.prefills + 1]),
        code,
        "prefill_indptr disagrees with the prefill requests' rows",
    )
    _require(
        plan.doff == int(indptr[plan.prefills]),
        code,
        f"doff is {plan.doff}, prefill rows end at {int(indptr[plan.prefills])}",
    )
    _require(
        plan.rows - plan.doff == plan.decodes, code, "a decode request has other than one row"
    )  # each has one at least


def _check_segments(plan: BatchPlan, row_adapters: I32) -> None:
    code = ErrorCode.PLAN_SEGMENTS
    offsets, adapters = plan.segment_offsets, plan.segment_adapters
    _require(_offsets_tile(offsets, plan.rows), code, "segment offsets do not tile the rows")
    _require(
        adapters.size == offsets.size - 1,
        code,
        f"{adapters.size} segment adapters for {offsets.size - 1} segments",
    )
    _require(
        _same(np.repeat(adapters, offsets[1:] - offsets[:-1]), row_adapters),
        code,
        "a segment's adapter is not the adapter of its rows",
    )
    base = plan.requests.adapter_slot == 0
    _require(
        not (plan.requests.adapter_generation * base).any(),
        code,
        "a base-only request names an adapter generation",
    )


def _check_groups(plan: BatchPlan, bounds: PlanBounds, row_adapters: I32) -> None:
    code = ErrorCode.PLAN_GROUPS
    rows, offsets, adapters = plan.group_rows, plan.group_offsets, plan.group_adapters
    _require(_within(rows, 0, plan.rows), code, "a grouped row is out of bounds")
    _require(_offsets_tile(offsets, rows.size), code, "group offsets do not tile the grouped rows")
    _require(
        adapters.size == offsets.size - 1,
        code,
        f"{adapters.size} group adapters for {offsets.size - 1} groups",
    )
    _require(
        _within(adapters, 1, bounds.max_adapter_slots), code, "a group stands for base-only rows or nobody's"
    )
    _require(_distinct(adapters, bounds.max_adapter_slots), code, "two groups have one adapter")
    _require(
        _distinct(rows, plan.rows) and _same(_mark(rows, plan.rows), row_adapters != 0),
        code,
        "grouped rows are not exactly the adapter rows, each once",
    )
    _require(
        _same(row_adapters[rows], np.repeat(adapters, offsets[1:] - offsets[:-1])),
        code,
        "a grouped row lies under another adapter's group",
    )


def _check_logits(plan: BatchPlan, bounds: PlanBounds, indptr: I32) -> None:
    code = ErrorCode.PLAN_SAMPLE_ROWS
    logit_rows, samples, scored = plan.logit_rows, plan.samples, plan.prompt_logprobs
    _require(_within(logit_rows, 0, plan.rows), code, "a logit row is out of bounds")
    _require(_rising(logit_rows), code, "logit rows are not strictly increasing")
    count = len(plan.requests)
    for name, logit, request in (
        ("sample", samples.logit, samples.request),
        ("prompt log probability", scored.logit, scored.request),
    ):
        _require(_within(logit, 0, logit_rows.size), code, f"a {name} has no logit row")
        _require(_within(request, 0, count), code, f"a {name} has no request")
    sampled = samples.request
    last = indptr[1:][sampled] - 1
    _require(_same(logit_rows[samples.logit], last), code, "a sample is not its request's last row")
    marks = _mark(sampled, count)
    _require(int(np.count_nonzero(marks)) == len(samples), code, "a request samples twice")
    _require(_rising(plan.requests.scheduler_index[sampled]), code, "samples are not in scheduler order")
    _require(
        _same(samples.position, plan.positions[last] + 1), code, "a sampled position does not follow its row"
    )
    _require(marks[plan.prefills :].all(), code, "a decode request samples nothing")
    if not len(scored):
        return
    owner = np.searchsorted(indptr[1:], logit_rows[scored.logit], side="right")
    _require(_same(owner, scored.request), code, "a prompt log probability lies in another request's rows")
    _require(
        _within(scored.target, 0, bounds.vocab_size), code, "a prompt log probability's target is no token"
    )
    _require(_at_least(scored.top, 0), code, "a prompt log probability asks for a negative count")


def _check_masks(plan: BatchPlan, bounds: PlanBounds) -> None:
    code, samples, words = ErrorCode.PLAN_MASKS, plan.mask_samples, plan.mask_words
    width = mask_width(bounds.vocab_size)
    _require(words.size == samples.size * width, code, f"{words.size} mask words for {samples.size} masks")
    if not samples.size:
        return
    _require(_within(samples, 0, len(plan.samples)), code, "a mask belongs to no sample")
    _require(_rising(samples), code, "masked samples are not strictly increasing")
    masks = plan.masks
    _require((masks != 0).any(axis=1).all(), code, "a mask allows no token")
    spare = bounds.vocab_size % 32
    beyond = masks[:, -1].view(np.uint32) >> np.uint32(spare) if spare else empty()
    _require(not beyond.any(), code, "a mask allows a token outside the vocabulary")


def _check_deltas(plan: BatchPlan, bounds: PlanBounds) -> None:
    code = ErrorCode.PLAN_PAGE_TABLE
    deltas = plan.page_deltas
    _require(_within(deltas.slot, 0, bounds.max_requests), code, "a page delta names no request slot")
    _require(
        _within(deltas.index, 0, bounds.max_pages_per_request),
        code,
        "a page delta lies outside the page table",
    )
    _require(_within(deltas.page, 1, bounds.num_pages), code, "a page delta names the null page or none")
    _check_copies(plan, bounds)
    for name, slots in (
        ("copy", plan.copies.adapter_slot),
        ("publication", plan.publishes.adapter_slot),
        ("retirement", plan.retires.adapter_slot),
    ):
        _require(
            _within(slots, 1, bounds.max_adapter_slots),
            ErrorCode.PLAN_SEGMENTS,
            f"a {name} names no adapter slot",
        )
    opens = plan.opens
    _require(
        _within(opens.slot, 0, bounds.max_requests),
        ErrorCode.PLAN_MALFORMED,
        "an open names no request slot",
    )
    _require(
        _distinct(opens.slot, bounds.max_requests),
        ErrorCode.PLAN_MALFORMED,
        "a request slot is opened twice",
    )
    _require(
        _at_least(opens.kv_start, 0),
        ErrorCode.PLAN_POSITION,
        "a request slot opens before position 0",
    )
    _require(
        _within(opens.sampled_ids, 0, bounds.vocab_size + 1),
        ErrorCode.PLAN_MALFORMED,
        f"a request slot opens for ids beyond the vocabulary of {bounds.vocab_size}",
    )
    _require(
        int(opens.bias.sum()) == len(plan.open_bias) and int(opens.history.sum()) == plan.open_history.size,
        ErrorCode.PLAN_MALFORMED,
        "opens disagree with their bias entries or history",
    )
    _require(_within(plan.scrub_pages, 1, bounds.num_pages), code, "a scrub names the null page or none")
    if not len(plan.scrub_blocks):
        return
    scrubs = plan.scrub_blocks
    _require(
        _within(scrubs.page, 1, bounds.num_pages)
        and _within(scrubs.size_class, 1, MAX_SIZE_CLASS + 1)
        and _blocks_exist(scrubs.size_class, scrubs.block),
        code,
        "a scrub names no block",
    )


def _blocks_exist(size_class: I32, block: I32) -> bool:
    return bool((block >= 0).all() and (block < 1 << size_class).all())


def _check_copies(plan: BatchPlan, bounds: PlanBounds) -> None:
    """Copies land in pages of the pool, no two of them in one byte, none where a request is given a page."""
    code, copies, pages = ErrorCode.PLAN_PAGE_TABLE, plan.copies, plan.copy_pages
    counts, size_class, block = copies.pages, copies.size_class, copies.block
    if not len(copies) and not pages.size:
        return
    _require(_within(pages, 1, bounds.num_pages), code, "a copy names the null page or none")
    _require((counts >= 0).all() and int(counts.sum()) == pages.size, code, "copies and their pages disagree")
    _require(
        _within(size_class, 0, MAX_SIZE_CLASS + 1) and _blocks_exist(size_class, block),
        code,
        "a copy names no block",
    )
    _require(((size_class == 0) | (counts == 1)).all(), code, "a copy into a block has other than one page")
    classes, blocks = np.repeat(size_class, counts), np.repeat(block, counts)
    order = np.lexsort((blocks, classes, pages))
    page, kind, place = pages[order], classes[order], blocks[order]
    again = page[1:] == page[:-1]
    apart = (kind[1:] == kind[:-1]) & (kind[1:] > 0) & (place[1:] != place[:-1])
    _require((~again | apart).all(), code, "two copies share a page, or a block of it")
    _require(
        not np.isin(pages, plan.page_deltas.page).any(),
        code,
        "a page is handed to a request and to a copy at once",
    )
