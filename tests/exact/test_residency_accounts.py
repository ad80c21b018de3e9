"""0x04D, 0x05B, 0x05C, 0x05F and 0x09L through the shipping page pool, transactions and engine.

Slots 0..15 of the specification are pages 1..16 of ours: page 0 is the null page. The specification gives
sizes, ownership before and after, and the victim; ours are the touch order of the adapters, the slot
generations before the fixture (b at 3, so that its restoration is b@5), and in 0x09L the make-up of the three
reserved pages (two of D, one of d0's KV).
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine.rig import Rig

from loraplex.core.events import AdapterTransition, IterationCompleted, LoadFailed, RequestAdmitted
from loraplex.core.ids import Module
from loraplex.core.layout import Factor, Geometry, KvShape, ModuleShape, PageGeometry, page_demand
from loraplex.core.messages import SetLimits
from loraplex.core.plan import adapter_pairs
from loraplex.engine.deltas import digest_words
from loraplex.memory import eviction
from loraplex.memory.eviction import Candidate, PageClass
from loraplex.memory.leases import RevisionLease, SlotLease
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.residency import AdapterEntry, AdapterState, SlotDirectory
from loraplex.memory.transaction import Demand, Transaction, TransactionState, admissible
from loraplex.sim.tokens import adapter_number

H, LAYERS, BYTES = 8, 2, 2
QKVO = (Module.Q, Module.K, Module.V, Module.O)
SLOT = KvShape(layers=LAYERS, kv_heads=1, head_dim=H, itemsize=BYTES, page_tokens=1)


def attention(rank: int) -> list[ModuleShape]:
    return [ModuleShape(layer, module, rank, H, H) for layer in range(LAYERS) for module in QKVO]


def test_page_demand_in_every_layout() -> None:
    vector = PageGeometry(Geometry.VECTOR, BYTES, width=H)
    paired = PageGeometry(Geometry.PAIRED_SLOT, BYTES, width=H, layers=LAYERS)
    rows = PageGeometry(Geometry.RANK_ROWS, BYTES, row_page_bytes=SLOT.page_bytes)
    assert (vector.page_bytes, paired.page_bytes, rows.page_bytes) == (H * BYTES, 2 * LAYERS * H * BYTES, 64)
    for rank in (1, 2, 3):
        payload = sum(2 * rank * H * BYTES for _ in attention(rank))
        # Sum over modules of ceil(r d_in / H) + ceil(d_out r / H).
        assert page_demand(vector, attention(rank)) == len(QKVO) * LAYERS * 2 * rank
        # The archived S-LoRA attention path: 4 r slots, each 2 L H b bytes.
        assert page_demand(paired, attention(rank)) == 4 * rank
        assert 4 * rank * paired.page_bytes == payload
        # Rows of one size fill our pages exactly.
        assert page_demand(rows, attention(rank)) * rows.page_bytes >= payload
    assert page_demand(paired, attention(1)) * paired.page_bytes == 256
    assert page_demand(rows, attention(1)) == 4


def test_page_demand_is_not_the_rank() -> None:
    """Widths that do not divide, several modules, vectors beside the factors."""
    vector = PageGeometry(Geometry.VECTOR, BYTES, width=H)
    uneven = [ModuleShape(0, Module.UP, 3, 10, 25), ModuleShape(0, Module.DOWN, 1, 25, 10, (Factor.C,))]
    # ceil(30/8) + ceil(75/8) + ceil(25/8) + ceil(10/8) + ceil(10/8)
    assert page_demand(vector, uneven) == 4 + 10 + 4 + 2 + 2
    assert page_demand(vector, [ModuleShape(0, Module.Q, 5, H, H)]) == 5 + 5


class Sixteen:
    """The fixture's pool before tx7: KV of r0, adapter a in use and pinned, adapter b idle, four
    free slots.
    """

    def __init__(self) -> None:
        self.pool = PagePool(17, SLOT.page_bytes)
        self.directory = SlotDirectory(8)
        self.r0 = self.pool.reserve_for_copy(4, 1)
        self.pool.own(self.r0, 1, PageState.KV, 0, 1)
        self.a, self.b = self.resident("a", 1), self.resident("b", 3)
        self.a.pin_count = 1
        self.a.last_use, self.b.last_use = 1, 2  # a is older: only eligibility protects it
        self.lease = SlotLease.take(RevisionLease.take(self.a), 1)
        self.c = AdapterEntry("c", "c" * 64, 4, 8, ((1, 8),), (0, 1, 2, 3), 256)
        self.c.host_source_verified = True
        self.c.move(AdapterState.HOST_READY)

    def resident(self, key: str, generation: int) -> AdapterEntry:
        entry = AdapterEntry(key, key * 64, 4, 8, ((1, 8),), (0, 1, 2, 3), 256, host_source_verified=True)
        slot, at = self.directory.take()
        while at < generation:
            self.directory.give_back(slot, at)
            slot, at = self.directory.take()
        transaction = Transaction.reserve(9, self.pool, Demand(4, 0, 0, 0))
        assert transaction is not None
        entry.slot, entry.generation = slot, at
        for state in ("host_ready", "reserved", "loading", "validated", "published", "idle"):
            entry.move(AdapterState(state))
        entry.pages = transaction.commit_adapter(slot, at)
        return entry

    def slots(self, pages: np.ndarray) -> list[int]:
        return sorted((pages - 1).tolist())

    def victims(self, needed: int) -> list[str] | None:
        offered = [
            Candidate(PageClass.ADAPTER, e.key, e.page_count, 1, e.last_use)
            for e in (self.a, self.b, self.c)
            if eviction.evictable(e, committed_launch=0)
        ]
        order = eviction.ranked(offered, eviction.by_last_use, 2)
        covered = eviction.cover(order, needed, held={PageClass.ADAPTER: 8}, floors={})
        return [candidate.key for candidate in covered.taken] if covered.enough else None

    def begin_tx7(self, demand: Demand) -> Transaction:
        self.b.move(AdapterState.RETIRING)
        tx7 = Transaction.reserve(7, self.pool, demand, victims=[self.b], last_launch=0, overwrite=True)
        assert tx7 is not None
        self.directory.give_back(self.b.slot, self.b.generation)
        self.c.slot, self.c.generation = self.directory.take()
        for state in ("reserved", "loading"):
            self.c.move(AdapterState(state))
        return tx7


DEMAND = Demand(
    adapter=page_demand(PageGeometry(Geometry.PAIRED_SLOT, BYTES, width=H, layers=LAYERS), attention(1)),
    kv_initial=2,
    kv_growth=2,
    guard=0,
)


def test_sixteen_slot_admission() -> None:
    world = Sixteen()
    counts = world.pool.counts()
    assert (counts.total, counts.page_bytes, counts.total * counts.page_bytes) == (16, 64, 1024)
    assert (world.slots(world.r0), world.slots(world.a.pages), world.slots(world.b.pages)) == (
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    )
    assert (DEMAND.required, DEMAND.required * counts.page_bytes) == (8, 512)
    assert admissible(DEMAND, free=4, reclaimable=4)
    assert not admissible(DEMAND, free=4, reclaimable=3)
    assert world.victims(DEMAND.required - world.pool.free) == ["b"]
    assert world.victims(5) is None

    tx7 = world.begin_tx7(DEMAND)
    assert world.pool.counts().reserved == 8
    assert world.slots(tx7.adapter_pages) == [8, 9, 10, 11]
    assert world.slots(tx7.kv_pages) == [12, 13, 14, 15]
    assert not world.c.resident  # nothing may bind before publication

    world.c.move(AdapterState.VALIDATED)
    world.c.pages = tx7.commit_adapter(world.c.slot, world.c.generation)
    world.c.move(AdapterState.PUBLISHED)
    lease = SlotLease.take(RevisionLease.take(world.c), 3)
    r1 = tx7.commit_kv(1, 1)
    assert tx7.finalize(0) == [world.b]
    tx7.close()
    world.b.move(AdapterState.HOST_READY)

    assert (world.slots(world.c.pages), world.slots(r1)) == ([8, 9, 10, 11], [12, 13, 14, 15])
    assert lease.valid
    counts = world.pool.counts()
    assert (counts.free, counts.reserved, counts.adapter, counts.kv) == (0, 0, 8, 8)
    assert (counts.conserved, (counts.adapter + counts.kv) * counts.page_bytes) == (True, 1024)
    world.pool.check()


def test_a_failed_copy_is_compensated() -> None:
    world = Sixteen()
    assert world.b.generation == 3
    tx7 = world.begin_tx7(DEMAND)
    stale = world.c.generation

    owed = tx7.rollback(0)
    world.directory.give_back(world.c.slot, stale)
    world.c.slot = world.c.generation = 0
    world.c.move(AdapterState.HOST_READY)
    assert tx7.state is TransactionState.ROLLED_BACK
    assert [(place.entry.key, world.slots(place.pages)) for place in owed] == [("b", [8, 9, 10, 11])]
    assert world.pool.counts().reserved == 4  # b's own pages wait for b

    restoration = Transaction.restoring(8, tx7, owed[0])
    world.b.move(AdapterState.HOST_READY)
    world.b.slot, world.b.generation = 2, 3  # b and c shared slot 2 of the directory
    slot, generation = world.directory.take()
    for state in ("reserved", "loading", "validated"):
        world.b.move(AdapterState(state))
    world.b.slot, world.b.generation = slot, generation
    world.b.pages = restoration.commit_adapter(slot, generation)
    world.b.move(AdapterState.PUBLISHED)
    restoration.close()

    assert world.b.generation > stale > 3  # a fresh generation: no handle to c or to the old b is valid
    assert world.slots(world.b.pages) == [8, 9, 10, 11]
    assert sorted(page - 1 for page in world.pool.free_pages()) == [12, 13, 14, 15]
    assert world.slots(world.r0) == [0, 1, 2, 3]
    assert world.slots(world.a.pages) == [4, 5, 6, 7]
    assert world.lease.valid
    assert not world.c.resident
    counts = world.pool.counts()
    assert (counts.free, counts.reserved, counts.adapter, counts.kv, counts.conserved) == (4, 0, 8, 4, True)


def test_a_victim_that_is_not_restored_gives_its_pages_back() -> None:
    world = Sixteen()
    tx7 = world.begin_tx7(DEMAND)
    (place,) = tx7.rollback(0)
    tx7.give_up(place, 0)
    assert world.pool.free == 8
    world.pool.check()


@pytest.mark.parametrize("depth", [0, 1])
def test_recovery_is_a_transaction(depth: int) -> None:
    """0x09L: free pages 8, 5, 8, 5, and 8 free plus reclaimable."""
    rig = Rig(depth=depth, pages=9, page_tokens=4, growth_horizon=0, scrub=False, load_retry_ns=2_000)
    rig.register("D", pages=2)
    rig.run()
    # D lies on the host and not on the device: a limit of no adapter pages takes it off, and is lifted again.
    rig.mailbox.inbox += [SetLimits(90, adapter_pages=0), SetLimits(91, adapter_pages=8)]
    rig.run()
    state = rig.engine.state
    entry = state.adapters["D"]
    assert (state.pool.free, entry.state) == (8, AdapterState.HOST_READY)

    seen: list[int] = [state.pool.free]
    attempts: list[tuple[int, int, int]] = []

    def on_plan(plan, data) -> None:  # type: ignore[no-untyped-def]
        for slot, generation in adapter_pairs(plan.copies):
            seen.append(state.pool.free)
            attempts.append((state.loads[slot, generation].transaction.txn, slot, generation))

    rig.device.on_plan = on_plan
    number = adapter_number(digest_words(rig.kernel_digest("D")))
    rig.faults.torn_copies.add(number)
    rig.log.events.clear()
    rig.submit("d0", [1, 2, 3], "D", max_tokens=1)
    arrival = rig.clock.now + 1_000
    while not any(isinstance(event, LoadFailed) for event in rig.log.events):
        rig.step()
    seen.append(state.pool.free)
    record = state.records["d0"]
    assert (record.load_failures, record.admissions, record.outputs) == (1, 0, 0)
    assert not any(isinstance(e, IterationCompleted) and e.sampled for e in rig.log.events)
    rig.faults.torn_copies.clear()
    rig.run()
    rig.assert_answered("d0")
    assert seen == [8, 5, 8, 5]
    assert state.pool.free + entry.page_count == 8
    assert eviction.evictable(entry, state.committed_launch)
    (first, *_), (second, *_) = attempts
    assert second > first  # a new attempt has a new number, and another generation of the slot
    assert attempts[1][1:] != attempts[0][1:]
    admitted = [event for event in rig.log.events if isinstance(event, RequestAdmitted)]
    assert [event.at_ns - event.wait_ns for event in admitted] == [arrival]
    assert sum(event.sampled for event in rig.log.events if isinstance(event, IterationCompleted)) == 1
    moves = [(e.before, e.after) for e in rig.log.events if isinstance(e, AdapterTransition)]
    assert moves.count(("loading", "host_ready")) == 1
    assert moves.count(("validated", "published")) == 1
