"""0x07B1, 0x07C, 0x07F and 0x07I through the shipping operators, catalog, service and engine.

The specification gives W, both updates, inputs and outputs; the factors are ours and give the printed updates
exactly: for the old adapter B = I and A = 2 Delta, for the new one A = [[2, -1, 0]] and B = [[1], [3]]. Its
slot and pointer generations (12, 31, 21, 41) are its fixture's; ours start at 1 in a fresh directory, and
only that they grow is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.adapters.stand_ins import Preparing
from tests.catalog.names import named
from tests.engine.rig import VOCAB, Rig
from tests.exact.worked import HALF, fractions, matmul
from tests.waiting import LIMIT_S

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.core.errors import ErrorCode, LoraplexError, error_for
from loraplex.core.ids import Module
from loraplex.engine.deltas import digest_words
from loraplex.memory.residency import AdapterState
from loraplex.ops.dims import ModuleDims
from loraplex.ops.exact import ExactModule, ExactOps, Matrix
from loraplex.schedule.packing import Work, build_plan
from loraplex.sim.tokens import adapter_number, expected_tokens

W = fractions([[2, -1, 0], [1, 3, -2]])
OLD = ExactModule(fractions([[1, 4, 1], [-1, 2, 2]]), fractions([[1, 0], [0, 1]]), HALF)
NEW = ExactModule(fractions([[2, -1, 0]]), fractions([[1], [3]]), Fraction(1, 4))
DELTA_OLD = [[HALF, Fraction(2), HALF], [-HALF, Fraction(1), Fraction(1)]]
DELTA_NEW = [[HALF, Fraction(-1, 4), Fraction(0)], [Fraction(3, 2), Fraction(-3, 4), Fraction(0)]]
X_OLD, X_NEW = fractions([[1, 2, -1]]), fractions([[2, 0, 1]])
Y_OLD, Y_NEW = [[Fraction(4), Fraction(19, 2)]], [[Fraction(5), Fraction(3)]]
DIMS = ModuleDims(1, {Module.O: (3, 2)})
PROMPT = [5, 6, 7]


def live(x: Matrix, slots: list[int], adapters: dict[int, ExactModule]) -> Matrix:
    """Rows of x, each under its slot, through a plan and the exact operator."""
    n = len(slots)
    ones, flags = np.ones(n, dtype=np.int32), np.ones(n, dtype=np.bool_)
    zero = np.zeros(n, dtype=np.int32)
    work = Work(
        slot=np.arange(n, dtype=np.int32),
        incarnation=ones,
        adapter_slot=np.array(slots, dtype=np.int32),
        adapter_generation=(np.array(slots) > 0).astype(np.int32),
        kv_start=zero,
        rows=ones,
        frontier=zero,
        decode=flags,
        samples=flags,
        logprobs=zero - 1,
        prompt_logprobs=zero - 1,
        tokens=zero,
        targets=zero - 1,
    )
    plan = build_plan(work, generation=1)
    order = plan.requests.scheduler_index.tolist()
    packed = [x[i] for i in order]
    y = matmul(packed, W)
    ExactOps(plan, {slot: {(0, Module.O): m} for slot, m in adapters.items()}, DIMS).apply(
        y, packed, 0, (Module.O,)
    )
    return [y[order.index(i)] for i in range(n)]


def update(module: ExactModule) -> Matrix:
    """s B A, from the operator itself: its delta for unit inputs."""
    units = fractions([[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    moved = live(units, [1, 1, 1], {1: module})
    base = matmul(units, W)
    columns = [[a - b for a, b in zip(y, z, strict=True)] for y, z in zip(moved, base, strict=True)]
    return [[column[row] for column in columns] for row in range(2)]


def test_old_and_new_outputs_live_and_merged() -> None:
    assert update(OLD) == DELTA_OLD
    assert update(NEW) == DELTA_NEW
    assert live(X_OLD, [7], {7: OLD}) == Y_OLD
    assert live(X_NEW, [8], {8: NEW}) == Y_NEW
    merged_old = [[w + d for w, d in zip(a, b, strict=True)] for a, b in zip(W, DELTA_OLD, strict=True)]
    merged_new = [[w + d for w, d in zip(a, b, strict=True)] for a, b in zip(W, DELTA_NEW, strict=True)]
    assert matmul(X_OLD, merged_old) == Y_OLD
    assert matmul(X_NEW, merged_new) == Y_NEW


def test_both_generations_in_one_batch() -> None:
    assert live([*X_OLD, *X_NEW], [7, 8], {7: OLD, 8: NEW}) == [*Y_OLD, *Y_NEW]


def test_logical_rank_one_in_a_physical_rank_two_slot() -> None:
    padded = NEW.padded(2)
    assert (NEW.rank, padded.rank) == (1, 2)
    assert padded.a[1] == [0, 0, 0]
    assert [row[1] for row in padded.b] == [0, 0]
    assert live(X_NEW, [8], {8: padded}) == Y_NEW


def test_arithmetic_unmerge_is_no_rollback() -> None:
    """A demonstration: loraplex ships no unmerge, and this is why (0x07C). A finiteness check sees
    nothing.
    """
    clean, delta = np.float16(2048), np.float16(1)
    merged = np.float16(clean + delta)
    unmerged = np.float16(merged - delta)
    assert (float(merged), float(unmerged)) == (2048.0, 2047.0)
    assert np.isfinite([merged, unmerged]).all()
    assert unmerged != clean


class Bridge:
    """The engine calls of a service, over an engine that is stepped until it answers."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self._serial = rig, 1_000

    async def call(self, message: Any) -> dict[str, Any]:
        self._serial += 1
        self.rig.mailbox.inbox.append(msgspec.structs.replace(message, call_id=self._serial))
        while self._serial not in self.rig.mailbox.replies:
            self.rig.step()
            await asyncio.sleep(0)
        reply = self.rig.mailbox.replies[self._serial]
        if reply.code is not None:
            raise error_for(ErrorCode(reply.code), reply.message)
        return reply.body


