"""The backend's mirror of request state: incarnation, frontier generation, KV length and page table of each
slot.

A plan names what it expects of each slot; whatever differs refuses the whole plan before anything runs.
Changes are a transaction: `step` applies a plan's opens and page deltas, checks the plan against the outcome,
and either the step succeeds and the frontiers move, or every mirror is as it was. Never chooses a page or a
slot.

Specification: 0x01G (generations are a vector), 0x06E; rulings "Frontiers and depth".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import BatchPlan
from loraplex.core.plan_check import PlanBounds

I64 = npt.NDArray[np.int64]


class RequestMirrors:
    """Arrays over request slots. pages [slots, entries]: page table, 0 where there is no page.

    kv: positions that hold KV; an open says how many of them others computed (a prefix hit starts behind its
    shared pages).
    """

    def __init__(self, bounds: PlanBounds, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.incarnation = np.zeros(bounds.max_requests, dtype=np.int32)
        self.frontier = np.zeros(bounds.max_requests, dtype=np.int32)
        self.kv = np.zeros(bounds.max_requests, dtype=np.int32)
        self.pages = np.zeros((bounds.max_requests, bounds.max_pages_per_request), dtype=np.int32)
        self._used = 0

    @contextmanager
    def step(self, plan: BatchPlan) -> Iterator[I32]:
        """The page-table rows [R, entries] of the plan's requests, as long as they need; the body runs the
        plan.

        Raises `stale_request_generation`, `stale_kv_frontier` or `plan_page_table` where plan and mirrors
        disagree. An exception, from here or from the body, leaves the mirrors as they were.
        """
        touched = np.unique(np.concatenate([plan.opens.slot, plan.page_deltas.slot]))
        self._used = max(self._used, int(plan.page_deltas.index.max(initial=-1)) + 1)
        # Entries beyond those that any plan ever wrote are 0: long page tables cost what is used of them.
        pages = self.pages[:, : self._used]
        saved = [
            (array, array[touched].copy()) for array in (self.incarnation, self.frontier, self.kv, pages)
        ]
        try:
            self._apply(plan)
            self._check(plan)
            tables = self.pages[:, : self._width(plan)][plan.requests.slot]
            self._check_pages(plan, tables)
            yield tables
        except BaseException:
            for array, values in saved:
                array[touched] = values
            raise
        slots = plan.requests.slot
        self.frontier[slots] += 1
        self.kv[slots] = plan.requests.kv_end

    def _width(self, plan: BatchPlan) -> int:
        """Entries of the longest page table after the plan's rows, at least one."""
        end = int(plan.requests.kv_end.max(initial=1))
        return max(-(-end // self.page_tokens), 1)

    def _apply(self, plan: BatchPlan) -> None:
        opened = plan.opens.slot
        self.incarnation[opened] = plan.opens.incarnation
        self.frontier[opened] = 0
        self.kv[opened] = plan.opens.kv_start
        self.pages[opened, : self._used] = 0
        self.pages[plan.page_deltas.slot, plan.page_deltas.index] = plan.page_deltas.page

    def _check(self, plan: BatchPlan) -> None:
        slots = plan.requests.slot
        expected = (
            (
                "incarnation",
                self.incarnation[slots],
                plan.requests.incarnation,
                ErrorCode.STALE_REQUEST_GENERATION,
            ),
            (
                "frontier generation",
                self.frontier[slots],
                plan.requests.frontier,
                ErrorCode.STALE_KV_FRONTIER,
            ),
            (
                "KV length",
                self.kv[slots],
                plan.requests.kv_start,
                ErrorCode.STALE_KV_FRONTIER,
            ),
        )
        for name, current, planned, code in expected:
            wrong = np.flatnonzero(current != planned)
            if wrong.size:
                at = int(wrong[0])
                raise InternalFault(
                    code,
                    f"request slot {int(slots[at])} has {name} {int(current[at])}, plan says "
                    f"{int(planned[at])}",
                )

    def _check_pages(self, plan: BatchPlan, tables: I32) -> None:
        """Every position up to a request's last row has a page, and every written page has one writer."""
        code = ErrorCode.PLAN_PAGE_TABLE
        start, end = plan.requests.kv_start, plan.requests.kv_end
        needed = -(-end // self.page_tokens)
        if needed.size and int(needed.max()) > tables.shape[1]:
            raise InternalFault(
                code, f"{int(end.max())} positions exceed a page table of {tables.shape[1]} entries"
            )
        entry = np.arange(tables.shape[1])[None, :]
        used = entry < needed[:, None]
        lacking = np.flatnonzero((used & (tables == 0)).any(axis=1))
        if lacking.size:
            slot = int(plan.requests.slot[lacking[0]])
            raise InternalFault(
                code, f"request slot {slot} lacks a page for one of its {int(end[lacking[0]])} positions"
            )
        written = tables[used & (entry >= (start // self.page_tokens)[:, None])]
        if np.unique(written).size != written.size:
            raise InternalFault(code, "two requests write to one page")
        scrubbed = np.concatenate([plan.scrub_pages, plan.scrub_blocks.page])
        foreign = np.concatenate([plan.copy_pages, scrubbed[~np.isin(scrubbed, plan.page_deltas.page)]])
        if foreign.size and np.isin(tables[used], foreign).any():
            raise InternalFault(
                code, "a page that this step copies to or scrubs holds KV of one of its requests"
            )
