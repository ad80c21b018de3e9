"""Every malformed use of the memory API is refused with the code of the invariant that it breaks, and changes
nothing.

Each code of the corpus is reached again through a running engine's port: the state is broken in one place,
and the engine's own detector speaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.engine.rig import Rig
from tests.memory.corpus import Case, all_cases

from loraplex.core.errors import ErrorCode, LoraplexError
from loraplex.core.messages import LoadAdapter, PinAdapter
from loraplex.memory.pages import PageState
from loraplex.memory.residency import AdapterState
from loraplex.memory.transaction import TransactionState

CASES = all_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_refused_with_its_code(case: Case) -> None:
    with pytest.raises(LoraplexError) as caught:
        case.act()
    assert caught.value.code is case.code, caught.value.message


def test_the_corpus_is_as_large_as_it_claims(capsys: pytest.CaptureFixture[str]) -> None:
    """0x05H names 59 and 0x07L 86 one-field failures; a (record, field, fault) counts once."""
    assert len({case.name for case in CASES}) == len(CASES)
    by_record = Counter(case.record.partition(".")[0] for case in CASES)
    by_code = Counter(case.code.value for case in CASES)
    with capsys.disabled():
        print(f"\nmalformed memory uses: {len(CASES)}; by record {dict(by_record)}; by code {dict(by_code)}")
    assert by_record["pages"] + by_record["pool"] + by_record["transaction"] > 59
    assert (
        sum(
            by_record[name]
            for name in ("residency", "slot_lease", "revision_lease", "handle", "directory", "host_image")
        )
        > 86
    )


# ---------------------------------------------------------------- the same codes through a running engine


def running() -> Rig:
    """Two adapters on the device, a request running on each, one more waiting."""
    rig = Rig(depth=1, pages=33, scrub=False)
    rig.register("a")
    rig.register("b")
    rig.run()
    rig.submit("ra", [1, 2, 3, 4, 5], "a", max_tokens=30)
    rig.submit("rb", [1, 2, 3, 4, 5], "b", max_tokens=30)
    for _ in range(4):
        rig.step()
    return rig


def loading() -> Rig:
    """A load under way, its copy not begun."""
    from loraplex.engine.residency import loads

    rig = running()
    real, loads.pump = loads.pump, lambda state: None
    try:
        rig.register("c")
        rig.mailbox.inbox.append(LoadAdapter(77, "c"))
        rig.step()
    finally:
        loads.pump = real
    assert rig.engine.state.loads
    return rig


def break_page_state(rig: Rig) -> None:
    state = rig.engine.state
    state.pool._state[list(state.pool.free_pages())] = PageState.RESERVED


def break_page_owner(rig: Rig) -> None:
    state = rig.engine.state
    state.pool._owner[state.adapters["a"].pages] += 1


def break_fence(rig: Rig) -> None:
    state = rig.engine.state
    job = next(iter(state.loads.values()))
    state.pool._fence[job.transaction.adapter_pages] = 1 << 40
    state.committed_launch = (1 << 40) - 1
    state.pool.require_fence(job.transaction.adapter_pages, state.committed_launch)


def break_conservation(rig: Rig) -> None:
    rig.engine.state.pool._free.pop()


def break_transition(rig: Rig) -> None:
    job = next(iter(rig.engine.state.loads.values()))
    job.entry.state = AdapterState.ABSENT


def break_transaction(rig: Rig) -> None:
    job = next(iter(rig.engine.state.loads.values()))
    job.transaction.state = TransactionState.COMMITTED


def break_lease_count(rig: Rig) -> None:
    rig.engine.state.adapters["a"].refcount += 1


def break_underflow(rig: Rig) -> None:
    rig.mailbox.inbox.append(PinAdapter(50, "a", False))


def break_generation(rig: Rig) -> None:
    state = rig.engine.state
    state.directory._generation[state.adapters["a"].slot] += 1


def break_host(rig: Rig) -> None:
    rig.engine.state.host.used_bytes += 1


def break_eviction(rig: Rig) -> None:
    state = rig.engine.state
    entry = state.adapters["a"]
    from loraplex.memory.transaction import Demand, Transaction

    Transaction.reserve(900, state.pool, Demand(1, 0, 0, 0), victims=[entry])


def break_slots(rig: Rig) -> None:
    state = rig.engine.state
    while state.directory.free:
        state.directory.take()
    state.directory.take()


DETECTORS: dict[ErrorCode, tuple[Callable[[], Rig], Callable[[Rig], Any]]] = {
    ErrorCode.PAGE_STATE: (running, break_page_state),
    ErrorCode.PAGE_OWNER: (running, break_page_owner),
    ErrorCode.PAGE_FENCE: (loading, break_fence),
    ErrorCode.PAGE_CONSERVATION: (running, break_conservation),
    ErrorCode.RESIDENCY_TRANSITION: (loading, break_transition),
    ErrorCode.TRANSACTION_STATE: (loading, break_transaction),
    ErrorCode.LEASE_MISMATCH: (running, break_lease_count),
    ErrorCode.LEASE_UNDERFLOW: (running, break_underflow),
    ErrorCode.STALE_SLOT_GENERATION: (running, break_generation),
    ErrorCode.HOST_TIER_STATE: (running, break_host),
    ErrorCode.EVICTION_INELIGIBLE: (running, break_eviction),
    ErrorCode.ADAPTER_SLOTS_EXHAUSTED: (running, break_slots),
}


def test_every_code_of_the_corpus_has_a_detector_in_the_engine() -> None:
    assert {case.code for case in CASES} == set(DETECTORS)


@pytest.mark.parametrize("code", DETECTORS, ids=lambda code: code.value)
def test_the_running_engine_notices(code: ErrorCode) -> None:
    """By its step, its answer to a call, or its check of its own books."""
    make, broken = DETECTORS[code]
    rig = make()
    spoken: list[str] = []
    try:
        broken(rig)
        for _ in range(60):
            rig.clock.now += 1_000
            rig.engine.step()
            if not rig.engine.state.records:
                break
            if code in (
                ErrorCode.PAGE_CONSERVATION,
                ErrorCode.PAGE_OWNER,
                ErrorCode.LEASE_MISMATCH,
                ErrorCode.STALE_SLOT_GENERATION,
                ErrorCode.HOST_TIER_STATE,
            ):
                rig.engine.check()
    except LoraplexError as error:
        spoken.append(error.code.value)
    spoken += [reply.code for reply in rig.mailbox.replies.values() if reply.code]
    spoken += [ended.code for all_ended in rig.mailbox.ended.values() for ended in all_ended if ended.code]
    assert code.value in spoken
    assert np.unique(rig.engine.state.pool._owner).size  # still there to be looked at
