"""Static device buffers of a step: one copy brings the packed plan, kernels make the rest from it.

Owns the device's page tables, the staging buffers and what `unpack_kernel` writes. Two host buffers take
turns, so that plan n + 1 may be written while the copy of plan n has not run yet. Buffers never move:
captured steps hold their addresses. Specification: rulings "The plan", "Frontiers and depth".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32, empty
from loraplex.core.plan import BatchPlan, BiasColumns, BlockColumns, OpenColumns, PageDeltaColumns
from loraplex.core.plan_check import PlanBounds
from loraplex.model.cuda import kernels

STAGED_WORDS: Final = 1 << 20
"""Words of a staged plan; one that has more leaves behind what no kernel reads."""
ROW_BLOCK: Final = 1024
DELTA_BLOCK: Final = 256
DELTA_PROGRAMS: Final = 32


@dataclass(frozen=True, slots=True)
class KvLengths:
    """Page counts of a step's requests, as the attention's planning on the host wants them.

    indptr: int32 [R + 1], where each request's pages begin in the index buffer. last: int32 [R], positions in
    its last page. totals: int32 [R], positions in all.
    """

    indptr: I32
    last: I32
    totals: I32

    @staticmethod
    def of(plan: BatchPlan, page_tokens: int, padded: int = 0) -> KvLengths:
        """Lengths after the plan's rows. padded: at least so many requests, those beyond the plan's one
        position long.
        """
        count = len(plan.requests)
        totals = np.ones(max(count, padded), dtype=np.int32)
        totals[:count] = plan.requests.kv_end
        pages = -(-totals // page_tokens)
        indptr = np.zeros(totals.size + 1, dtype=np.int32)
        np.cumsum(pages, out=indptr[1:])
        return KvLengths(indptr, totals - (pages - 1) * page_tokens, totals)

    @staticmethod
    def padding(count: int) -> KvLengths:
        """`count` requests of one position on the null page."""
        ones = np.ones(count, dtype=np.int32)
        return KvLengths(np.arange(count + 1, dtype=np.int32), ones, ones)


class StepInputs:
    """Buffers for plans of at most `rows` rows under `bounds`; page_tokens: positions in a KV page.

    answers: what the host is told: `sampled` [max requests], tokens of the newest plan that sampled, then
    `finite`, for each logit row whether it is.
    """

    def __init__(self, bounds: PlanBounds, rows: int, page_tokens: int, device: torch.device) -> None:
        self.bounds, self.rows, self.page_tokens, self.device = bounds, rows, page_tokens, device
        requests = bounds.max_requests

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._head = -(-(requests + 1) // 16) * 16
        pinned = device.type == "cuda"
        words = self._head + STAGED_WORDS
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._staged = ints(words)
        self.tables = ints(requests, bounds.max_pages_per_request)
        self.tokens, self.positions, self.pages = ints(rows), ints(rows), ints(rows)
        self.indices = ints(requests * bounds.max_pages_per_request)
        self.answers = ints(requests + max(rows, requests))
        self.sampled, self.finite = self.answers[:requests], self.answers[requests:]
        self._stale: set[int] = set()

    @property
    def kv_indptr(self) -> torch.Tensor:
        """int32 [max requests + 1]: where each request's pages begin in `indices`."""
        return self._staged[: self.bounds.max_requests + 1]

    @property
    def words(self) -> torch.Tensor:
        """The packed plan on the device."""
        return self._staged[self._head :]

    def send(self, plan: BatchPlan, packed: bytes, lengths: KvLengths, tables: I32) -> None:
        """Bring a plan to the device, then its page deltas into the tables; enqueued on the current stream.

        tables [R, entries]: host page tables of its requests, for those whose device copy is not known to be
        right. Raises `operator_plan_unsupported` for more rows than there is room for.
        """
        if plan.rows > self.rows or lengths.totals.size > self.bounds.max_requests:
            raise InternalFault(
                ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
                f"a plan of {plan.rows} rows and {len(plan.requests)} requests, there is room for "
                f"{self.rows} and "
                f"{self.bounds.max_requests}",
            )
        words = np.frombuffer(packed, dtype=np.int32)
        if words.size > STAGED_WORDS:
            words = self._shortened(plan)
        host = self._host[self._turn]
        self._turn ^= 1
        target = host.numpy()
        target[: lengths.indptr.size] = lengths.indptr
        used = self._head + words.size
        target[self._head : used] = words
        self._staged[:used].copy_(host[:used], non_blocking=True)
        if len(plan.page_deltas):
            kernels.deltas_kernel[(DELTA_PROGRAMS,)](
                self.words, self.tables, self.bounds.max_pages_per_request, BLOCK=DELTA_BLOCK
            )
        if self._stale:
            self._refresh(plan.requests.slot, tables)

    def unpack(self, requests: int, *, decode_first: bool = False) -> None:
        """Fill tokens, positions, pages and indices; `requests` programs, a decode bucket's padding included.

        decode_first: decode rows before prefill rows, unlike the plan; padding is `pad`'s then.
        """
        kernels.unpack_kernel[(requests,)](
            self.words,
            self.tables,
            self.sampled,
            self.kv_indptr,
            self.tokens,
            self.positions,
            self.pages,
            self.indices,
            self.bounds.max_pages_per_request,
            PAGE_TOKENS=self.page_tokens,
            DECODE_FIRST=decode_first,
            BLOCK=ROW_BLOCK,
        )

    def pad(self, rows: int) -> None:
        """Rows beyond the plan's, up to `rows`, become padding on the null page; after `unpack`."""
        kernels.pad_kernel[(-(-rows // ROW_BLOCK),)](
            self.words, self.tokens, self.positions, self.pages, UPTO=rows, BLOCK=ROW_BLOCK
        )

    def forget(self, slots: I32) -> None:
        """The device's page tables of these slots may be wrong: they are sent again when a plan next uses
        them.
        """
        self._stale.update(slots.tolist())

    def _refresh(self, slots: I32, tables: I32) -> None:
        for row in np.flatnonzero(np.isin(slots, list(self._stale))).tolist():
            self._upload(int(slots[row]), tables[row])
            self._stale.discard(int(slots[row]))

    def _upload(self, slot: int, entries: I32) -> None:
        source = torch.from_numpy(np.ascontiguousarray(entries))
        if self.device.type == "cuda":
            source = source.pin_memory()
        self.tables[slot, : entries.size].copy_(source, non_blocking=True)

    def _shortened(self, plan: BatchPlan) -> I32:
        """The plan's words without what stays on the host: sampling state, and as a last resort the page
        deltas.
        """
        short = replace(
            plan,
            opens=OpenColumns.none(),
            open_bias=BiasColumns.none(),
            open_history=empty(),
            copy_pages=empty(),
            scrub_blocks=BlockColumns.none(),
            mask_samples=empty(),
            mask_words=empty(),
        )
        words = np.frombuffer(short.pack(), dtype=np.int32)
        if words.size > STAGED_WORDS:
            self.forget(np.unique(plan.page_deltas.slot))
            words = np.frombuffer(replace(short, page_deltas=PageDeltaColumns.none()).pack(), dtype=np.int32)
        if words.size > STAGED_WORDS:
            raise InternalFault(
                ErrorCode.OPERATOR_PLAN_UNSUPPORTED,
                f"a plan of {words.size} words, there is room for {STAGED_WORDS}",
            )
        return words
