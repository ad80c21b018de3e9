"""Loads ahead of waiting requests: first fit within the joint ledger, given up while nothing was copied."""

from __future__ import annotations

import pytest
from tests.engine.rig import both_depths
from tests.engine.slow import SlowRig, make_cold
from tests.prompts import prompt

from loraplex.core.events import PrefetchWithdrawn
from loraplex.core.messages import Abort, Inspect
from loraplex.memory.residency import AdapterState


def withdrawn(rig: SlowRig) -> list[tuple[str, int, str]]:
    return [(e.adapter, e.pages, e.reason) for e in rig.log.events if isinstance(e, PrefetchWithdrawn)]


def waiting(depth: int, pages: int, sizes: dict[str, int], **changes: int) -> SlowRig:
    """One request of the base runs and may take one more page; these adapters are cold."""
    rig = SlowRig(depth=depth, pages=pages, **{"max_requests": 1, **changes})
    for key, size in sizes.items():
        rig.register(key, size)
    rig.run()
    make_cold(rig, *sizes)
    rig.submit("runs", prompt(4, 1), None, max_tokens=24)
    rig.step()
    rig.step()
    rig.device.held = True
    return rig


def go_on(rig: SlowRig) -> None:
    rig.device.held = False
    rig.run()


@both_depths
def test_a_queue_loads_ahead_what_fits(depth: int) -> None:
    """0x09F: 8 pages are available, 1 is growth, 1 stays; of B 3, C 4 and D 2 that leaves B and D."""
    rig = waiting(depth, 11, {"B": 3, "C": 4, "D": 2})
    assert rig.free == 8
    for index, key in enumerate("BBCD"):
        rig.submit(f"w{index}", prompt(4, index), key, max_tokens=2)
    rig.step()
    assert [rig.state_of(key) for key in "BCD"] == [
        AdapterState.LOADING,
        AdapterState.HOST_READY,
        AdapterState.RESERVED,
    ]
    assert rig.free == 3
    go_on(rig)
    rig.assert_answered(*rig.prompts)
    assert withdrawn(rig) == []


@both_depths
def test_a_load_that_nobody_waits_for_any_more_is_given_up(depth: int) -> None:
    """Both requests leave; one copy has begun and becomes an ordinary entry, the other one never begins."""
    rig = waiting(depth, 33, {"a": 3, "b": 4})
    before = rig.free
    rig.submit("wa", prompt(4, 2), "a", max_tokens=2)
    rig.submit("wb", prompt(4, 3), "b", max_tokens=2)
    rig.step()
    assert (rig.state_of("a"), rig.state_of("b")) == (AdapterState.LOADING, AdapterState.RESERVED)
    assert rig.free == before - 7
    rig.mailbox.inbox += [Abort("wa"), Abort("wb")]
    rig.step()
    assert rig.state_of("b") is AdapterState.HOST_READY
    assert withdrawn(rig) == [("b", 4, "unwanted")]
    rig.device.held = False
    rig.until("a", AdapterState.PUBLISHED)
    rig.submit("again", prompt(4, 4), "b", max_tokens=2)
    figures = rig.call(Inspect)
    rig.run()
    rig.assert_answered("runs", "again")
    assert rig.body(figures)["prefetch"]["withdrawn"] == 1  # type: ignore[index]


@both_depths
def test_a_load_is_kept_for_the_second_of_two_who_wait(depth: int) -> None:
    rig = waiting(depth, 33, {"a": 3, "b": 4})
    for name, key in (("wa", "a"), ("one", "b"), ("two", "b")):
        rig.submit(name, prompt(4, 2), key, max_tokens=2)
    rig.step()
    assert rig.state_of("b") is AdapterState.RESERVED
    rig.mailbox.inbox.append(Abort("one"))
    rig.step()
    assert rig.state_of("b") is AdapterState.LOADING
    assert withdrawn(rig) == []
    go_on(rig)
    rig.assert_answered("runs", "wa", "two")


@pytest.mark.parametrize(("pages", "size", "length"), [(12, 3, 8), (12, 4, 4)])
def test_pages_that_running_requests_come_to_want_are_given_back(pages: int, size: int, length: int) -> None:
    """A copy that a request waits for is started first; meanwhile the running one grows."""
    rig = SlowRig(depth=1, pages=pages, max_requests=2)
    rig.register("x", 2)
    rig.register("w", size)
    rig.run()
    make_cold(rig, "x", "w")
    rig.submit("runs", prompt(length, 1), None, max_tokens=30)
    rig.step()
    rig.submit("x", prompt(4, 2), "x", max_tokens=4)
    rig.submit("w", prompt(4, 3), "w", max_tokens=4)
    for _ in range(8):
        rig.step()
    assert withdrawn(rig) == [("w", size, "pages")]
    rig.run()
    rig.assert_answered("runs", "x", "w")
