"""One field of a valid plan is changed at a time; each change is refused with the code of the invariant that
it breaks.

Specification: 0x02D, 0x03C, 0x03E, 0x06E; rulings "Tests" (malformed inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.sections import adapters, changed

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import Columns
from loraplex.core.plan import (
    BatchPlan,
    BiasColumns,
    BlockColumns,
    CopyColumns,
    Deltas,
    OpenColumns,
    PageDeltaColumns,
)
from loraplex.core.plan_check import PlanBounds, check_plan
from loraplex.schedule.packing import Work, build_plan

BOUNDS = PlanBounds(
    max_requests=8, max_adapter_slots=6, num_pages=64, max_pages_per_request=8, vocab_size=100
)
ROWS, PHASE, POSITION = ErrorCode.PLAN_ROW_COVERAGE, ErrorCode.PLAN_PHASE_BOUNDARY, ErrorCode.PLAN_POSITION
SEGMENTS, GROUPS, SAMPLES = ErrorCode.PLAN_SEGMENTS, ErrorCode.PLAN_GROUPS, ErrorCode.PLAN_SAMPLE_ROWS
TOKENS, PAGES, FORM = ErrorCode.PLAN_TOKEN_REFERENCE, ErrorCode.PLAN_PAGE_TABLE, ErrorCode.PLAN_MALFORMED


def i32(*values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def valid() -> BatchPlan:
    """0x03B's batch: p1 (b), p0 (a), d0 (a), d1 (base), d2 (c) in packed order, with deltas of every kind."""
    work = Work(
        slot=i32(0, 1, 2, 3, 4),
        incarnation=i32(1, 1, 1, 1, 1),
        adapter_slot=i32(1, 2, 1, 0, 3),
        adapter_generation=i32(4, 5, 4, 0, 6),
        kv_start=i32(0, 0, 4, 6, 9),
        rows=i32(3, 2, 1, 1, 1),
        frontier=i32(0, 0, 1, 1, 1),
        decode=np.array([False, False, True, True, True]),
        samples=np.ones(5, dtype=np.bool_),
        logprobs=i32(-1, -1, 0, 2, -1),
        prompt_logprobs=i32(1, -1, -1, -1, -1),
        tokens=i32(10, 11, 12, 20, 21, -1, 40, -2),
        targets=i32(11, 12, -1, -1, -1, -1, -1, -1),
    )
    opens = OpenColumns.zeros(2)
    opens.slot[:], opens.incarnation[:], opens.bias[0], opens.history[1] = (0, 1), 1, 1, 2
    copies = CopyColumns.filled(
        3,
        digest=range(8),
        adapter_slot=(4, 3, 2),
        adapter_generation=(3, 7, 9),
        pages=(2, 1, 1),
        size_class=(0, 2, 2),
        block=(0, 0, 3),
    )
    deltas = Deltas(
        opens=opens,
        open_bias=BiasColumns.filled(1, token=7, bias=0),
        open_history=i32(3, 4),
        page_deltas=PageDeltaColumns.filled(2, slot=(0, 1), index=0, page=(9, 10)),
        copies=copies,
        copy_pages=i32(20, 21, 22, 22),
        publishes=adapters((5, 2)),
        retires=adapters((4, 2)),
        scrub_pages=i32(9, 30),
        scrub_blocks=BlockColumns.filled(2, page=(22, 31), size_class=(2, 1), block=1),
    )
    return build_plan(work, generation=3, reference=2, deltas=deltas)


Change = Callable[[BatchPlan], BatchPlan]


def cell(name: str, at: Any, value: Any) -> Change:
    """One element becomes `value` (or value(element)). at: its index, (row, column) in a table."""

    def apply(plan: BatchPlan) -> BatchPlan:
        section = getattr(plan, name)
        if isinstance(section, Columns):
            row, column = at
            return replace(plan, **{name: changed(section, row, **{column: value})})
        array = section.copy()
        array[at] = value(array[at]) if callable(value) else value
        return replace(plan, **{name: array})

    return apply


def part(name: str, select: Callable[[Any], Any]) -> Change:
    return lambda plan: replace(plan, **{name: select(getattr(plan, name))})


def scalar(name: str, value: int) -> Change:
    return lambda plan: replace(plan, **{name: value})


