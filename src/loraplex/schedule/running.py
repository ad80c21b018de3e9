"""Running requests as struct-of-arrays with stable slots: what the planner reads and advances.

Each request has a planned and a committed KV frontier, each with its generation. Planning advances the first;
only a commit advances the second, and with it output, service and events. Owns the arrays and their
arithmetic; never talks to a backend and never decides who runs.

Specification: rulings "Frontiers and depth"; 0x01G (generation vector), 0x03A (rows of a request).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import PageDeltaColumns

Bools = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.int64]


NO_CACHE: Final = int(np.iinfo(np.int32).max)


class RunningTable:
    """State of up to `max_requests` running requests; every attribute is an array over slots.

    prompt: tokens of the caller's prompt. known: prompt plus committed output. target: tokens known at
    admission; rows below it are prefill. planned, committed: KV positions. planned_generation,
    committed_generation: one per advance. outputs_planned, outputs: sampled tokens, planned and committed.
    inflight: launched plans not yet committed that hold rows of the slot. reference: sample index of the
    slot's uncommitted token in plan reference_plan, or -1. stopping: takes no more rows; its slot is freed
    when nothing is in flight. order: arrival order, never reset. tokens: those known, [max_requests,
    max_tokens]; a row's memory is taken as it is written. plain: a token that it gets is sent and counted,
    nothing more, while it neither stops nor fills the output. published: leading blocks of the page table
    that need no publication any more; `NO_CACHE` for a request that caches nothing. block_table: number of
    the cached block whose page an entry names, 0 for a page of the request's own. invoked: position from
    which on the adapter acts, 0 for one that is always on. scored: prompt positions whose log probabilities
    were delivered. masked: each token needs a mask from the host; masked_first: so many first ones do.
    waiting: its masks depend on the token before, so that it takes no row while a token of it is not
    committed, at any depth.
    """

    def __init__(self, max_requests: int, max_pages: int, max_tokens: int) -> None:
        """max_requests: slots. max_pages: page-table entries of one request. max_tokens: prompt and output of
        one.
        """
        i32 = np.int32
        self.max_requests, self.max_pages = max_requests, max_pages
        self.active = np.zeros(max_requests, dtype=np.bool_)
        self.stopping = np.zeros(max_requests, dtype=np.bool_)
        self.order = np.zeros(max_requests, dtype=np.int64)
        self.incarnation = np.zeros(max_requests, dtype=i32)
        self.adapter_slot = np.zeros(max_requests, dtype=i32)
        self.adapter_generation = np.zeros(max_requests, dtype=i32)
        self.prompt = np.zeros(max_requests, dtype=i32)
        self.known = np.zeros(max_requests, dtype=i32)
        self.target = np.zeros(max_requests, dtype=i32)
        self.planned = np.zeros(max_requests, dtype=i32)
        self.committed = np.zeros(max_requests, dtype=i32)
        self.planned_generation = np.zeros(max_requests, dtype=i32)
        self.committed_generation = np.zeros(max_requests, dtype=i32)
        self.outputs_planned = np.zeros(max_requests, dtype=i32)
        self.outputs = np.zeros(max_requests, dtype=i32)
        self.max_outputs = np.zeros(max_requests, dtype=i32)
        self.last_token = np.zeros(max_requests, dtype=i32)
        self.reference = np.full(max_requests, -1, dtype=i32)
        self.reference_plan = np.zeros(max_requests, dtype=np.int64)
        self.inflight = np.zeros(max_requests, dtype=i32)
        self.pages = np.zeros(max_requests, dtype=i32)
        self.logprobs = np.full(max_requests, -1, dtype=i32)
        self.prompt_logprobs = np.full(max_requests, -1, dtype=i32)
        self.scored = np.zeros(max_requests, dtype=i32)
        self.masked = np.zeros(max_requests, dtype=np.bool_)
        self.masked_first = np.zeros(max_requests, dtype=i32)
        self.waiting = np.zeros(max_requests, dtype=np.bool_)
        self.plain = np.zeros(max_requests, dtype=np.bool_)
        self.published = np.full(max_requests, NO_CACHE, dtype=i32)
        self.invoked = np.zeros(max_requests, dtype=i32)
        self.block_table = np.zeros((max_requests, max_pages), dtype=np.int64)
        self.page_table = np.zeros((max_requests, max_pages), dtype=i32)
        self.tokens = np.empty((max_requests, max_tokens), dtype=i32)
        self._free = list(range(max_requests - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def open(self, tokens: I32, prompt: int, max_outputs: int, order: int, kv_start: int = 0) -> int:
        """Take a slot for a request with `tokens` known, the first `prompt` of them its prompt.

        kv_start: positions whose rows are cached. Returns the slot, at a fresh incarnation; frontiers start
        there.
        """
        if not self._free:
            raise InternalFault(
                ErrorCode.PLAN_ROW_COVERAGE, f"all {self.max_requests} request slots are taken"
            )
        slot = self._free.pop()
        known = int(tokens.size)
        self.tokens[slot, :known] = tokens
        self.incarnation[slot] += 1
        self.active[slot] = True
        self.stopping[slot] = False
        self.order[slot] = order
        self.prompt[slot], self.known[slot], self.target[slot] = prompt, known, known
        self.planned[slot] = self.committed[slot] = kv_start
        self.planned_generation[slot] = self.committed_generation[slot] = 0
        self.outputs[slot] = self.outputs_planned[slot] = known - prompt
        self.max_outputs[slot] = max_outputs
        self.last_token[slot] = tokens[-1]
        self.reference[slot] = -1
        self.inflight[slot] = 0
        self.pages[slot] = 0
        self.adapter_slot[slot] = self.adapter_generation[slot] = 0
        self.logprobs[slot] = self.prompt_logprobs[slot] = -1
        self.scored[slot] = 0
        self.masked[slot] = self.waiting[slot] = self.plain[slot] = False
        self.masked_first[slot] = 0
        self.published[slot], self.invoked[slot] = NO_CACHE, 0
        return slot

    def close(self, slot: int) -> None:
        """Free a slot that has nothing in flight."""
        if not self.active[slot] or self.inflight[slot]:
            raise InternalFault(
                ErrorCode.PLAN_ROW_COVERAGE,
                f"request slot {slot} closed with {self.inflight[slot]} plans in flight",
            )
        self.active[slot] = False
        self.pages[slot] = 0
        self._free.append(slot)

    def add_pages(self, slot: int, pages: I32) -> PageDeltaColumns:
        """Append pages to the slot's table; returns the page deltas that tell a backend."""
        start, count = int(self.pages[slot]), int(pages.size)
        if start + count > self.max_pages:
            raise InternalFault(
                ErrorCode.PLAN_PAGE_TABLE, f"request slot {slot} needs over {self.max_pages} pages"
            )
        self.page_table[slot, start : start + count] = pages
        self.block_table[slot, start : start + count] = 0
        self.pages[slot] = start + count
        return PageDeltaColumns.filled(count, slot=slot, index=np.arange(start, start + count), page=pages)

    def add_pages_each(self, slots: Slots, counts: I32, pages: I32) -> PageDeltaColumns:
        """`add_pages` for many slots. counts [n] >= 1: pages of each; pages [sum]: slot after slot."""
        starts = self.pages[slots]
        if (starts + counts > self.max_pages).any():
            raise InternalFault(ErrorCode.PLAN_PAGE_TABLE, f"a request needs over {self.max_pages} pages")
        owners = np.repeat(slots, counts)
        ends = np.cumsum(counts)
        indices = np.arange(pages.size) + np.repeat(starts - (ends - counts), counts)
        self.page_table[owners, indices] = pages
        self.block_table[owners, indices] = 0
        self.pages[slots] += counts
        return PageDeltaColumns.filled(pages.size, slot=owners, index=indices, page=pages)

    def own_pages(self, slot: int) -> I32:
        """Pages of the slot that are no cached block's, in position order."""
        count = int(self.pages[slot])
        return np.asarray(self.page_table[slot, :count][self.block_table[slot, :count] == 0])

    def note_blocks(self, slots: Slots, indices: Slots, numbers: Slots) -> None:
        """From here on these entries of page tables name pages of cached blocks."""
        self.block_table[slots, indices] = numbers

    def pages_each(self, slots: I32) -> tuple[I32, I32, Slots]:
        """Pages of many slots, slot after slot, the slot that names each, and the cached block that owns it
        or 0.
        """
        counts = self.pages[slots]
        owners = np.repeat(slots, counts)
        ends = np.cumsum(counts)
        indices = np.arange(owners.size) - np.repeat(ends - counts, counts)
        return self.page_table[owners, indices], owners, self.block_table[owners, indices]

    def known_tokens(self, slot: int) -> I32:
        """Prompt and committed output of the slot."""
        return self.tokens[slot, : self.known[slot]].copy()

    def runnable(self) -> Slots:
        """Slots that may take rows now, oldest first."""
        ready = self.active & ~self.stopping & (self.outputs_planned < self.max_outputs)
        ready &= self.known + (self.outputs_planned - self.outputs) > self.planned
        ready &= ~self.waiting | (self.outputs_planned == self.outputs)
        slots = np.flatnonzero(ready)
        return slots[np.argsort(self.order[slots], kind="stable")]

    def remaining(self, slots: Slots) -> I32:
        """Rows that each slot could take: tokens known or in flight beyond its planned frontier."""
        return np.asarray(
            self.known[slots] + self.outputs_planned[slots] - self.outputs[slots] - self.planned[slots]
        )

    def decoding(self, slots: Slots) -> Bools:
        """Whether each slot is past its prefill."""
        return np.asarray(self.planned[slots] >= self.target[slots])

    def masking(self, slots: Slots) -> Bools:
        """Whether the next token of each slot needs a mask."""
        return np.asarray(self.masked[slots] | (self.outputs_planned[slots] < self.masked_first[slots]))

    def last_outputs(self, slot: int, count: int) -> I32:
        """The last `count` tokens of the slot's committed output, fewer where it has fewer."""
        known = int(self.known[slot])
        return self.tokens[slot, max(int(self.prompt[slot]), known - count) : known]

    def acting(self, slots: Slots | I32) -> tuple[I32, I32]:
        """Adapter slot and generation under which each slot's next rows run: the base's before an
        invocation.
        """
        acts = self.planned[slots] >= self.invoked[slots]
        return self.adapter_slot[slots] * acts, self.adapter_generation[slots] * acts

    def advance_planned(self, slots: Slots, rows: I32, samples: Bools) -> None:
        """Move planned frontiers by `rows`; `samples` marks slots whose last row samples a token."""
        self.planned[slots] += rows
        self.planned_generation[slots] += 1
        self.outputs_planned[slots] += samples
        self.inflight[slots] += 1

    def note_samples(self, slots: Slots, samplers: Slots, plan: int) -> None:
        """Record where `plan`, which holds rows of `slots`, leaves the tokens of `samplers` (in sample
        order).
        """
        self.reference[slots] = -1
        self.reference[samplers] = np.arange(samplers.size, dtype=np.int32)
        self.reference_plan[samplers] = plan

    def forget_references(self, plan: int) -> None:
        """Tokens of `plan` are known, or never will be: nothing refers to it any more."""
        self.reference[self.reference_plan == plan] = -1

    def rollback_planned(self, slots: Slots, rows: I32, samples: Bools) -> None:
        """Undo `advance_planned` for a plan that was not executed."""
        self.planned[slots] -= rows
        self.planned_generation[slots] -= 1
        self.outputs_planned[slots] -= samples
        self.inflight[slots] -= 1

    def commit(self, slots: Slots, rows: I32) -> None:
        """Move committed frontiers by `rows`; tokens are committed by `commit_tokens`."""
        self.committed[slots] += rows
        self.committed_generation[slots] += 1
        self.inflight[slots] -= 1

    def commit_tokens(self, slots: Slots, tokens: I32) -> None:
        """Append one sampled token to each slot."""
        self.tokens[slots, self.known[slots]] = tokens
        self.last_token[slots] = tokens
        self.known[slots] += 1
        self.outputs[slots] += 1
