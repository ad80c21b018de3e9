"""PetS' recurrences against every partition of small batches, and cost tables between and beyond their
points.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from random import Random

import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.schedule.grouping import CostTable, cut, group

TABLE = CostTable((1, 2, 4), (8, 32), ((1.0, 3.0), (1.5, 5.0), (2.5, 9.0)))


def partitions(count: int) -> Iterator[list[int]]:
    """Ends of the parts of every way to cut `count` items."""
    for size in range(count):
        for ends in itertools.combinations(range(1, count), size):
            yield [*ends, count]


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_is_cheaper(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(1, 8)
    lengths = sorted(rng.randint(1, 40) for _ in range(count))
    sizes = [rng.randint(1, 3) for _ in range(count)]
    prices = {(n, length): rng.randint(1, 30) for n in range(1, 30) for length in range(1, 41)}

    def cost(ends: list[int]) -> float:
        return sum(
            prices[sum(sizes[lo:hi]), lengths[hi - 1]] for lo, hi in zip([0, *ends], ends, strict=False)
        )

    total, ends = cut(sizes, lengths, lambda n, length: prices[n, length], count)
    assert total == cost(ends) == min(map(cost, partitions(count)))
    bounded, ends = cut(sizes, lengths, lambda n, length: prices[n, length], 2)
    assert all(hi - lo <= 2 for lo, hi in zip([0, *ends], ends, strict=False))
    assert bounded == cost(ends) >= total


@pytest.mark.parametrize(
    ("count", "length", "cost"),
    [
        (1, 1, 1.0),
        (1, 8, 1.0),
        (1, 9, 3.0),
        (3, 8, 2.5),
        (4, 32, 9.0),
        (8, 32, 18.0),
        (4, 64, 18.0),
        (1, 64, 6.0),
    ],
)
def test_a_table_between_and_beyond_its_points(count: int, length: int, cost: float) -> None:
    assert TABLE(count, length) == cost


def test_every_request_is_in_one_piece_of_its_task() -> None:
    rng = Random(3)
    tasks = [rng.choice(["", "a", "b"]) for _ in range(150)]
    lengths = [rng.randint(1, 70) for _ in tasks]
    found = group(tasks, lengths, TABLE, dict.fromkeys(tasks, TABLE))
    assert sorted(found.order) == list(range(150))
    for batch in found.batches:
        for piece in batch:
            assert {tasks[index] for index in piece.requests} == {piece.task}
            assert piece.longest == max(lengths[index] for index in piece.requests)
    longest = [piece.longest for batch in found.batches for piece in batch]
    assert longest == sorted(longest)


def test_an_empty_batch_is_no_group() -> None:
    found = group([], [], TABLE, {})
    assert (found.order, found.shared, found.tasks) == ([], 0.0, {})


MALFORMED: dict[str, Callable[[], object]] = {
    "no counts": lambda: CostTable((), (8,), ()),
    "no lengths": lambda: CostTable((1,), (), ((),)),
    "a count of none": lambda: CostTable((0, 1), (8,), ((1.0,), (1.0,))),
    "half a request": lambda: CostTable((1.5,), (8,), ((1.0,),)),  # type: ignore[arg-type]
    "counts that fall": lambda: CostTable((2, 1), (8,), ((1.0,), (1.0,))),
    "one length twice": lambda: CostTable((1,), (8, 8), ((1.0, 1.0),)),
    "a row too few": lambda: CostTable((1, 2), (8,), ((1.0,),)),
    "a short row": lambda: CostTable((1,), (8, 9), ((1.0,),)),
    "a cost that pays": lambda: CostTable((1,), (8,), ((-1.0,),)),
    "an endless cost": lambda: CostTable((1,), (8,), ((float("inf"),),)),
    "a cost that is none": lambda: CostTable((1,), (8,), ((float("nan"),),)),
    "no request at all": lambda: TABLE(0, 8),
    "a request of no tokens": lambda: TABLE(1, 0),
    "an unpriced task": lambda: group(["a"], [3], TABLE, {}),
    "a length too few": lambda: group(["a", "a"], [3], TABLE, {"a": TABLE}),
    "an empty request": lambda: group(["a"], [0], TABLE, {"a": TABLE}),
    "lengths out of order": lambda: cut([1, 1], [3, 2], TABLE, 2),
    "a size too few": lambda: cut([1], [2, 3], TABLE, 2),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_plans_are_refused(case: str) -> None:
    with pytest.raises(InternalFault) as caught:
        MALFORMED[case]()
    assert caught.value.code is ErrorCode.COST_TABLE
