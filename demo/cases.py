"""Owns what a case and a task are, the split into training and held-out cases, and the held-out files.

A task draws (key, prompt, answer) from a random generator. The key decides the side of the split, so that a
held-out case differs from every training case in what it is about (the date, the number, the query), not
only in its wording. Never trains and never judges an answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

ADAPTERS: Final = Path(__file__).parent / "adapters"
HELDOUT_FILE: Final = "heldout.jsonl"
HELDOUT_CASES: Final = 64
HELDOUT_SHARE: Final = 8
"""One key in so many is kept out of training."""

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a task draws. `key` is what the case is about. turns: the conversation, where the prompt is none of one turn."""

    key: str
    prompt: str
    answer: str
    turns: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its right answer, as messages of the OpenAI chat format.

    tools: what a server is given in place of the system message, which says the same.
    """

    messages: tuple[Message, ...]
    expected: str
    checker: str
    max_tokens: int
    tools: tuple[dict[str, Any], ...] = ()

    def bare(self) -> Case:
        """The same case without its system message: the adapter alone has to know the task."""
        kept = tuple(m for m in self.messages if m["role"] != "system")
        return replace(self, messages=kept, tools=())


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an adapter is trained; the fields are PEFT's, with one-cycle learning rate and AdamW.

    invocation: text that switches an activated adapter on, with which its conversations end; none for one that is always on.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    invocation: str = ""
    steps: int = 200
    batch: int = 16
    learning_rate: float = 1e-3
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Task:
    """A demo task: its instruction, its cases, its checker and its recipe."""

    name: str
    title: str
    data: str
    instruction: str
    checker: str
    max_tokens: int
    recipe: Recipe
    draw: Callable[[Random], Draft]
    tools: tuple[dict[str, Any], ...] = ()

    def case(self, draft: Draft) -> Case:
        """The draft as a case, the instruction before its prompt or after its conversation."""
        instruction = {"role": "system", "content": self.instruction}
        if draft.turns:
            messages = (*draft.turns, instruction)
        else:
            messages = (instruction, {"role": "user", "content": draft.prompt})
        return Case(messages, draft.answer, self.checker, self.max_tokens, self.tools)

    def training_drafts(self, seed: int) -> Iterator[Draft]:
        """Endless training drafts; the same for the same seed."""
        rng = Random(f"{self.name} training {seed}")
        while True:
            draft = self.draw(rng)
            if not is_heldout(draft.key):
                yield draft

    def heldout_drafts(self, count: int = HELDOUT_CASES) -> list[Draft]:
        """`count` held-out drafts, no prompt twice; always the same."""
        rng = Random(f"{self.name} heldout")
        drafts: dict[str, Draft] = {}
        while len(drafts) < count:
            draft = self.draw(rng)
            if is_heldout(draft.key):
                drafts.setdefault(draft.prompt, draft)
        return list(drafts.values())


def is_heldout(key: str) -> bool:
    """Whether cases about `key` are kept for evaluation."""
    return hashlib.sha256(key.encode()).digest()[0] % HELDOUT_SHARE == 0


def write_heldout(task: Task, folder: Path) -> list[Case]:
    """Write and return the task's held-out cases, one JSON object a line."""
    cases = [task.case(draft) for draft in task.heldout_drafts()]
    rows = (
        {
            "messages": list(c.messages),
            "expected": c.expected,
            "checker": c.checker,
            "max_tokens": c.max_tokens,
            **({"tools": list(c.tools)} if c.tools else {}),
        }
        for c in cases
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / HELDOUT_FILE).write_text(text, encoding="utf-8")
    return cases


def read_heldout(folder: Path) -> list[Case]:
    """Held-out cases of an adapter folder."""
    rows = [json.loads(line) for line in (folder / HELDOUT_FILE).read_text(encoding="utf-8").splitlines()]
    return [
        Case(tuple(r["messages"]), r["expected"], r["checker"], r["max_tokens"], tuple(r.get("tools", ())))
        for r in rows
    ]


def adapter_folders(root: Path = ADAPTERS) -> dict[str, Path]:
    """Adapter folders with held-out cases, by name, in the order of their names."""
    return {p.parent.name: p.parent for p in sorted(root.glob(f"*/{HELDOUT_FILE}"))}
