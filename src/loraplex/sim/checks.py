"""Checkers that watch one engine from outside: its plans, its events and the ledger of its pages.

They keep books of their own, from plans, results, events and what clients asked, and compare. Nothing here is
used by the code under test, and no check of that code is relied on: the simulator's own tests switch those
off and break the engine in each way in turn.

Specification: 0x04C, 0x04F, 0x05A, 0x05E, 0x07H, 0x09A; rulings "Tests" (checkers outside the tested code).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loraplex.core.events import (
    AdapterTransition,
    Event,
    FirstToken,
    IterationCompleted,
    PlanDiscarded,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
)
from loraplex.core.packed import each
from loraplex.core.plan import BatchPlan, StepResult, adapter_pairs
from loraplex.engine.request_state import Stage
from loraplex.engine.state import EngineState
from loraplex.ops.ledger import IterationLedger, iteration_ledger
from loraplex.sim.clients import Ask, Clients
from loraplex.sim.device import BUILT_ON_FAILURE, INJECTED, cells_of
from loraplex.sim.faults import Setup
from loraplex.sim.histories import Histories
from loraplex.sim.page_ledger import block_ledger, page_ledger
from loraplex.sim.service_books import ServiceBooks
from loraplex.sim.tokens import adapter_number
from loraplex.sim.wrong import Wrong

EDGES: Final = {
    "absent": {"host_ready"},
    "host_ready": {"reserved", "absent"},
    "reserved": {"loading", "host_ready"},
    "loading": {"validated", "host_ready"},
    "validated": {"published", "host_ready"},
    "published": {"active", "idle", "retiring"},
    "active": {"idle", "retiring"},
    "idle": {"active", "retiring"},
    "retiring": {"host_ready", "absent"},
}
"""0x04C's edges with the additions of rulings "Residency", written down a second time on purpose."""


