"""Ways to break the engine, one invariant each, from outside: what `test_mutants` applies.

`blind` switches the code's own checks off, so that only the simulator's checkers can notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from loraplex.engine import accounts, admission, commit, endings, growth, integrity, launch, prefixes
from loraplex.engine.deltas import PendingDeltas
from loraplex.engine.request_state import Stage
from loraplex.engine.residency import load_failures, loads, transitions
from loraplex.engine.state import EngineState
from loraplex.identity import cache
from loraplex.identity.cache import KeyChain
from loraplex.identity.execution import base_execution
from loraplex.memory import eviction
from loraplex.memory.host import HostTier
from loraplex.memory.leases import RevisionLease, SlotLease
from loraplex.memory.pages import PagePool, PageState
from loraplex.memory.prefix import CachedBlock, PrefixIndex
from loraplex.memory.residency import AdapterEntry, SlotDirectory
from loraplex.memory.slabs import Block, Slabs
from loraplex.memory.transaction import Transaction
from loraplex.schedule.queue import WaitingQueue
from loraplex.schedule.running import RunningTable
from loraplex.schedule.tenant_service import TenantService
from loraplex.sim import administrator, clients
from loraplex.sim.faults import BASE

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None:
    return None


def blind(patch: Patch) -> None:
    """No check of the code under test speaks any more."""
    patch.setattr(PagePool, "_expect", nothing)
    patch.setattr(PagePool, "check", nothing)
    patch.setattr(PagePool, "require_fence", nothing)
    patch.setattr(Slabs, "_expect", lambda slabs, block, *_: slabs._of(block))
    patch.setattr(Slabs, "check", nothing)
    patch.setattr(Slabs, "require_fence", nothing)
    patch.setattr(HostTier, "check", nothing)
    patch.setattr(PrefixIndex, "check", nothing)
    patch.setattr(prefixes, "_require_true", nothing)
    patch.setattr(integrity, "check", nothing)
    patch.setattr(launch, "validate_launch", nothing)
    patch.setattr(launch, "check_plan", nothing)


@dataclass(frozen=True)
class Mutant:
    """One broken invariant. expected: checkers of which one must see it. kinds: fault kinds that bring it to
    light.

    small: most adapters take a block of a slab page. cached: prefixes are.
    """

    name: str
    apply: Callable[[Patch], None]
    expected: frozenset[str]
    kinds: frozenset[str] = frozenset()
    copy_stream: bool = False
    small: bool = False
    cached: bool = False


MUTANTS: list[Mutant] = []


def mutant(
    *expected: str,
    kinds: tuple[str, ...] = (),
    copy_stream: bool = False,
    small: bool = False,
    cached: bool = False,
) -> Callable[[Any], Any]:
    def note(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(
            Mutant(apply.__name__, apply, frozenset(expected), frozenset(kinds), copy_stream, small, cached)
        )
        return apply

    return note


# ---------------------------------------------------------------- pages


@mutant("conservation")
def freed_pages_are_lost(patch: Patch) -> None:
    real = PagePool._to_free

    def to_free(pool: PagePool, pages: Any, last_launch: int) -> None:
        real(pool, pages, last_launch)
        if pages.size:
            pool._free.pop()

    patch.setattr(PagePool, "_to_free", to_free)


@mutant("one_owner", "conservation")
def a_page_is_freed_twice(patch: Patch) -> None:
    real = PagePool._to_free

    def to_free(pool: PagePool, pages: Any, last_launch: int) -> None:
        real(pool, pages, last_launch)
        pool._free.extend(pages[:1].tolist())

    patch.setattr(PagePool, "_to_free", to_free)


@mutant("one_owner", "conservation")
def a_reserved_page_stays_free(patch: Patch) -> None:
    real = PagePool.reserve

    def reserve(pool: PagePool, count: int, txn: int) -> Any:
        pages = real(pool, count, txn)
        pool._free.extendleft(pages[:1].tolist())
        return pages

    patch.setattr(PagePool, "reserve", reserve)


@mutant("late_write", "equal_output", "one_owner", "ends_once", "discards", "crash", copy_stream=True)
def pages_are_reused_while_a_launch_names_them(patch: Patch) -> None:
    """Both defences go: that a request keeps its pages while it is in flight, and that a copy waits for the
    fence.
    """

    def settle(state: EngineState, record: Any) -> None:
        if record.slot >= 0:
            state.table.inflight[record.slot] = 0
            endings.release_slot(state, record)
        if record.revision is not None and record.revision.open:
            record.revision.release()

    patch.setattr(endings, "settle", settle)
    patch.setattr(eviction, "reusable", lambda *_, **__: True)


@mutant("conservation", kinds=("torn_copy", "failed_copy", "digest_mismatch"))
def a_rollback_keeps_its_pages(patch: Patch) -> None:
    real = Transaction.rollback

    def rollback(transaction: Transaction, last_launch: int) -> Any:
        cancel, PagePool.cancel = PagePool.cancel, nothing  # type: ignore[method-assign,assignment]
        try:
            return real(transaction, last_launch)
        finally:
            PagePool.cancel = cancel  # type: ignore[method-assign]

    patch.setattr(Transaction, "rollback", rollback)


@mutant("conservation", kinds=("cancelled_client",))
def a_load_ahead_that_is_given_up_keeps_its_pages(patch: Patch) -> None:
    def withdraw(state: EngineState, job: Any) -> None:
        del state.loads[(job.slot, job.generation)]
        transitions.give_up(state, job.entry)
        state.queue.unpark(job.entry.key)

    patch.setattr(loads, "withdraw", withdraw)


# ---------------------------------------------------------------- slab pages


@mutant("one_owner", "conservation", small=True)
def a_block_is_given_twice(patch: Patch) -> None:
    """A block that was just reserved is offered to the next one again."""
    real = Slabs._take

    def take(slabs: Slabs, slab: Any, index: int, txn: int) -> Any:
        block = real(slabs, slab, index, txn)
        slab.state[index] = 0
        slabs._note_room(slab)
        return block

    patch.setattr(Slabs, "_take", take)


@mutant("one_owner", "equal_output", "publication", "ends_once", "typed_end", "discards", small=True)
def a_copy_lands_in_the_neighbouring_block(patch: Patch) -> None:
    real = PendingDeltas.copy

    def copy(deltas: PendingDeltas, digest: str, slot: int, generation: int, place: Any) -> None:
        if isinstance(place, Block):
            place = replace(place, index=place.index & ~1)
        real(deltas, digest, slot, generation, place)

    patch.setattr(PendingDeltas, "copy", copy)


@mutant("one_owner", "conservation", "equal_output", "discards", "ends_once", "typed_end", small=True)
def a_slab_goes_back_with_its_first_free_block(patch: Patch) -> None:
    real = Slabs._to_free

    def to_free(slabs: Slabs, slab: Any, block: Any, last_launch: int) -> bool:
        slab.state[:] = 0
        return real(slabs, slab, block, last_launch)

    patch.setattr(Slabs, "_to_free", to_free)


@mutant(
    "late_write", "equal_output", "one_owner", "ends_once", "discards", "crash", copy_stream=True, small=True
)
def blocks_are_reused_while_a_launch_names_them(patch: Patch) -> None:
    pages_are_reused_while_a_launch_names_them(patch)


@mutant("conservation", "one_owner", kinds=("torn_copy", "failed_copy", "digest_mismatch"), small=True)
def a_rollback_keeps_its_block(patch: Patch) -> None:
    real = Transaction.rollback

    def rollback(transaction: Transaction, last_launch: int) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Slabs, "cancel", nothing)
            return real(transaction, last_launch)

    patch.setattr(Transaction, "rollback", rollback)


# ---------------------------------------------------------------- eviction and leases


def _evictable_without(name: str) -> Callable[[Patch], None]:
    def apply(patch: Patch) -> None:
        real = eviction.evictable

        def evictable(entry: AdapterEntry, completed: int) -> bool:
            value = getattr(entry, name)
            setattr(entry, name, 0)
            try:
                return real(entry, completed)
            finally:
                setattr(entry, name, value)

        patch.setattr(eviction, "evictable", evictable)
        patch.setattr(eviction, "UNLEASED", frozenset({*eviction.UNLEASED, "active"}))

    return apply


mutant("stale_generation", "residency", "discards", "crash", "equal_output")(_evictable_without("refcount"))
MUTANTS[-1] = Mutant("eviction_ignores_leases", MUTANTS[-1].apply, MUTANTS[-1].expected)
mutant("pins")(_evictable_without("pin_count"))
MUTANTS[-1] = Mutant("eviction_ignores_pins", MUTANTS[-1].apply, MUTANTS[-1].expected)


@mutant("stale_generation", "discards", "residency", "crash")
def a_slot_lease_does_not_count(patch: Patch) -> None:
    real = SlotLease.take

    def take(revision: RevisionLease, tick: int) -> SlotLease:
        lease = real(revision, tick)
        lease.entry.refcount -= 1
        return lease

    def release(lease: SlotLease, tick: int) -> None:
        lease.open = False

    patch.setattr(SlotLease, "take", staticmethod(take))
    patch.setattr(SlotLease, "release", release)
    patch.setattr(eviction, "UNLEASED", frozenset({*eviction.UNLEASED, "active"}))


@mutant("liveness", "leases")
def a_slot_lease_is_never_given_up(patch: Patch) -> None:
    def release(lease: SlotLease, tick: int) -> None:
        lease.open = False

    patch.setattr(SlotLease, "release", release)


@mutant("liveness", "leases")
def a_revision_lease_is_never_given_up(patch: Patch) -> None:
    def release(lease: RevisionLease) -> None:
        lease.open = False

    patch.setattr(RevisionLease, "release", release)


@mutant("liveness", "stale_generation", "residency", "crash", "typed_end", "engine")
def a_revision_lease_does_not_count(patch: Patch) -> None:
    def take(entry: AdapterEntry) -> RevisionLease:
        return RevisionLease(entry, entry.revision)

    def release(lease: RevisionLease) -> None:
        lease.open = False

    patch.setattr(RevisionLease, "take", staticmethod(take))
    patch.setattr(RevisionLease, "release", release)


@mutant("revision_lease")
def a_request_binds_what_its_name_means_now(patch: Patch) -> None:
    real = transitions.take_slot_lease

    def take(state: EngineState, record: Any) -> SlotLease:
        entry = record.revision.entry
        others = [e for e in state.occupied.values() if e.resident and e is not entry]
        if others:
            record.revision.entry = max(others, key=lambda e: e.key)
        try:
            return real(state, record)
        finally:
            record.revision.entry = entry

    patch.setattr(transitions, "take_slot_lease", take)


@mutant("liveness", "revision_lease", "stale_generation", "publication", "discards")
def a_reused_slot_keeps_its_generation(patch: Patch) -> None:
    def take(directory: SlotDirectory) -> tuple[int, int]:
        slot = directory._free.pop()
        directory._generation[slot] = 1
        return slot, 1

    def give_back(directory: SlotDirectory, slot: int, generation: int) -> None:
        directory._free.append(slot)

    patch.setattr(SlotDirectory, "take", take)
    patch.setattr(SlotDirectory, "give_back", give_back)


# ---------------------------------------------------------------- loads


@mutant("publication", kinds=("torn_copy", "failed_copy", "digest_mismatch"))
def a_damaged_copy_is_published(patch: Patch) -> None:
    real = loads.finish
    patch.setattr(loads, "finish", lambda state, slot, generation, _: real(state, slot, generation, True))


@mutant("publication")
def a_slot_is_published_when_its_copy_starts(patch: Patch) -> None:
    from loraplex.engine.deltas import PendingDeltas

    real = PendingDeltas.copy

    def copy(deltas: PendingDeltas, digest: str, slot: int, generation: int, pages: Any) -> None:
        real(deltas, digest, slot, generation, pages)
        deltas.publish(slot, generation)

    patch.setattr(PendingDeltas, "copy", copy)


@mutant("liveness")
def those_who_wait_for_a_load_are_forgotten(patch: Patch) -> None:
    patch.setattr(WaitingQueue, "unpark", nothing)


@mutant("residency")
def a_state_changes_without_its_event(patch: Patch) -> None:
    real, calls = transitions.note_move, [0]

    def note_move(state: EngineState, entry: AdapterEntry, before: Any) -> None:
        calls[0] += 1
        if calls[0] % 5:
            real(state, entry, before)

    patch.setattr(transitions, "note_move", note_move)


@mutant("crash", "typed_end", "engine", kinds=("duplicate_completion",))
def a_copy_reported_twice_is_believed_twice(patch: Patch) -> None:
    real = loads.finish

    def finish(state: EngineState, slot: int, generation: int, intact: bool) -> Any:
        if (slot, generation) not in state.loads and (slot in state.occupied):
            state.pool.release(state.occupied[slot].pages, 3, slot, generation, 0)  # type: ignore[arg-type]
            raise KeyError((slot, generation))
        return real(state, slot, generation, intact)

    patch.setattr(loads, "finish", finish)


# ---------------------------------------------------------------- requests


@mutant("arrival")
def a_preemption_resets_the_arrival(patch: Patch) -> None:
    real = admission.bind

    def bind(state: EngineState, record: Any) -> None:
        real(state, record)
        record.arrival_ns += 1

    patch.setattr(admission, "bind", bind)


@mutant("equal_output")
def a_preempted_request_forgets_its_last_token(patch: Patch) -> None:
    real = RunningTable.known_tokens
    patch.setattr(
        RunningTable,
        "known_tokens",
        lambda table, slot: real(table, slot)[: max(int(table.prompt[slot]), int(table.known[slot]) - 1)],
    )


@mutant("equal_output")
def samples_return_in_another_order(patch: Patch) -> None:
    real = commit._commit_tokens

    def commit_tokens(state: Any, flight: Any, result: Any, faulty: Any, scored: Any) -> None:
        fields = {name: getattr(result, name) for name in type(result).__dataclass_fields__}
        real(state, flight, type(result)(**{**fields, "tokens": result.tokens[::-1].copy()}), faulty, scored)

    patch.setattr(commit, "_commit_tokens", commit_tokens)


@mutant("ends_once")
def a_request_ends_twice(patch: Patch) -> None:
    real = endings.end

    def end(state: EngineState, record: Any, **how: Any) -> None:
        before = len(state.outbox)
        real(state, record, **how)
        state.outbox.extend(state.outbox[before:])

    patch.setattr(endings, "end", end)


@mutant("liveness")
def an_end_is_not_told(patch: Patch) -> None:
    real = endings.end

    def end(state: EngineState, record: Any, **how: Any) -> None:
        before = len(state.outbox)
        real(state, record, **how)
        del state.outbox[before:]

    patch.setattr(endings, "end", end)


@mutant("liveness", "discards", "equal_output", "crash", "engine", kinds=("failed_step", "stale_plan"))
def a_failed_plan_is_not_rolled_back(patch: Patch) -> None:
    patch.setattr(RunningTable, "rollback_planned", nothing)


@mutant("equal_output", "typed_end", "one_owner", "discards")
def page_tables_are_not_told_of_new_pages(patch: Patch) -> None:
    real = RunningTable.add_pages

    def add_pages(table: RunningTable, slot: int, pages: Any) -> Any:
        deltas = real(table, slot, pages)
        return deltas[:-1] if len(deltas) > 1 else np.empty((0, 3), dtype=np.int32)

    patch.setattr(RunningTable, "add_pages", add_pages)


@mutant("liveness", "typed_end", kinds=("torn_copy", "failed_copy"))
def failures_are_not_told_to_those_who_wait(patch: Patch) -> None:
    patch.setattr(load_failures, "count_failure", nothing)
    patch.setattr(loads, "count_failure", nothing)
    patch.setattr(WaitingQueue, "unpark", nothing)


@mutant("conservation", "crash", "liveness")
def a_preempted_request_keeps_its_pages(patch: Patch) -> None:
    patch.setattr(growth, "preempt", nothing)
    real = EngineState.free_pages

    def free_pages(state: EngineState, pages: Any, kind: Any, owner: int, generation: int) -> None:
        real(state, pages[:-1] if len(pages) > 1 else pages, kind, owner, generation)

    patch.setattr(EngineState, "free_pages", free_pages)


@mutant("conservation", "crash")
def an_evicted_adapter_keeps_its_pages(patch: Patch) -> None:
    def reclaim(state: EngineState, entry: AdapterEntry) -> None:
        entry.pages = entry.pages[:0]
        transitions.unpublish(state, entry)
        state.host.let_go(entry.kernel_digest)

    patch.setattr(transitions, "reclaim", reclaim)


# ---------------------------------------------------------------- cached prefixes


@mutant("history", "receipts", "one_owner", "conservation", "typed_end", cached=True)
def a_key_leaves_its_parent_out(patch: Patch) -> None:
    """Client and engine agree on it, so that only what is read can show it."""
    real = cache.block_key
    patch.setattr(
        cache,
        "block_key",
        lambda parent, execution, acts_from, tokens: real(
            parent[:0] + b"p" * 32, execution, acts_from, tokens
        ),
    )
    _index_without_parents(patch)


def _index_without_parents(patch: Patch) -> None:
    """The index believes keys alone, whatever they follow."""
    real_acquire, real_publish = PrefixIndex.acquire, PrefixIndex.publish

    def acquire(index: PrefixIndex, keys: Any, launch: int) -> Any:
        kept = []
        parent = None
        for key in keys:
            block = index._blocks[key]
            kept.append((block, block.parent))
            block.parent, parent = parent, block
        try:
            return real_acquire(index, keys, launch)
        finally:
            for block, before in kept:
                block.parent = before

    def publish(index: PrefixIndex, parent: Any, key: bytes, *rest: Any) -> Any:
        known = index._blocks.get(key)
        before = known.parent if known is not None else None
        if known is not None:
            known.parent = parent
        try:
            return real_publish(index, parent, key, *rest)
        finally:
            if known is not None:
                known.parent = before

    patch.setattr(PrefixIndex, "acquire", acquire)
    patch.setattr(PrefixIndex, "publish", publish)


@mutant("history", cached=True)
def a_key_forgets_what_acts_after_the_boundary(patch: Patch) -> None:
    patch.setattr(KeyChain, "acting", lambda chain, position: (chain._executions[0], 0))


@mutant("history", cached=True)
def an_adapter_of_the_layers_counts_as_the_base(patch: Patch) -> None:
    """Client and engine agree that no adapter reaches a KV row, as if heads alone were adapted."""
    patch.setattr(administrator.Image, "execution", property(lambda _: base_execution(BASE)))


@mutant("publication", "history", cached=True)
def a_block_is_cached_before_its_commit(patch: Patch) -> None:
    real = launch.launch

    def early(state: EngineState, backend: Any, flight: Any) -> bool:
        launched = real(state, backend, flight)
        if launched:
            slots = flight.plan.sample_slots.astype(np.int64)
            committed = state.table.committed.copy()
            state.table.committed[slots] = state.table.planned[slots]
            try:
                prefixes.publish(state, flight.plan.generation, slots)
            finally:
                state.table.committed[:] = committed
        return launched

    patch.setattr(launch, "launch", early)


@mutant("history", "receipts", "equal_output", "one_owner", "conservation", "crash", "typed_end", cached=True)
def a_block_that_is_read_is_given_up(patch: Patch) -> None:
    """Every block counts as unreferenced, and any leaf may go."""

    def oldest(index: PrefixIndex) -> CachedBlock | None:
        return min(
            (b for b in index._blocks.values() if not b.children), key=lambda b: b.last_launch, default=None
        )

    def next_to_go(index: PrefixIndex, count: int) -> list[CachedBlock]:
        return sorted(index._blocks.values(), key=lambda b: (b.last_launch, -b.depth))[:count]

    patch.setattr(PrefixIndex, "oldest", oldest)
    patch.setattr(PrefixIndex, "next_to_go", next_to_go)
    patch.setattr(
        EngineState, "_spare_blocks", lambda state, unreferenced: sum(not b.children for b in state.prefix)
    )


@mutant("history", cached=True)
def a_foreign_namespace_is_looked_up(patch: Patch) -> None:
    real = cache.cache_root
    for module in (prefixes, clients):
        patch.setattr(module, "cache_root", lambda abi, graph, namespace: real(abi, graph, "everybody"))


@mutant("publication", "history", cached=True)
def a_token_found_late_is_cached(patch: Patch) -> None:
    """A plan that was in flight when its request ended is published like any other."""
    real = prefixes.publish

    def publish(state: EngineState, plan: int, slots: Any) -> Any:
        ended = {
            r.request_id: r for s in slots.tolist() if (r := state.by_slot[s]).request_id not in state.records
        }
        state.records.update(ended)
        try:
            return real(state, plan, slots)
        finally:
            for name in ended:
                del state.records[name]

    patch.setattr(prefixes, "publish", publish)


@mutant("leases", cached=True)
def a_reference_is_never_given_back(patch: Patch) -> None:
    real = PrefixIndex.release
    patch.setattr(PrefixIndex, "release", lambda index, blocks, launch: real(index, list(blocks)[1:], launch))


@mutant("conservation", "crash", cached=True)
def pages_of_blocks_that_go_are_lost(patch: Patch) -> None:
    real = PagePool.release

    def release(pool: PagePool, pages: Any, kind: Any, *rest: Any) -> None:
        if kind is not PageState.PREFIX:
            real(pool, pages, kind, *rest)

    patch.setattr(PagePool, "release", release)


@mutant("figures")
def runs_are_counted_in_packed_order(patch: Patch) -> None:
    patch.setattr(commit, "_runs_before", lambda plan: int(plan.segment_adapters.size))


@mutant("receipts", "history", cached=True)
def a_receipt_changes(patch: Patch) -> None:
    """A receipt that a reader holds is changed behind its back."""
    real = prefixes.bind

    def bind(state: EngineState, record: Any) -> None:
        real(state, record)
        for other in state.records.values():
            if other is not record and other.prefix is not None and other.prefix.receipt.blocks:
                object.__setattr__(other.prefix.receipt, "covered", 0)

    patch.setattr(prefixes, "bind", bind)


# ---------------------------------------------------------------- service of tenants


@mutant("service")
def what_is_computed_again_is_debited_again(patch: Patch) -> None:
    real = accounts.requeue

    def requeue(state: EngineState, record: Any) -> None:
        record.served = 0
        real(state, record)

    patch.setattr(accounts, "requeue", requeue)


def _debit(change: Callable[[list[Any]], list[Any]]) -> Callable[[Patch], None]:
    """Accounts are told of other tokens. change: of (tenants, buckets, computed, cached, outputs)."""

    def apply(patch: Patch) -> None:
        real = TenantService.debit
        patch.setattr(TenantService, "debit", lambda service, *columns: real(service, *change(list(columns))))

    return apply


@mutant("service")
def an_output_token_counts_twice(patch: Patch) -> None:
    _debit(lambda columns: [*columns[:4], 2 * columns[4]])(patch)


@mutant("service", cached=True)
def cached_tokens_are_free(patch: Patch) -> None:
    _debit(lambda columns: [*columns[:3], 0 * columns[3], columns[4]])(patch)


@mutant("service", cached=True)
def cached_tokens_count_as_computed(patch: Patch) -> None:
    _debit(lambda columns: [*columns[:2], columns[2] + columns[3], 0 * columns[3], columns[4]])(patch)


@mutant("service", cached=True)
def one_tenant_pays_for_all(patch: Patch) -> None:
    _debit(lambda columns: [0 * columns[0], *columns[1:]])(patch)


@mutant("service")
def an_adapters_work_counts_as_the_bases(patch: Patch) -> None:
    _debit(lambda columns: [columns[0], 0 * columns[1], *columns[2:]])(patch)


@mutant("service")
def tokens_that_come_late_are_debited(patch: Patch) -> None:
    real = accounts.debit

    def debit(state: EngineState, plan: Any, faulty: set[int]) -> None:
        ended = [r for r in state.by_slot.values() if r.stage is Stage.ENDED]
        for record in ended:
            record.stage = Stage.RUNNING
        real(state, plan, faulty)
        for record in ended:
            record.stage = Stage.ENDED

    patch.setattr(accounts, "debit", debit)


@mutant("service", kinds=("not_finite",))
def rows_that_are_not_finite_are_debited(patch: Patch) -> None:
    real = accounts.debit
    patch.setattr(accounts, "debit", lambda state, plan, faulty: real(state, plan, set()))


@mutant("service", kinds=("failed_step",))
def service_is_debited_when_it_is_planned(patch: Patch) -> None:
    real_launch, real_debit = launch.launch, accounts.debit

    def early(state: EngineState, backend: Any, flight: Any) -> bool:
        launched = real_launch(state, backend, flight)
        if launched:
            real_debit(state, flight.plan, set())
        return launched

    patch.setattr(launch, "launch", early)
    patch.setattr(accounts, "debit", nothing)


@mutant("service")
def a_debit_is_not_told(patch: Patch) -> None:
    patch.setattr(accounts, "debit", nothing)
