"""A step that could only find again what the last one found leaves the processor; nobody waits for it, and
nothing counts it.
"""

from __future__ import annotations

import pytest
from tests.engine.chains import Chains, chained
from tests.engine.rig import Rig, both_depths
from tests.engine.slow import SlowRig
from tests.prompts import prompt

from loraplex.engine.deltas import digest_words
from loraplex.engine.request_state import Stage
from loraplex.engine.residency import hosting, transitions
from loraplex.schedule.policy import DEFICIT
from loraplex.sim.tokens import adapter_number

LATE = 20


@both_depths
def test_a_step_that_only_a_grammar_could_move_on_pauses(depth: int) -> None:
    grammars = Chains(late=LATE)
    rig = Rig(depth=depth, grammars=grammars)
    rig.submit("held", prompt(7, 1), grammar="5", max_tokens=20)
    rig.run()
    # The first step takes the message, the second finds nothing to do; from the third on that is known
    # beforehand.
    assert rig.mailbox.pauses == LATE - 1
    for _ in range(3):
        rig.step()  # nothing is open: such a step waits for a message, if it is told to
    grammars.late = 3
    rig.submit("later", prompt(7, 1), grammar="5", max_tokens=20)
    rig.submit("free", prompt(7, 2), max_tokens=30)
    rig.run()
    assert rig.mailbox.pauses == LATE - 1  # somebody ran all the time
    assert rig.mailbox.tokens["held"] == rig.mailbox.tokens["later"] == chained(prompt(7, 1), 5)


@both_depths
@pytest.mark.parametrize("failing", ["fetch", "copy"])
def test_the_pause_before_a_retry_is_no_busy_one_and_makes_nobody_wait(depth: int, failing: str) -> None:
    """It may be any number of steps long: none of them counts as a step in which the request was
    passed over.
    """
    rig = SlowRig(depth=depth, load_retry_ns=1000 * 2 * DEFICIT.bound)
    digest = rig.kernel_digest("a")
    rig.register("a")
    rig.run()
    state = rig.engine.state
    entry = state.adapters["a"]
    transitions.evict(state, entry)
    rig.run()
    if failing == "fetch":
        hosting.drop(state, digest)
        rig.loader.fail[digest] = "adapter_load_failed"
    else:
        rig.faults.torn_copies.add(adapter_number(digest_words(digest)))
    rig.submit("r", prompt(5, 1), "a")
    while not entry.load_failures:
        rig.step()
    rig.loader.fail.clear()
    rig.faults.torn_copies.clear()
    before = rig.mailbox.pauses
    for _ in range(DEFICIT.bound + 8):
        rig.step()
    assert rig.mailbox.pauses - before > DEFICIT.bound
    assert rig.clock.now < entry.retry_at_ns
    assert state.records["r"].skipped == 0
    rig.submit("younger", prompt(5, 2))
    rig.step()
    assert state.records["younger"].stage is Stage.RUNNING
    rig.run()
    rig.assert_answered("r", "younger")