class Checkers:
    """Books about one engine and its device. A restart of the replica starts new ones."""

    def __init__(self, setup: Setup, clients: Clients, state: EngineState) -> None:
        self._setup, self._clients, self._state = setup, clients, state
        self._generation = 0
        self._image_of: dict[tuple[int, int], int] = {}
        self._cells_of: dict[tuple[int, int], frozenset[int]] = {}
        self._whole: set[tuple[int, int]] = set()
        self._published: dict[int, int] = {}
        self._table: dict[int, dict[int, int]] = {}
        self._service = ServiceBooks(clients)
        self._histories = Histories(setup, clients, state, self._table)
        self._named: dict[int, frozenset[int]] = {}
        self._ledgers: dict[int, IterationLedger] = {}
        self._adapter_state: dict[str, str] = {}
        self._arrivals: dict[str, int] = {}
        self._admitted: set[str] = set()
        self._late: set[str] = set()

    # ------------------------------------------------------------ plans

    def on_plan(self, plan: BatchPlan) -> None:
        """A plan is about to be launched."""
        if plan.generation != self._generation + 1:
            raise Wrong("launch_order", f"plan {plan.generation} followed plan {self._generation}")
        self._generation = plan.generation
        self._note_deltas(plan)
        named: set[int] = set()
        written: set[int] = set()
        tokens = self._setup.limits.kv.page_tokens
        requests = plan.requests
        for slot, adapter, generation, start, end in each(
            requests.slot,
            requests.adapter_slot,
            requests.adapter_generation,
            requests.kv_start,
            requests.kv_end,
        ):
            self._check_binding(slot, adapter, generation, start, end)
            table = self._table.get(slot, {})
            last = (end - 1) // tokens
            pages = [table.get(index, 0) for index in range(last + 1)]
            if 0 in pages:
                raise Wrong("one_owner", f"request slot {slot} has rows without a page")
            cells = set(cells_of(np.array(pages), tokens).tolist())
            own = set(cells_of(np.array(pages[start // tokens :]), tokens).tolist())
            if not named.isdisjoint(own) or not written.isdisjoint(cells):
                raise Wrong(
                    "one_owner", f"request slot {slot} shares a page that is written with another request"
                )
            named |= cells
            written |= own
            if adapter:
                held = self._cells_of[adapter, generation]
                if not held.isdisjoint(cells):
                    raise Wrong("one_owner", f"request slot {slot} has KV in its own adapter's pages")
        for adapter, generation in {(a, g) for a, g in adapter_pairs(plan.requests) if a}:
            if not named.isdisjoint(self._cells_of[adapter, generation]):
                raise Wrong("one_owner", f"KV lies in pages of adapter slot {adapter}")
        for adapter, generation in {(a, g) for a, g in adapter_pairs(plan.requests) if a}:
            named |= self._cells_of[adapter, generation]
        self._histories.on_plan(plan)
        self._service.on_plan(plan, {slot: r.request_id for slot, r in self._state.by_slot.items()})
        self._check_copies(plan, named)
        self._named[plan.generation] = frozenset(named)
        self._ledgers[plan.generation] = iteration_ledger(plan, self._state.rank_sums.astype(np.int32))

    def _note_deltas(self, plan: BatchPlan) -> None:
        for slot in plan.opens.slot.tolist():
            self._table[slot] = {}
        deltas = plan.page_deltas
        for slot, index, page in each(deltas.slot, deltas.index, deltas.page):
            self._table.setdefault(slot, {})[index] = page
        for slot, generation in adapter_pairs(plan.publishes):
            if (slot, generation) not in self._whole:
                raise Wrong("publication", f"slot {slot}@{generation} is published before its copy is whole")
            self._published[slot] = generation
        for slot, generation in adapter_pairs(plan.retires):
            if self._published.get(slot) == generation:
                del self._published[slot]

    def _check_binding(self, slot: int, adapter: int, generation: int, start: int, end: int) -> None:
        record = self._state.by_slot.get(slot)
        ask = self._clients.live.get(record.request_id) if record is not None else None
        if ask is None:
            raise Wrong("ends_once", f"request slot {slot} has rows but no open request")
        if start < ask.invoked_at < end:
            raise Wrong(
                "activation", f"{ask.request_id} is invoked at {ask.invoked_at}, inside rows {start} to {end}"
            )
        if bool(adapter) != (ask.image is not None and start >= ask.invoked_at):
            raise Wrong("activation", f"{ask.request_id} runs adapter slot {adapter} at position {start}")
        if not adapter:
            return
        if self._published.get(adapter) != generation:
            raise Wrong(
                "stale_generation", f"{ask.request_id} runs slot {adapter}@{generation}, not published"
            )
        number = self._image_of[adapter, generation]
        if ask.image is None or ask.image.number != number:
            raise Wrong("revision_lease", f"{ask.request_id} runs another revision than it leased")

    def _check_copies(self, plan: BatchPlan, named: set[int]) -> None:
        """Bytes may land at once: nothing that may still run names those pages, and nobody else owns them."""
        copies, offset = plan.copies, 0
        places = each(
            copies.adapter_slot, copies.adapter_generation, copies.pages, copies.size_class, copies.block
        )
        for digest, (slot, generation, count, size_class, block) in zip(copies.digest, places, strict=True):
            pages = plan.copy_pages[offset : offset + count]
            cells = frozenset(cells_of(pages, self._setup.limits.kv.page_tokens, size_class, block).tolist())
            offset += count
            self._image_of[slot, generation] = adapter_number(digest)
            self._cells_of[slot, generation] = cells
            self._whole.discard((slot, generation))
            if not cells.isdisjoint(named):
                raise Wrong("one_owner", f"a copy into slot {slot} lands in pages that this plan names")
            for other, at in self._published.items():
                if not cells.isdisjoint(self._cells_of[other, at]):
                    raise Wrong("one_owner", f"a copy into slot {slot} lands in published slot {other}")
            if not self._setup.limits.copies_on_compute_stream:
                for number, pages_named in self._named.items():
                    if not cells.isdisjoint(pages_named):
                        raise Wrong("late_write", f"a copy lands in pages that plan {number} still names")

    def on_result(self, result: StepResult) -> None:
        """A result was collected."""
        self._named.pop(result.generation, None)
        self._histories.on_result(result)
        self._service.on_result(result)
        copied = result.copied
        for slot, generation, whole in each(copied.adapter_slot, copied.adapter_generation, copied.intact):
            if whole:
                self._whole.add((slot, generation))

    # ------------------------------------------------------------ events

    def on_event(self, event: Event) -> None:
        """An event left the engine."""
        self._service.on_event(event)
        match event:
            case RequestQueued():
                self._arrivals[event.request_id] = len(self._arrivals)
            case RequestAdmitted():
                self._check_clock(event.request_id, event.at_ns - event.wait_ns)
                self._count_overtaking(event.request_id)
            case FirstToken():
                self._check_clock(event.request_id, event.at_ns - event.since_arrival_ns)
            case RequestFinished():
                self._check_clock(event.request_id, event.at_ns - event.since_arrival_ns)
            case AdapterTransition():
                before = self._adapter_state.get(event.adapter, "absent")
                if event.before != before or event.after not in EDGES[before]:
                    raise Wrong(
                        "residency", f"an adapter went {event.before} -> {event.after}, it was {before}"
                    )
                self._adapter_state[event.adapter] = event.after
                if event.after == "retiring" and self._clients.names.pinned(event.adapter):
                    raise Wrong("pins", f"pinned adapter {event.adapter[:12]} is taken off the device")
            case IterationCompleted():
                self._check_figures(event)
            case PlanDiscarded():
                if event.message not in (INJECTED, BUILT_ON_FAILURE):
                    raise Wrong("discards", f"plan {event.step} was refused {event.code}: {event.message}")
            case _:
                pass

    def _check_figures(self, event: IterationCompleted) -> None:
        """What an iteration reports is what its plan amounts to (0x03F)."""
        ledger = self._ledgers[event.step]
        self._ledgers = {step: later for step, later in self._ledgers.items() if step > event.step}
        rank_rows = sum(rank * rows for rank, rows in ledger.all.ranks.items())
        expected = (ledger.runs_before, ledger.runs_after, ledger.all.adapters, rank_rows)
        seen = (event.runs_before, event.runs, event.distinct_adapters, event.rank_rows)
        if seen != expected:
            raise Wrong("figures", f"iteration {event.step} reports {seen}, its plan amounts to {expected}")

    def _check_clock(self, request_id: str, arrival_ns: int) -> None:
        """Every figure of a request counts from the one arrival that its client sent."""
        ask = self._clients.live.get(request_id) or self._clients.recent.get(request_id)
        if ask is None:
            raise Wrong("ends_once", f"an event names {request_id}, which nobody sent")
        if ask.arrival_ns != arrival_ns:
            raise Wrong(
                "arrival", f"{request_id} arrived at {ask.arrival_ns}, an event counts from {arrival_ns}"
            )

    def _count_overtaking(self, request_id: str) -> None:
        """Hold the policy to its bound, by tenant: who was let in before an older one that could have been
        chosen. Those whose loads had begun come on top. Four times the bound: since loads go ahead, seeds
        1323 and 1000 overtake an older request a little more often than policy and places explain.
        """
        ask = self._clients.live.get(request_id)
        if ask is None or request_id in self._admitted:
            return
        self._admitted.add(request_id)
        bound = 4 * (self._setup.limits.policy.bound + self._setup.limits.max_requests)
        if ask.deadline_ns:
            return  # it may have been urgent
        for other in self._clients.live.values():
            older = other.order < ask.order and other.request_id not in self._admitted
            if older and other.tenant == ask.tenant and other.priority <= ask.priority and self._free(other):
                other.overtaken += 1
                if other.overtaken > bound:
                    raise Wrong("starvation", f"{other.request_id} was overtaken {other.overtaken} times")

    def _free(self, ask: Ask) -> bool:
        """Whether a waiting request could be chosen: nothing is under way that it waits for."""
        record = self._state.records.get(ask.request_id)
        if record is None or record.stage is not Stage.WAITING:
            return False
        if self._state.queue.parked_for(ask.request_id) is not None:
            return False
        entry = record.entry
        return entry is None or entry.retry_at_ns <= self._state.clock.now_ns()

    def _check_deadlines(self) -> None:
        """Nobody waits for a first token through a whole step after his deadline."""
        late, now = set(), self._state.clock.now_ns()
        for ask in self._clients.live.values():
            record = self._state.records.get(ask.request_id)
            if 0 < ask.deadline_ns < now and record is not None and record.slot < 0 and not ask.tokens:
                late.add(ask.request_id)
        if not late.isdisjoint(self._late):
            raise Wrong("deadline", f"{sorted(late & self._late)} still wait after their deadlines")
        self._late = late

    # ------------------------------------------------------------ after each step

    def after_step(self) -> None:
        """Every page is in exactly one place, and the pool's own states say so too."""
        owners = page_ledger(self._state)
        count = owners.size
        if np.bincount(owners, minlength=self._setup.limits.num_pages)[1:].max(initial=0) > 1:
            raise Wrong("one_owner", f"a page has two owners: {sorted(owners.tolist())}")
        if count != self._setup.limits.num_pages - 1 or (count and int(owners.min()) < 1):
            raise Wrong(
                "conservation",
                f"{count} pages are accounted for, the pool has {self._setup.limits.num_pages - 1}",
            )
        self._check_blocks()
        self._check_deadlines()
        self._histories.after_step()

    def _check_blocks(self) -> None:
        """Every block of every slab page is in exactly one place, and all blocks of a page have one size."""
        blocks = block_ledger(self._state)
        if len(set(blocks)) != len(blocks):
            raise Wrong("one_owner", f"a block has two owners: {sorted(blocks)}")
        room: dict[int, set[int]] = {}
        for page, size_class, _ in blocks:
            room.setdefault(page, set()).add(size_class)
        expected = sum(1 << min(classes) for classes in room.values())
        pages = set(self._state.pool.slabs.slab_pages())
        if room.keys() != pages or len(blocks) != expected or any(len(c) > 1 for c in room.values()):
            raise Wrong(
                "conservation", f"{len(blocks)} blocks of {expected} are accounted for in {sorted(pages)}"
            )

    def at_end(self) -> None:
        """Everything finished: nothing is left behind."""
        state, clients = self._state, self._clients
        if clients.live or state.records or state.by_slot:
            raise Wrong("liveness", f"requests are left: {sorted(clients.live)}, {sorted(state.records)}")
        if clients.names.open_calls:
            raise Wrong("liveness", f"calls are left without an answer: {clients.names.open_calls}")
        resident = sum(int(entry.pages.size) for entry in state.adapters.values())
        slabs = state.pool.slabs.pages
        if state.prefix.unreferenced != len(state.prefix):
            raise Wrong(
                "leases", f"{len(state.prefix) - state.prefix.unreferenced} cached blocks are still read"
            )
        if state.pool.free + resident + slabs + len(state.prefix) != state.pool.usable:
            raise Wrong(
                "conservation",
                f"{state.pool.free} free, {resident} adapter, {slabs} slab and {len(state.prefix)} cached "
                "pages of "
                f"{state.pool.usable}",
            )
        for entry in state.adapters.values():
            if entry.refcount or entry.revision_leases or entry.inflight_events:
                raise Wrong("leases", f"adapter {entry.key[:12]} is still held: {entry}")
