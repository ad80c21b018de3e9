"""Malformed uses of pages, transactions, residency, leases, slots and host images, one mutated field each.

A case builds a sound world, changes one thing, and names the code that must refuse it. Cases are counted once
for each (record, field, kind of fault).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loraplex.core.errors import ErrorCode
from loraplex.core.packed import I32
from loraplex.memory.host import HostTier
from loraplex.memory.leases import RevisionLease, SlotLease
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.residency import TRANSITIONS, AdapterEntry, AdapterState, SlotDirectory
from loraplex.memory.transaction import Demand, Transaction

PATH = ("host_ready", "reserved", "loading", "validated", "published", "idle", "retiring")
"""One way through the table that meets every state but `absent` and `active`."""


@dataclass(frozen=True)
class Case:
    """record, field, fault: the coordinates that count. act: must raise `code`."""

    record: str
    field: str
    fault: str
    code: ErrorCode
    act: Callable[[], Any]

    @property
    def name(self) -> str:
        return f"{self.record}-{self.field}-{self.fault}"


def entry_in(state: AdapterState, key: str = "a") -> AdapterEntry:
    """An entry brought to `state` along the table."""
    entry = AdapterEntry(key, key * 64, 2, 8, ((4, 2),), (0, 1), 128, host_source_verified=True)
    if state is AdapterState.ABSENT:
        return entry
    for name in ("host_ready", "reserved", "loading", "validated", "published"):
        entry.move(AdapterState(name))
        if entry.state is state:
            return entry
    entry.move(state)
    return entry


class World:
    """Twelve pages: two of KV, two of an adapter, two reserved by transaction 5; the rest free."""

    def __init__(self) -> None:
        self.pool = PagePool(13, 64)
        self.kv = self.take(PageState.KV, 3, 7)
        self.adapter = self.take(PageState.ADAPTER, 2, 1)
        self.reserved = self.pool.reserve_for_copy(2, 5)
        self.free = np.array(sorted(self.pool.free_pages())[:2], dtype=np.int32)

    def take(self, kind: PageState, owner: int, generation: int) -> I32:
        pages = self.pool.reserve_for_copy(2, 1)
        self.pool.own(pages, 1, kind, owner, generation)
        return pages


PAGE_FAULTS: dict[str, tuple[Callable[[World, I32], I32], ErrorCode]] = {
    "null": (lambda _, pages: np.array([0, pages[1]], np.int32), ErrorCode.PAGE_STATE),
    "negative": (lambda _, pages: np.array([pages[0], -1], np.int32), ErrorCode.PAGE_STATE),
    "beyond": (lambda _, pages: np.array([pages[0], 13], np.int32), ErrorCode.PAGE_STATE),
    "repeated": (lambda _, pages: np.array([pages[0], pages[0]], np.int32), ErrorCode.PAGE_STATE),
    "free": (lambda world, pages: np.array([pages[0], world.free[0]], np.int32), ErrorCode.PAGE_STATE),
}


def pool_cases() -> Iterator[Case]:
    """Every operation on pages, with each kind of wrong page, owner, generation and transaction."""
    ops: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
        "own": (
            "reserved", {"txn": 5},
            lambda w, p, txn=5: w.pool.own(p, txn, PageState.KV, 1, 1),
        ),
        "cancel": ("reserved", {"txn": 5}, lambda w, p, txn=5: w.pool.cancel(p, txn, 0)),
        "hand_over": ("reserved", {"txn": 5}, lambda w, p, txn=5: w.pool.hand_over(p, txn, 6)),
        "release_kv": (
            "kv", {"owner": 3, "generation": 7, "kind": PageState.KV},
            lambda w, p, owner=3, generation=7, kind=PageState.KV: w.pool.release(p, kind, owner, generation,
            0),
        ),
        "release_adapter": (
            "adapter", {"owner": 2, "generation": 1, "kind": PageState.ADAPTER},
            lambda w, p, owner=2, generation=1, kind=PageState.ADAPTER: w.pool.release(p, kind, owner,
            generation, 0),
        ),
        "take_over": (
            "adapter", {"owner": 2, "generation": 1, "kind": PageState.ADAPTER},
            lambda w, p, owner=2, generation=1, kind=PageState.ADAPTER: w.pool.take_over(p, kind, owner,
            generation, 6, 0),
        ),
    }  # fmt: skip
    others = {"reserved": ("kv", "adapter"), "kv": ("reserved", "adapter"), "adapter": ("reserved", "kv")}
    for op, (holds, arguments, call) in ops.items():
        for fault, (mutate, code) in PAGE_FAULTS.items():

            def pages(holds: str = holds, mutate: Any = mutate, call: Any = call) -> None:
                world = World()
                call(world, mutate(world, getattr(world, holds)))

            yield Case(f"pages.{op}", "pages", fault, code, pages)
        for other in others[holds]:

            def foreign(other: str = other, call: Any = call) -> None:
                world = World()
                call(world, getattr(world, other))

            yield Case(f"pages.{op}", "pages", f"of_{other}", ErrorCode.PAGE_STATE, foreign)
        for name, value in arguments.items():
            if name == "kind":
                wrong: list[tuple[str, Any]] = [
                    (k.name.lower(), k) for k in (PageState.KV, PageState.ADAPTER) if k is not value
                ]
                code = ErrorCode.PAGE_STATE
            else:
                wrong = [("next", value + 1), ("zero", 0), ("negative", -1)]
                code = ErrorCode.PAGE_OWNER
            for fault, changed in wrong:

                def argument(
                    holds: str = holds, call: Any = call, name: str = name, changed: Any = changed
                ) -> None:
                    world = World()
                    call(world, getattr(world, holds), **{name: changed})

                yield Case(f"pages.{op}", name, fault, code, argument)
    for op in ("reserve", "reserve_for_copy"):
        for fault, count in (("negative", -1), ("above_free", 7)):
            yield Case(
                f"pages.{op}",
                "count",
                fault,
                ErrorCode.PAGE_STATE,
                lambda op=op, count=count: getattr(World().pool, op)(count, 9),
            )
    for field, fault, sizes in (
        ("num_pages", "zero", (0, 64)),
        ("num_pages", "only_the_null_page", (1, 64)),
        ("num_pages", "negative", (-3, 64)),
        ("page_bytes", "zero", (4, 0)),
        ("page_bytes", "negative", (4, -64)),
    ):
        yield Case("pool", field, fault, ErrorCode.PAGE_STATE, lambda sizes=sizes: PagePool(*sizes))

    def fence() -> None:
        world = World()
        world.pool.cancel(world.reserved, 5, last_launch=9)
        world.pool.require_fence(world.reserved, 8)

    yield Case("pages.copy", "fence", "not_completed", ErrorCode.PAGE_FENCE, fence)


def _corrupt(field: str, value: Any) -> Callable[[], None]:
    def act() -> None:
        world = World()
        if field == "free_list_twice":
            world.pool._free.append(int(world.free[0]))
        elif field == "free_list_used":
            world.pool._free.append(int(world.kv[0]))
        elif field == "free_list_short":
            world.pool._free.pop()
        else:
            world.pool._state[value[0]] = value[1]
        world.pool.check()

    return act


def ledger_cases() -> Iterator[Case]:
    """A pool whose books disagree."""
    code = ErrorCode.PAGE_CONSERVATION
    for fault in ("free_list_twice", "free_list_used", "free_list_short"):
        yield Case("pool.ledger", "free_list", fault, code, _corrupt(fault, None))
    yield Case("pool.ledger", "null_page", "in_use", code, _corrupt("state", (0, PageState.KV)))
    yield Case("pool.ledger", "state", "kv_turned_free", code, _corrupt("state", (1, PageState.FREE)))
    yield Case("pool.ledger", "state", "free_turned_kv", code, _corrupt("state", (12, PageState.KV)))
    yield Case("pool.ledger", "state", "second_null_page", code, _corrupt("state", (12, PageState.NULL)))


def open_transaction(pool: PagePool | None = None) -> Transaction:
    transaction = Transaction.reserve(8, pool or PagePool(13, 64), Demand(2, 1, 1, 0))
    assert transaction is not None
    return transaction


def closed(how: str) -> Transaction:
    """A transaction in each final state."""
    transaction = open_transaction()
    if how == "committed":
        transaction.commit_adapter(1, 1)
        transaction.commit_kv(0, 1)
        transaction.close()
    else:
        transaction.rollback(0)
    return transaction


def victim(pool: PagePool) -> AdapterEntry:
    entry = entry_in(AdapterState.RETIRING, "v")
    entry.slot, entry.generation = 2, 1
    entry.pages = pool.reserve_for_copy(2, 1)
    pool.own(entry.pages, 1, PageState.ADAPTER, 2, 1)
    return entry


def owing() -> tuple[Transaction, Any]:
    """A rolled back transaction that owes a victim its pages."""
    pool = PagePool(5, 64)
    transaction = Transaction.reserve(8, pool, Demand(2, 1, 1, 0), victims=[victim(pool)])
    assert transaction is not None
    return transaction, transaction.rollback(0)[0]


def transaction_cases() -> Iterator[Case]:
    """Transactions used after their end, before their start, or for somebody else."""
    code = ErrorCode.TRANSACTION_STATE
    uses: dict[str, Callable[[Transaction], Any]] = {
        "commit_adapter": lambda t: t.commit_adapter(1, 1),
        "commit_kv": lambda t: t.commit_kv(0, 1),
        "finalize": lambda t: t.finalize(0),
        "close": lambda t: t.close(),
        "release_kv": lambda t: t.release_kv(0),
        "rollback": lambda t: t.rollback(0),
    }
    for how in ("committed", "rolled_back"):
        for use, call in uses.items():
            yield Case("transaction", use, f"after_{how}", code, lambda how=how, call=call: call(closed(how)))
    yield Case("transaction", "close", "adapter_pages_held", code, _close_holding("adapter"))
    yield Case("transaction", "close", "kv_pages_held", code, _close_holding("kv"))
    yield Case("transaction", "close", "everything_held", code, lambda: open_transaction().close())
    for what in ("restoring", "give_up"):
        for fault in ("open", "foreign", "twice"):
            yield Case("transaction", what, fault, code, _restore(what, fault))
    for state in AdapterState:
        if state is not AdapterState.RETIRING:
            yield Case(
                "transaction.victim", "state", state.value, ErrorCode.EVICTION_INELIGIBLE, _victim_in(state)
            )
    yield Case(
        "transaction.victim", "evicting", "taken_already", ErrorCode.EVICTION_INELIGIBLE, _victim_taken()
    )
    for field, code_of in (("generation", ErrorCode.PAGE_OWNER), ("slot", ErrorCode.PAGE_OWNER)):
        yield Case("transaction.victim", field, "next", code_of, _victim_with(field, 1))
        yield Case("transaction.victim", field, "before", code_of, _victim_with(field, -1))
    yield Case("transaction.victim", "pages", "free", ErrorCode.PAGE_STATE, _victim_pages([3, 4]))
    yield Case("transaction.victim", "pages", "repeated", ErrorCode.PAGE_STATE, _victim_pages([1, 1]))


def _close_holding(part: str) -> Callable[[], None]:
    def act() -> None:
        transaction = open_transaction()
        if part == "adapter":
            transaction.commit_kv(0, 1)
        else:
            transaction.commit_adapter(1, 1)
        transaction.close()

    return act


def _restore(what: str, fault: str) -> Callable[[], None]:
    def use(transaction: Transaction, place: Any) -> None:
        if what == "restoring":
            Transaction.restoring(9, transaction, place)
        else:
            transaction.give_up(place, 0)

    def act() -> None:
        transaction, place = owing()
        match fault:
            case "open":
                use(open_transaction(), place)
            case "foreign":
                use(owing()[0], place)
            case _:
                use(transaction, place)
                use(transaction, place)

    return act


def _victim_in(state: AdapterState) -> Callable[[], None]:
    def act() -> None:
        pool = PagePool(5, 64)
        entry = victim(pool)
        entry.state = state
        Transaction.reserve(8, pool, Demand(2, 0, 0, 0), victims=[entry])

    return act


def _victim_taken() -> Callable[[], None]:
    def act() -> None:
        pool = PagePool(5, 64)
        entry = victim(pool)
        entry.evicting = 3
        Transaction.reserve(8, pool, Demand(2, 0, 0, 0), victims=[entry])

    return act


def _victim_with(field: str, by: int) -> Callable[[], None]:
    def act() -> None:
        pool = PagePool(5, 64)
        entry = victim(pool)
        setattr(entry, field, getattr(entry, field) + by)
        Transaction.reserve(8, pool, Demand(4, 0, 0, 0), victims=[entry])

    return act


def _victim_pages(pages: list[int]) -> Callable[[], None]:
    def act() -> None:
        pool = PagePool(5, 64)
        entry = victim(pool)
        entry.pages = np.array(pages, dtype=np.int32)
        Transaction.reserve(8, pool, Demand(4, 0, 0, 0), victims=[entry])

    return act


def residency_cases() -> Iterator[Case]:
    """Every edge that is not in the table."""
    for before in AdapterState:
        for after in AdapterState:
            if after not in TRANSITIONS[before]:
                yield Case(
                    "residency",
                    before.value,
                    f"to_{after.value}",
                    ErrorCode.RESIDENCY_TRANSITION,
                    lambda before=before, after=after: entry_in(before).move(after),
                )


def lease_cases() -> Iterator[Case]:
    """Leases taken where there is nothing to hold, and given up twice."""
    for state in AdapterState:
        if not entry_in(state).resident:
            yield Case(
                "slot_lease",
                "state",
                state.value,
                ErrorCode.LEASE_MISMATCH,
                lambda state=state: SlotLease.take(RevisionLease.take(entry_in(state)), 0),
            )

    def removing() -> None:
        entry = entry_in(AdapterState.PUBLISHED)
        entry.removing = True
        RevisionLease.take(entry)

    def evicting() -> None:
        entry = entry_in(AdapterState.RETIRING)
        entry.evicting = 4
        SlotLease.take(RevisionLease.take(entry), 0)

    def closed_revision() -> None:
        revision = RevisionLease.take(entry_in(AdapterState.PUBLISHED))
        revision.release()
        SlotLease.take(revision, 0)

    def revision_twice() -> None:
        revision = RevisionLease.take(entry_in(AdapterState.PUBLISHED))
        revision.release()
        revision.release()

    def revision_uncounted() -> None:
        revision = RevisionLease.take(entry_in(AdapterState.PUBLISHED))
        revision.entry.revision_leases = 0
        revision.release()

    def slot_twice() -> None:
        lease = SlotLease.take(RevisionLease.take(entry_in(AdapterState.PUBLISHED)), 0)
        lease.release(0)
        lease.release(0)

    def slot_uncounted() -> None:
        lease = SlotLease.take(RevisionLease.take(entry_in(AdapterState.PUBLISHED)), 0)
        lease.entry.refcount = 0
        lease.release(0)

    mismatch, underflow = ErrorCode.LEASE_MISMATCH, ErrorCode.LEASE_UNDERFLOW
    yield Case("revision_lease", "removing", "set", mismatch, removing)
    yield Case("slot_lease", "evicting", "set", mismatch, evicting)
    yield Case("slot_lease", "revision", "closed", mismatch, closed_revision)
    yield Case("revision_lease", "open", "released_twice", underflow, revision_twice)
    yield Case("revision_lease", "count", "zero", underflow, revision_uncounted)
    yield Case("slot_lease", "open", "released_twice", underflow, slot_twice)
    yield Case("slot_lease", "refcount", "zero", underflow, slot_uncounted)


def handle_cases() -> Iterator[Case]:
    """Slot handles at another generation than the directory's: the ABA defence."""

    def given_back(by: int, reuse: int) -> Callable[[], None]:
        def act() -> None:
            directory = SlotDirectory(3)
            slot, generation = directory.take()
            for _ in range(reuse):
                directory.give_back(slot, directory.generation(slot))
                slot, _ = directory.take()
            directory.give_back(slot, generation + by)

        return act

    stale = ErrorCode.STALE_SLOT_GENERATION
    for fault, by, reuse in (
        ("zero", -1, 0),
        ("next", 1, 0),
        ("far", 100, 0),
        ("reused_once", 0, 1),
        ("reused_twice", 0, 2),
    ):
        yield Case("handle", "generation", fault, stale, given_back(by, reuse))

    def twice() -> None:
        directory = SlotDirectory(3)
        slot, generation = directory.take()
        directory.give_back(slot, generation)
        directory.give_back(slot, generation)

    def exhausted() -> None:
        directory = SlotDirectory(2)
        directory.take()
        directory.take()

    yield Case("handle", "generation", "given_back_twice", stale, twice)
    yield Case("directory", "slots", "exhausted", ErrorCode.ADAPTER_SLOTS_EXHAUSTED, exhausted)


