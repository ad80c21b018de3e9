"""PetS' two recurrences: which requests of an offline batch go together.

Requests of one task, an adapter or the base, are sorted by length and cut where the adapter branch costs
least. The pieces of all tasks are sorted by their longest request and cut again where the shared operators
cost least. A piece costs what its size and its longest request say, as if shorter ones were padded; costs
come from a table, measured elsewhere. Orders work that is all legal; knows no queue, no deadline and no
tenant.

Specification: 0x09D.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault

Cost = Callable[[int, int], float]
"""What so many requests of at most so many tokens cost."""
MAX_PIECE: Final = 64
"""Requests of a piece, pieces of a macro batch: the recurrences take time by the square of it otherwise."""


def _refuse(what: str) -> InternalFault:
    return InternalFault(ErrorCode.COST_TABLE, what)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured costs: costs[i][j] of `counts[i]` requests of `lengths[j]` tokens.

    Between its points the next larger one counts; beyond the last count or length the cost goes on in
    proportion.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    costs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("counts", self.counts), ("lengths", self.lengths)):
            if not axis or any(type(at) is not int or at < 1 for at in axis):
                raise _refuse(f"{name} of a cost table are {axis}, not whole numbers from 1 on")
            if list(axis) != sorted(set(axis)):
                raise _refuse(f"{name} of a cost table are {axis}, not ascending")
        if len(self.costs) != len(self.counts) or any(len(row) != len(self.lengths) for row in self.costs):
            raise _refuse(f"a cost table of {len(self.counts)} x {len(self.lengths)} has other rows")
        if not all(0 <= cost < float("inf") for row in self.costs for cost in row):
            raise _refuse("a cost table holds a cost that is negative or not finite")

    def __call__(self, count: int, length: int) -> float:
        """What `count` requests of at most `length` tokens cost. Raises `cost_table` below 1."""
        if count < 1 or length < 1:
            raise _refuse(f"{count} requests of {length} tokens have no cost")
        row = min(bisect_left(self.counts, count), len(self.counts) - 1)
        column = min(bisect_left(self.lengths, length), len(self.lengths) - 1)
        beyond = max(1.0, count / self.counts[-1]) * max(1.0, length / self.lengths[-1])
        return self.costs[row][column] * beyond


@dataclass(frozen=True, slots=True)
class Piece:
    """Requests of one task that go together, shortest first. longest: tokens of the last."""

    task: str
    requests: tuple[int, ...]
    longest: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """Macro batches of pieces, in order of their longest requests. tasks: cost of each task's pieces.
    shared: of the macro batches' shared operators.
    """

    batches: tuple[tuple[Piece, ...], ...]
    tasks: dict[str, float]
    shared: float

    @property
    def order(self) -> list[int]:
        """Requests in the order in which they are best offered."""
        return [index for batch in self.batches for piece in batch for index in piece.requests]


def cut(sizes: Sequence[int], lengths: Sequence[int], cost: Cost, most: int) -> tuple[float, list[int]]:
    """Where to cut a sorted sequence, and what that costs: D[i] = min over j of D[j-1] + cost(sum of sizes
    j..i, length i).

    lengths: ascending. most: items of a part. Returns the ends of the parts. Of equal costs the fewest parts
    win.
    """
    if len(sizes) != len(lengths) or list(lengths) != sorted(lengths):
        raise _refuse(f"{len(sizes)} sizes and lengths {list(lengths)} are no sorted sequence")
    best: list[tuple[float, int]] = [(0.0, 0)]
    begins = [0]
    for end in range(1, len(sizes) + 1):
        total, options = 0, []
        for begin in range(end - 1, max(end - most, 0) - 1, -1):
            total += sizes[begin]
            before, parts = best[begin]
            options.append(((before + cost(total, lengths[end - 1]), parts + 1), begin))
        least, begin = min(options)
        best.append(least)
        begins.append(begin)
    ends, at = [], len(sizes)
    while at:
        ends.append(at)
        at = begins[at]
    return best[-1][0], ends[::-1]


def group(tasks: Sequence[str], lengths: Sequence[int], shared: Cost, own: Mapping[str, Cost]) -> Grouping:
    """Group requests, each with its task and its length. shared: alpha. own: beta of each task.

    Raises `cost_table` for a task without costs, or lengths that are not one a request, from 1 on.
    """
    if len(tasks) != len(lengths) or any(type(length) is not int or length < 1 for length in lengths):
        raise _refuse(f"{len(tasks)} requests have lengths {list(lengths)[:8]}, not one from 1 on each")
    by_task: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        if task not in own:
            raise _refuse(f"task {task!r} has no costs")
        by_task.setdefault(task, []).append(index)
    pieces: list[Piece] = []
    totals: dict[str, float] = {}
    for task, indices in by_task.items():
        indices.sort(key=lambda index: lengths[index])
        sorted_lengths = [lengths[index] for index in indices]
        totals[task], ends = cut([1] * len(indices), sorted_lengths, own[task], MAX_PIECE)
        for begin, end in zip([0, *ends], ends, strict=False):
            pieces.append(Piece(task, tuple(indices[begin:end]), sorted_lengths[end - 1]))
    pieces.sort(key=lambda piece: piece.longest)
    sizes = [len(piece.requests) for piece in pieces]
    total, ends = cut(sizes, [piece.longest for piece in pieces], shared, MAX_PIECE)
    batches = tuple(tuple(pieces[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
    return Grouping(batches, totals, total)