SWAP = np.array([1, 0])
MALFORMED: dict[str, tuple[Change, ErrorCode]] = {
    "generation 0": (scalar("generation", 0), FORM),
    "reference to itself": (scalar("reference", 3), TOKENS),
    "reference to a later plan": (scalar("reference", 9), TOKENS),
    "reference to plan 0": (scalar("reference", 0), TOKENS),
    "references without a plan": (scalar("reference", -1), TOKENS),
    "one prefill more": (scalar("prefills", 3), ROWS),
    "one decode less": (scalar("decodes", 2), ROWS),
    "negative prefills": (scalar("prefills", -1), ROWS),
    "a prefill counted as a decode": (lambda p: replace(p, prefills=1, decodes=4), PHASE),
    "doff one less": (scalar("doff", 4), PHASE),
    "doff one more": (scalar("doff", 6), PHASE),
    "prefill boundary moved": (cell("prefill_indptr", 1, 3), PHASE),
    "prefill boundary missing": (part("prefill_indptr", lambda a: a[:-1]), PHASE),
    "prefill boundary per request": (part("prefill_indptr", lambda a: i32(0, 1, 2)), PHASE),
    "request without rows": (cell("requests", (0, "rows"), 0), ROWS),
    "request with a row more": (cell("requests", (0, "rows"), 3), ROWS),
    "negative rows": (cell("requests", (0, "rows"), -2), ROWS),
    "request missing": (part("requests", lambda a: a[1:]), ROWS),
    "request slot negative": (cell("requests", (0, "slot"), -1), ROWS),
    "request slot out of bounds": (cell("requests", (0, "slot"), 8), ROWS),
    "request slot twice": (cell("requests", (0, "slot"), 0), ROWS),
    "adapter slot negative": (cell("requests", (0, "adapter_slot"), -1), SEGMENTS),
    "adapter slot out of bounds": (cell("requests", (0, "adapter_slot"), 6), SEGMENTS),
    "adapter of a request exchanged": (cell("requests", (0, "adapter_slot"), 1), SEGMENTS),
    "base request with a generation": (cell("requests", (3, "adapter_generation"), 1), SEGMENTS),
    "scheduler index twice": (cell("requests", (0, "scheduler_index"), 0), ROWS),
    "scheduler index out of range": (cell("requests", (0, "scheduler_index"), 5), ROWS),
    "history before position 0": (cell("requests", (0, "kv_start"), -1), POSITION),
    "frontier moved": (cell("requests", (2, "kv_start"), 5), POSITION),
    "position repeated": (cell("positions", 1, 0), POSITION),
    "position of another request": (cell("positions", 5, 6), POSITION),
    "a position missing": (part("positions", lambda a: a[:-1]), ROWS),
    "a token missing": (part("tokens", lambda a: a[:-1]), ROWS),
    "token beyond the vocabulary": (cell("tokens", 0, 100), TOKENS),
    "token reference out of bounds": (cell("tokens", 5, -(1 << 30) - 1), TOKENS),
    "segments end early": (cell("segment_offsets", -1, 7), SEGMENTS),
    "segments end at the requests": (cell("segment_offsets", -1, 5), SEGMENTS),
    "segments start late": (cell("segment_offsets", 0, 1), SEGMENTS),
    "empty segment": (cell("segment_offsets", 1, 0), SEGMENTS),
    "segments backwards": (cell("segment_offsets", 2, 1), SEGMENTS),
    "no segments": (part("segment_offsets", lambda a: a[:0]), SEGMENTS),
    "segment adapter missing": (part("segment_adapters", lambda a: a[:-1]), SEGMENTS),
    "segment adapter too many": (part("segment_adapters", lambda a: np.append(a, i32(1))), SEGMENTS),
    "segment adapter exchanged": (cell("segment_adapters", 0, 1), SEGMENTS),
    "base segment under an adapter": (cell("segment_adapters", 2, 1), SEGMENTS),
    "segment boundary moved": (cell("segment_offsets", 1, 3), SEGMENTS),
    "grouped row twice": (cell("group_rows", 1, lambda _: 2), GROUPS),
    "grouped row missing": (part("group_rows", lambda a: a[:-1]), GROUPS),
    "grouped row negative": (cell("group_rows", 0, -1), GROUPS),
    "grouped row out of bounds": (cell("group_rows", 0, 8), GROUPS),
    "base row in a group": (cell("group_rows", 0, 6), GROUPS),
    "rows of two groups exchanged": (part("group_rows", lambda a: a[::-1].copy()), GROUPS),
    "group offsets start late": (cell("group_offsets", 0, 1), GROUPS),
    "group offsets end early": (cell("group_offsets", -1, 6), GROUPS),
    "empty group": (cell("group_offsets", 1, 0), GROUPS),
    "no group offsets": (part("group_offsets", lambda a: a[:0]), GROUPS),
    "group adapter missing": (part("group_adapters", lambda a: a[:-1]), GROUPS),
    "group of the base": (cell("group_adapters", 0, 0), GROUPS),
    "group of no adapter": (cell("group_adapters", 0, -1), GROUPS),
    "two groups of one adapter": (cell("group_adapters", 1, 1), GROUPS),
    "groups exchanged": (part("group_adapters", lambda a: a[[1, 0, 2]]), GROUPS),
    "group boundary moved": (cell("group_offsets", 1, 3), GROUPS),
    "logit row negative": (cell("logit_rows", 0, -1), SAMPLES),
    "logit row out of bounds": (cell("logit_rows", -1, 8), SAMPLES),
    "logit row twice": (cell("logit_rows", 1, lambda _: 1), SAMPLES),
    "logit rows out of order": (part("logit_rows", lambda a: a[::-1].copy()), SAMPLES),
    "sample without logits": (cell("samples", (0, "logit"), 9), SAMPLES),
    "sample of no request": (cell("samples", (0, "request"), 5), SAMPLES),
    "sample of another request": (cell("samples", (0, "request"), 0), SAMPLES),
    "sample of an inner row": (cell("samples", (0, "logit"), 1), SAMPLES),
    "sample twice": (part("samples", lambda a: a[[0, 1, 2, 3, 4, 4]]), SAMPLES),
    "samples in packed order": (part("samples", lambda a: a[[1, 0, 2, 3, 4]]), SAMPLES),
    "sampled position not the next": (cell("samples", (0, "position"), lambda v: v + 1), SAMPLES),
    "decode that samples nothing": (part("samples", lambda a: a[:-1]), SAMPLES),
    "scored row without logits": (cell("prompt_logprobs", (0, "logit"), 99), SAMPLES),
    "scored row of another request": (cell("prompt_logprobs", (0, "request"), 0), SAMPLES),
    "scored target beyond the vocabulary": (cell("prompt_logprobs", (0, "target"), 100), SAMPLES),
    "scored target negative": (cell("prompt_logprobs", (0, "target"), -1), SAMPLES),
    "scored count negative": (cell("prompt_logprobs", (0, "top"), -1), SAMPLES),
    "page delta of no slot": (cell("page_deltas", (0, "slot"), 8), PAGES),
    "page delta outside the table": (cell("page_deltas", (0, "index"), 8), PAGES),
    "page delta with the null page": (cell("page_deltas", (0, "page"), 0), PAGES),
    "page delta with a page beyond the pool": (cell("page_deltas", (0, "page"), 64), PAGES),
    "page for a request and a copy": (cell("page_deltas", (0, "page"), 20), PAGES),
    "copy to the null page": (cell("copy_pages", 0, 0), PAGES),
    "copy beyond the pool": (cell("copy_pages", 0, 64), PAGES),
    "copy to a page twice": (cell("copy_pages", 0, 21), PAGES),
    "copy with a page missing": (part("copy_pages", lambda a: a[:-1]), PAGES),
    "copy of one page more": (cell("copies", (0, "pages"), 3), PAGES),
    "copy to a block of a copied page": (cell("copy_pages", 2, 20), PAGES),
    "copy of a page where a block is copied": (cell("copy_pages", 1, 22), PAGES),
    "copy to a block twice": (cell("copies", (1, "block"), 3), PAGES),
    "copies to blocks of two sizes in a page": (cell("copies", (1, "size_class"), 3), PAGES),
    "copy to a block of no size": (cell("copies", (1, "size_class"), 7), PAGES),
    "copy to a block of negative size": (cell("copies", (1, "size_class"), -1), PAGES),
    "copy to a block beyond the page": (cell("copies", (2, "block"), 4), PAGES),
    "copy to a block before the page": (cell("copies", (1, "block"), -1), PAGES),
    "copy of two pages into a block": (cell("copies", (0, "size_class"), 1), PAGES),
    "copy of whole pages with a block": (cell("copies", (0, "block"), 1), PAGES),
    "block for a copy in a request's page": (cell("page_deltas", (0, "page"), 22), PAGES),
    "copy to the base's slot": (cell("copies", (0, "adapter_slot"), 0), SEGMENTS),
    "copy to no slot": (cell("copies", (0, "adapter_slot"), 6), SEGMENTS),
    "publication of the base": (cell("publishes", (0, "adapter_slot"), 0), SEGMENTS),
    "publication of no slot": (cell("publishes", (0, "adapter_slot"), 6), SEGMENTS),
    "retirement of the base": (cell("retires", (0, "adapter_slot"), 0), SEGMENTS),
    "retirement of no slot": (cell("retires", (0, "adapter_slot"), -1), SEGMENTS),
    "open of no slot": (cell("opens", (0, "slot"), 8), FORM),
    "open for ids beyond the vocabulary": (cell("opens", (0, "sampled_ids"), 101), FORM),
    "open for a negative number of ids": (cell("opens", (1, "sampled_ids"), -1), FORM),
    "slot opened twice": (cell("opens", (0, "slot"), 1), FORM),
    "bias missing": (part("open_bias", lambda a: a[:-1]), FORM),
    "history too long": (part("open_history", lambda a: np.append(a, i32(5))), FORM),
    "scrub of the null page": (cell("scrub_pages", 0, 0), PAGES),
    "scrub beyond the pool": (cell("scrub_pages", 0, 64), PAGES),
    "scrub of a block of the null page": (cell("scrub_blocks", (0, "page"), 0), PAGES),
    "scrub of a block beyond the pool": (cell("scrub_blocks", (0, "page"), 64), PAGES),
    "scrub of a block of a whole page's size": (cell("scrub_blocks", (0, "size_class"), 0), PAGES),
    "scrub of a block of no size": (cell("scrub_blocks", (0, "size_class"), 7), PAGES),
    "scrub of a block beyond its page": (cell("scrub_blocks", (1, "block"), 2), PAGES),
    "scrub of a block before its page": (cell("scrub_blocks", (1, "block"), -1), PAGES),
}  # fmt: skip