def host_cases() -> Iterator[Case]:
    """The host tier's images out of order."""
    code = ErrorCode.HOST_TIER_STATE

    def tier(*steps: str) -> Callable[[], None]:
        def act() -> None:
            host = HostTier(1_000)
            for step in steps:
                if step == "begin":
                    host.begin("i", 100)
                elif step == "miscount":
                    host.used_bytes += 1
                elif step == "check":
                    host.check()
                else:
                    getattr(host, step)("i")

        return act

    for fault, steps in {
        "begun_twice": ("begin", "begin"),
        "arrived_absent": ("arrived",),
        "arrived_twice": ("begin", "arrived", "arrived"),
        "failed_absent": ("failed",),
        "failed_ready": ("begin", "arrived", "failed"),
        "held_absent": ("hold",),
        "held_on_its_way": ("begin", "hold"),
        "let_go_unheld": ("begin", "arrived", "let_go"),
        "let_go_twice": ("begin", "arrived", "hold", "let_go", "let_go"),
        "dropped_absent": ("drop",),
        "dropped_on_its_way": ("begin", "drop"),
        "dropped_held": ("begin", "arrived", "hold", "drop"),
        "dropped_twice": ("begin", "arrived", "drop", "drop"),
        "miscounted": ("begin", "miscount", "check"),
    }.items():
        yield Case("host_image", "state", fault, code, tier(*steps))


def all_cases() -> list[Case]:
    """The whole corpus."""
    return [
        *pool_cases(),
        *ledger_cases(),
        *transaction_cases(),
        *residency_cases(),
        *lease_cases(),
        *handle_cases(),
        *host_cases(),
    ]
