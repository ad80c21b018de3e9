"""The runtime's rows of 0x07K's failure table, and faults that the simulator found, at both depths.

Other rows: unmerge is a demonstration (tests/exact/test_hot_swap.py), a whole-model merge is not shipped,
true ranks have no tail to zero (tests/ops), and a missing key is refused by name when an artifact is read
(tests/artifact).
"""

from __future__ import annotations

from tests.engine.rig import VOCAB, Rig, both_depths

from loraplex.core.events import PlanDiscarded, RequestPreempted
from loraplex.core.messages import Abort, LoadAdapter, PinAdapter, RemoveAdapter, SetLimits
from loraplex.core.plan import BatchPlan, adapter_pairs
from loraplex.engine.deltas import digest_words
from loraplex.memory.residency import AdapterState
from loraplex.sim.device import CopyFate
from loraplex.sim.tokens import adapter_number

PROMPT = [1, 2, 3, 4, 5]


class Watched(Rig):
    """A rig that keeps each plan's adapter traffic."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)  # type: ignore[arg-type]
        self.copied: list[tuple[int, int]] = []
        self.published: list[tuple[int, int]] = []
        self.bound: list[tuple[int, int]] = []
        self.device.on_plan = self._watch

    def _watch(self, plan: BatchPlan, _: bytes) -> None:
        self.copied += adapter_pairs(plan.copies)
        self.published += adapter_pairs(plan.publishes)
        self.bound += [(s, g) for s, g in adapter_pairs(plan.requests) if s]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


@both_depths
def test_nothing_binds_before_the_copy_event(depth: int) -> None:
    rig = Watched(depth=depth)
    rig.faults.report = lambda: (12, 1)
    rig.register("a")
    rig.submit("r", PROMPT, "a")
    rig.submit("base", PROMPT)
    rig.steps(10)
    assert rig.copied
    assert not rig.published
    assert not rig.bound
    assert rig.mailbox.tokens["base"]  # nobody else waits for it
    rig.run()
    assert rig.published == rig.copied[-1:]
    rig.assert_answered("r", "base")


@both_depths
def test_a_slot_in_use_by_a_launch_is_not_reclaimed_although_nobody_leases_it(depth: int) -> None:
    rig = Watched(depth=depth)
    rig.register("a")
    rig.run()
    rig.submit("r", PROMPT, "a", max_tokens=20)
    rig.steps(4)
    entry = rig.engine.state.adapters["a"]
    rig.mailbox.inbox += [RemoveAdapter(70, "a"), Abort("r")]
    rig.step()
    if depth:
        assert rig.engine.state.flights or entry.state is AdapterState.ABSENT
    assert (70 in rig.mailbox.replies) == (entry.state is AdapterState.ABSENT)
    assert (
        entry.state is AdapterState.ABSENT
        or entry.last_launch > rig.engine.state.committed_launch
        or entry.refcount
    )
    rig.run()
    assert rig.mailbox.replies[70].body["state"] == "absent"


@both_depths
def test_a_revision_that_waiting_requests_lease_stays_although_no_launch_names_it(depth: int) -> None:
    rig = Watched(depth=depth, max_requests=1)
    rig.register("a")
    rig.run()
    rig.submit("first", PROMPT, max_tokens=12)
    rig.steps(2)
    rig.submit("second", PROMPT, "a")
    rig.mailbox.inbox.append(RemoveAdapter(70, "a"))
    rig.steps(5)
    assert 70 not in rig.mailbox.replies
    rig.run()
    rig.assert_answered("first", "second")
    assert rig.mailbox.replies[70].body["state"] == "absent"


@both_depths
def test_a_reused_slot_never_has_the_same_generation(depth: int) -> None:
    rig = Watched(depth=depth, max_adapter_slots=2)
    for key in "ab":
        rig.register(key)
    for index in range(6):
        rig.submit(f"r{index}", PROMPT, "ab"[index % 2])
        rig.run()
    rig.assert_answered(*rig.prompts)
    assert {slot for slot, _ in rig.published} == {1}
    assert len(set(rig.published)) == len(rig.published) >= 6


@both_depths
def test_a_failed_copy_is_never_published_and_its_slot_is_never_named(depth: int) -> None:
    rig = Watched(depth=depth)
    number = adapter_number(digest_words(rig.kernel_digest("bad")))
    rig.faults.fate = lambda image: (CopyFate.CORRUPT if image == number else CopyFate.INTACT, 1)
    call = rig.register("bad")
    rig.register("good")
    rig.submit("g", PROMPT, "good")
    rig.run()
    assert rig.mailbox.replies[call].code == "adapter_load_failed"
    rig.assert_answered("g")
    failed = set(rig.copied) - set(rig.published)
    assert len(failed) == 3  # three attempts, each under a generation of its own
    assert failed.isdisjoint(rig.bound)
    counts = rig.engine.state.pool.counts()
    assert (counts.adapter, counts.reserved) == (rig.engine.state.adapters["good"].page_count, 0)


# ---------------------------------------------------------------- found by the simulator


@both_depths
def test_a_removed_adapter_loses_its_pins(depth: int) -> None:
    """A pin follows the name; pages of a removed revision must not be held for ever."""
    rig = Watched(depth=depth, pages=11, max_requests=2)
    rig.register("old", pages=4)
    rig.run()
    rig.mailbox.inbox.append(PinAdapter(60, "old", True))
    rig.run()
    rig.submit("running", PROMPT, max_tokens=12)
    rig.steps(2)
    rig.submit("waiting", PROMPT, "old")
    entry = rig.engine.state.adapters["old"]
    rig.mailbox.inbox.append(RemoveAdapter(61, "old"))
    rig.step()
    assert entry.pin_count == 0
    rig.run()
    rig.assert_answered("running", "waiting")


@both_depths
def test_pins_that_leave_no_slot_refuse_rather_than_wait_for_ever(depth: int) -> None:
    rig = Watched(depth=depth, max_adapter_slots=3)
    for key in "abc":
        rig.register(key)
    rig.run()
    rig.mailbox.inbox.append(SetLimits(59, resident_adapters=2))
    for index, key in enumerate("ab"):
        rig.mailbox.inbox.append(PinAdapter(60 + index, key, True))
    rig.run()
    rig.submit("r", PROMPT, "c")
    rig.run()
    assert [end.code for end in rig.mailbox.ended["r"]] == ["adapter_slots_exhausted"]


@both_depths
def test_young_rows_without_pages_do_not_starve_an_older_request(depth: int) -> None:
    """One row a step, a pool that holds one of them, the younger decoding: it has to give way."""
    rig = Watched(depth=depth, pages=14, page_tokens=1, token_budget=1, growth_horizon=0, max_requests=4)
    rig.submit("young", [1, 2], max_tokens=9)
    rig.steps(3)
    rig.submit("old", PROMPT, max_tokens=8)
    rig.engine.state.records["young"].ticket = rig.engine.state.records["young"].ticket.__class__(
        0, 99, "young"
    )
    rig.engine.state.table.order[rig.engine.state.records["young"].slot] = 99
    rig.run()
    rig.assert_answered("young", "old")


@both_depths
def test_a_failed_plan_does_not_bring_back_a_copy_that_has_ended(depth: int) -> None:
    """The plan that starts a copy fails after the copy: its deltas return, and the copy must not."""
    rig = Watched(depth=depth)
    rig.submit("keeps_going", PROMPT, max_tokens=40)
    rig.steps(3)
    rig.faults.fail_plans.add(rig.engine.state.newest_launch + 1)
    rig.register("a")
    rig.mailbox.inbox.append(LoadAdapter(80, "a"))
    rig.run()
    rig.submit("r", PROMPT, "a")
    rig.run()
    rig.assert_answered("r")
    assert not [e for e in rig.log.events if isinstance(e, PlanDiscarded) and "failed" not in e.message]


@both_depths
def test_preemption_keeps_lease_and_output_under_adapters(depth: int) -> None:
    rig = Watched(depth=depth, pages=17, growth_horizon=0)
    rig.register("a")
    for index in range(6):
        rig.submit(f"r{index}", [index, 2, 3, 4, 5, VOCAB - 1], "a" if index % 2 else None, max_tokens=20)
    rig.run()
    rig.assert_answered(*rig.prompts)
    assert any(isinstance(event, RequestPreempted) for event in rig.log.events)


@both_depths
def test_a_pin_without_room_is_served_when_a_request_leaves_some(depth: int) -> None:
    rig = Watched(depth=depth, max_adapter_slots=2, scrub=False)  # room for one
    rig.register("a")
    rig.run()
    rig.submit("r", PROMPT, "a", max_tokens=30)
    rig.steps(3)
    rig.register("b")
    rig.mailbox.inbox.append(PinAdapter(90, "b", True))
    rig.steps(3)
    entry = rig.engine.state.adapters["b"]
    assert not rig.mailbox.ended.get("r")
    assert (rig.mailbox.replies[90].code, entry.resident) == (None, False)
    rig.run()  # nobody says anything more: the end of the request is what moves it on
    rig.assert_answered("r")
    assert entry.resident
