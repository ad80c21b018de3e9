"""Offline batches in PetS' order: costs measured once on this engine, and the recurrences over them.

The shared operators' cost is that of prompts of the base; a kind of adapter costs what the same prompts take
longer with one of it. Kinds are told apart by ranks and modules. Prompts are priced, answers are not: nobody
knows how long they get. Owns the tables; who generates is the caller's.

Specification: 0x09D.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.catalog.records import Revision
from loraplex.core.request import SamplingParams
from loraplex.schedule.grouping import Cost, CostTable, group

COUNTS: Final = (1, 4, 16)
LENGTHS: Final = (16, 64, 256)
ROWS: Final = 512
"""Prompt tokens of a measurement at most; larger batches are priced in proportion: they take more steps."""
REPEATS: Final = 2
"""Measurements of each point, of which the shortest counts."""
PROBE: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, alora_fallback="base")
"""A prompt and nothing else."""

Generate = Callable[[list[Any], str | None, SamplingParams], object]
"""`LLM.generate`: prompts, an adapter, sampling."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a prompt runs. kind: of its adapter, which costs as others of the kind do. name: None for the
    base.
    """

    key: str
    kind: Hashable
    name: str | None


def task_of(revision: Revision | None, known: Mapping[str, PreparedAdapter]) -> Task:
    """The task of a prompt with this adapter, or of the base. known: prepared adapters by key."""
    if revision is None:
        return Task("", None, None)
    prepared = known.get(revision.key)
    kind = None if prepared is None else (prepared.register.ranks, prepared.register.modules)
    return Task(revision.key, kind, revision.name)


class Grouper:
    """Cost tables of one engine, measured when they are first needed."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self._vocab_size = vocab_size
        self._lengths = tuple(n for n in LENGTHS if n < max_model_len) or (max(max_model_len - 1, 1),)
        self._shared: CostTable | None = None
        self._own: dict[Hashable, CostTable] = {}

    def order(self, tasks: Sequence[Task], lengths: Sequence[int], generate: Generate) -> list[int]:
        """The prompts in the order in which they are best asked. Measures what was not measured before."""
        if self._shared is None:
            self._shared = self._table(lambda count, length: self._seconds(count, length, None, generate))
        own: dict[str, Cost] = {}
        for task in tasks:
            if task.key not in own:
                own[task.key] = _free if task.name is None else self._kind(task, self._shared, generate)
        return group([task.key for task in tasks], lengths, self._shared, own).order

    def _kind(self, task: Task, shared: CostTable, generate: Generate) -> CostTable:
        found = self._own.get(task.kind)
        if found is None:
            self._seconds(1, self._lengths[0], task.name, generate)  # brings it onto the device

            def longer(count: int, length: int) -> float:
                return max(self._seconds(count, length, task.name, generate) - shared(count, length), 0.0)

            found = self._own[task.kind] = self._table(longer)
        return found

    def _seconds(self, count: int, length: int, name: str | None, generate: Generate) -> float:
        """How long so many prompts take, of which nothing is cached."""
        took = []
        for _ in range(REPEATS):
            prompts = np.random.default_rng().integers(0, self._vocab_size, (count, length)).tolist()
            began = time.perf_counter()
            generate(prompts, name, PROBE)
            took.append(time.perf_counter() - began)
        return min(took)

    def _table(self, measure: Cost) -> CostTable:
        columns = []
        for length in self._lengths:
            largest = max(count for count in COUNTS if count == 1 or count * length <= ROWS)
            column: list[float] = []
            for count in COUNTS:
                if count <= largest:
                    column.append(measure(count, length))
                else:
                    column.append(column[COUNTS.index(largest)] * count / largest)
            columns.append(column)
        return CostTable(COUNTS, self._lengths, tuple(zip(*columns, strict=True)))


def _free(count: int, length: int) -> float:
    """The base has no operators of its own."""
    return 0.0