def test_the_unchanged_plan_is_accepted_after_a_round_trip() -> None:
    plan = valid()
    assert plan.group_rows.tolist() == [2, 3, 4, 5, 0, 1, 7]
    assert plan.group_offsets.tolist() == [0, 4, 6, 7]
    check_plan(BatchPlan.unpack(plan.pack()), BOUNDS)


@pytest.mark.parametrize("name", MALFORMED)
def test_one_changed_field_is_refused_with_its_code(name: str) -> None:
    change, code = MALFORMED[name]
    plan = change(valid())
    with pytest.raises(InternalFault) as caught:
        check_plan(plan, BOUNDS)
    assert caught.value.code is code, caught.value.message
    with pytest.raises(InternalFault) as caught:  # and on the other side of the boundary
        check_plan(BatchPlan.unpack(plan.pack()), BOUNDS)
    assert caught.value.code is code


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "cut": lambda b: b[:-4],
    "longer": lambda b: b + bytes(4),
    "magic": lambda b: b"\0\0\0\0" + b[4:],
    "version": lambda b: b[:4] + b"\x07\0\0\0" + b[8:],
    "words": lambda b: b[:8] + b"\x01\0\0\0" + b[12:],
    "sections": lambda b: b[:12] + b"\x02\0\0\0" + b[16:],
    "not whole words": lambda b: b[:-1],
    "an offset outside": lambda b: b[:36] + b"\xff\xff\xff\x7f" + b[40:],
    "rows negative": lambda b: b[:40] + b"\xff\xff\xff\xff" + b[44:],
}


@pytest.mark.parametrize("name", PACKED)
def test_bytes_that_are_no_plan_are_refused(name: str) -> None:
    with pytest.raises(InternalFault) as caught:
        BatchPlan.unpack(PACKED[name](valid().pack()))
    assert caught.value.code is ErrorCode.PLAN_MALFORMED


def test_there_are_more_cases_than_the_specification_has() -> None:
    count = len(MALFORMED) + len(PACKED)
    print(f"malformed plans refused: {count}")
    assert count > 46
