"""Checks of copies that fail, for the CPU's and for a device's: nobody else notices, nothing is lost."""

from __future__ import annotations

from dataclasses import replace

from tests.model.drive import Images
from tests.model.rig import Rig, assert_answers
from tests.model.tuned import CONFIGS
from tests.prompts import prompt

from loraplex.core.layout import AdapterImage
from loraplex.core.messages import RemoveAdapter

NANOSECONDS_A_STEP = 2_000_000
"""Of the virtual clock: pauses before a retry pass within a few steps."""


class TornOnce(Images):
    """The first opening of each image finds a flipped bit in its last page."""

    def __init__(self) -> None:
        super().__init__()
        self.torn: set[str] = set()

    def open(self, kernel_digest: str) -> AdapterImage:
        image = super().open(kernel_digest)
        if kernel_digest in self.torn:
            return image
        self.torn.add(kernel_digest)
        pages = image.pages.copy()
        pages[-1, 0] ^= 1
        return replace(image, pages=pages)


def step(rig: Rig) -> None:
    rig.clock.now += NANOSECONDS_A_STEP
    rig.engine.step()


def run(rig: Rig) -> None:
    """Step until nothing is under way, and check the books."""
    for _ in range(2000):
        step(rig)
        if rig.engine.idle and not rig.mailbox.inbox:
            rig.engine.check()
            return
    raise AssertionError("the engine did not come to rest")


def check_damaged_copies(rig: Rig) -> None:
    """Every adapter's first copy fails, however it fails: base requests get a token a step, all are answered
    in the end.
    """
    running = {f"base{i}": (prompt(5 + i, i), None) for i in range(2)}
    for name, (tokens, _) in running.items():
        rig.submit(name, tokens, None, 40)
    while any(not rig.mailbox.tokens.get(name) for name in running):
        step(rig)
    cold = {f"cold{i}": (prompt(4 + i, 10 + i), name) for i, name in enumerate(CONFIGS)}
    for name, (tokens, adapter) in cold.items():
        rig.submit(name, tokens, adapter, 5)
    while not all(name in rig.mailbox.ended for name in running):
        before = {name: len(rig.mailbox.tokens[name]) for name in running if name not in rig.mailbox.ended}
        step(rig)
        for name, count in before.items():
            assert len(rig.mailbox.tokens[name]) == count + 1
    run(rig)
    assert_answers(rig, running, 40)
    assert_answers(rig, cold, 5)
    assert rig.engine.state.traffic.loads == len(CONFIGS)


def check_removal_under_load(rig: Rig) -> None:
    """An adapter is taken away while its requests run and another takes its pages: each answers as
    it began.
    """
    first = {f"a{i}": (prompt(5, i), "all-r4") for i in range(3)}
    for name, (tokens, adapter) in first.items():
        rig.submit(name, tokens, adapter, 20)
    while any(not rig.mailbox.tokens.get(name) for name in first):
        step(rig)
    rig.mailbox.inbox.append(RemoveAdapter(99, "all-r4"))
    second = {f"b{i}": (prompt(6, 20 + i), "rs-r16") for i in range(3)}
    for name, (tokens, adapter) in second.items():
        rig.submit(name, tokens, adapter, 20)
    run(rig)
    assert_answers(rig, first, 20)
    assert_answers(rig, second, 20)
    assert rig.mailbox.replies[99].code is None
