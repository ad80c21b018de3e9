"""An offline batch's order: every prompt once, whatever was measured, and nothing is measured twice."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.api.grouped import COUNTS, LENGTHS, REPEATS, ROWS, Grouper, Task


class Model:
    """Answers at once and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str | None]] = []

    def generate(self, prompts: list[Any], name: str | None, sampling: object) -> None:
        self.asked.append((len(prompts), len(prompts[0]), name))


BASE = Task("", None, None)
FIRST, ALIKE, OTHER = Task("k1", (4, 2), "a@1"), Task("k2", (4, 2), "b@1"), Task("k3", (8, 2), "c@3")


@pytest.mark.parametrize(
    "tasks",
    [[BASE], [FIRST, BASE, FIRST, OTHER, ALIKE] * 7, [], [OTHER] * 130],
    ids=["base", "mixed", "none", "one"],
)
def test_every_prompt_is_asked_once(tasks: list[Task]) -> None:
    lengths = [1 + 37 * index % 300 for index in range(len(tasks))]
    order = Grouper(97, 512).order(tasks, lengths, Model().generate)
    assert sorted(order) == list(range(len(tasks)))
    assert order != list(range(len(tasks))) or len(tasks) < 2


def test_a_kind_is_measured_once_and_only_when_it_comes() -> None:
    grouper, model = Grouper(97, 512), Model()
    points = sum(count == 1 or count * length <= ROWS for count in COUNTS for length in LENGTHS)
    grouper.order([BASE, BASE], [5, 6], model.generate)
    assert [name for _, _, name in model.asked] == [None] * points * REPEATS
    model.asked.clear()
    grouper.order([FIRST, ALIKE, BASE], [5, 6, 7], model.generate)
    assert {name for _, _, name in model.asked} == {"a@1"}
    assert len(model.asked) == (1 + points) * REPEATS
    model.asked.clear()
    grouper.order([ALIKE, OTHER], [5, 6], model.generate)
    assert {name for _, _, name in model.asked} == {"c@3"}


def test_measured_prompts_fit_into_the_model() -> None:
    model = Model()
    Grouper(97, 32).order([BASE], [31], model.generate)
    assert {length for _, length, _ in model.asked} == {16}
    Grouper(97, 8).order([BASE], [5], model.generate)
    assert model.asked[-1][1] == 7