def served(test: Callable[[AdapterService, Rig], Awaitable[None]], depth: int) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            rig = Rig(depth=depth, pages=40, max_adapter_slots=12)
            service = AdapterService(Bridge(rig), AdapterCatalog(frozenset({"base"})), Preparing())
            await test(service, rig)
            rig.run()
            await service.settled()
            await service.close()

    asyncio.run(bounded())


async def at_catalog_8(service: AdapterService) -> None:
    """Six other aliases in slots 1 to 6, one republication, then tenant-a: slot 7 at catalog generation 8."""
    for index in range(6):
        await service.add(named(f"other-{index}"), f"other-{index}")
    await service.swap(named("other-0"), "other-0#again")
    await service.add(named("tenant-a"), "old")
    assert service.generation == 8


def tokens_of(rig: Rig, key: str, count: int) -> list[int]:
    number = adapter_number(digest_words(rig.engine.state.adapters[key].kernel_digest))
    return expected_tokens(np.array(PROMPT, dtype=np.int32), number, count, VOCAB)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_hot_swap_publishes_slot_8_beside_slot_7(depth: int) -> None:
    async def test(service: AdapterService, rig: Rig) -> None:
        await at_catalog_8(service)
        state = rig.engine.state
        old = state.adapters[service.resolve("tenant-a").key]
        assert (old.slot, service.generation) == (7, 8)
        at = old.generation
        expected_old = tokens_of(rig, old.key, 12)
        rig.submit("request-old", PROMPT, old.key, max_tokens=12)
        for _ in range(4):
            rig.step()
        lease = state.records["request-old"].lease
        assert lease is not None
        assert (lease.slot, lease.generation, old.refcount) == (7, at, 1)

        await service.swap(named("tenant-a"), "new", expected=1)
        new = state.adapters[service.resolve("tenant-a").key]
        assert (new.slot, service.generation) == (8, 9)
        assert "request-old" in state.records
        expected_new = tokens_of(rig, new.key, 6)
        rig.submit("request-new", PROMPT, new.key, max_tokens=6)
        rig.step()
        assert (lease.slot, lease.generation, lease.valid) == (7, at, True)
        await service.settled()
        rig.run()
        assert rig.mailbox.tokens["request-old"] == expected_old
        assert rig.mailbox.tokens["request-new"] == expected_new
        assert old.state is AdapterState.ABSENT  # reclaimed with its last request
        assert new.state is AdapterState.IDLE
        assert state.directory.generation(7) > at  # no handle to slot 7 at the old generation is valid again

    served(test, depth)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failure_before_publication_leaves_everything(depth: int) -> None:
    async def test(service: AdapterService, rig: Rig) -> None:
        await at_catalog_8(service)
        state = rig.engine.state
        old = state.adapters[service.resolve("tenant-a").key]
        shadow = state.directory.generation(8)
        rig.submit("request-old", PROMPT, old.key, max_tokens=30)
        expected = tokens_of(rig, old.key, 30)
        prepared = await Preparing()("new")
        rig.faults.torn_copies.add(adapter_number(digest_words(prepared.register.kernel_digest)))
        with pytest.raises(LoraplexError) as caught:
            await service.swap(named("tenant-a"), "new")
        assert caught.value.code is ErrorCode.ADAPTER_LOAD_FAILED
        assert service.generation == 8
        assert state.adapters[service.resolve("tenant-a").key] is old
        assert old.slot == 7
        assert state.directory.generation(8) > shadow  # the shadow slot came back under another generation
        assert 8 not in state.occupied
        rig.run()
        assert rig.mailbox.tokens["request-old"] == expected

    served(test, depth)
