"""Placement over several workers: consolidation, and the newest request that moves where pages run short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.schedule.placement import Move, Placed, Worker, migrate, place


def test_nobody_feasible_places_nowhere() -> None:
    assert place([Worker("a", 4, 4, 100), Worker("b", 1, 4, 2)], 3) is None
    assert place([], 0) is None


def test_the_busiest_worker_that_has_room_fills_up_first() -> None:
    sets = {"a": 0, "b": 0, "c": 0}
    order = []
    for _ in range(7):
        name = place([Worker(worker, count, 3, 9) for worker, count in sets.items()], 2)
        assert name is not None
        sets[name] += 1
        order.append(name)
    assert "".join(order) == "cccbbba"


def placed(*arrivals: int, pages: int = 2, held: int = 2) -> Sequence[Placed]:
    return [Placed(f"r{arrival}", arrival, pages, held) for arrival in arrivals]


def test_the_newest_goes_first_until_the_pages_suffice() -> None:
    workers = [Worker("a", 3, 8, -3), Worker("b", 1, 8, 9), Worker("c", 2, 8, 9)]
    moves = migrate(workers, {"a": placed(5, 1, 7), "b": placed(2), "c": placed(3, 9)})
    assert moves == [Move("r7", "a", "c"), Move("r5", "a", "c")]


def test_one_that_fits_nowhere_keeps_older_ones_where_they_are() -> None:
    workers = [Worker("a", 2, 8, -1), Worker("b", 1, 8, 3)]
    rows = [Placed("old", 1, 1, 1), Placed("new", 2, 4, 4)]
    assert migrate(workers, {"a": rows, "b": placed(3)}) == []


def test_the_last_request_of_a_worker_stays() -> None:
    workers = [Worker("a", 1, 8, -5), Worker("b", 0, 8, 50)]
    assert migrate(workers, {"a": placed(1), "b": []}) == []


def test_a_worker_that_is_short_itself_takes_nobody() -> None:
    workers = [Worker("a", 2, 8, -1), Worker("b", 2, 8, -1), Worker("c", 0, 8, 3)]
    moves = migrate(workers, {"a": placed(1, 2), "b": placed(3, 4), "c": []})
    assert moves == [Move("r2", "a", "c")]  # c's room for one is taken
    assert migrate(workers[:2], {"a": placed(1, 2), "b": placed(3, 4)}) == []


ONE, OTHER = Worker("a", 1, 2, -3), Worker("b", 1, 2, 3)
MALFORMED: dict[str, Callable[[], object]] = {
    "nobody's worker": lambda: Worker("", 0, 1, 0),
    "more than its most": lambda: Worker("a", 3, 2, 0),
    "fewer than none": lambda: Worker("a", -1, 2, 0),
    "no figure": lambda: Worker("a", 0, 2, None),  # type: ignore[arg-type]
    "a fraction of a page": lambda: Worker("a", 0, 2, 0.5),  # type: ignore[arg-type]
    "nobody's request": lambda: Placed("", 1, 1, 1),
    "pages below none": lambda: Placed("r", 1, -1, 1),
    "an arrival before time": lambda: Placed("r", -1, 1, 1),
    "held pages of text": lambda: Placed("r", 1, 1, "1"),  # type: ignore[arg-type]
    "one worker twice": lambda: place([ONE, ONE], 1),
    "a need below none": lambda: place([ONE], -1),
    "a worker left out": lambda: migrate([ONE, OTHER], {"a": placed(1)}),
    "an unknown worker": lambda: migrate([ONE], {"a": placed(1), "x": []}),
    "a request twice": lambda: migrate([ONE, OTHER], {"a": placed(1), "b": placed(1)}),
    "a request left out": lambda: migrate([ONE, OTHER], {"a": [], "b": placed(1)}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_snapshots_are_refused(case: str) -> None:
    with pytest.raises(InternalFault) as caught:
        MALFORMED[case]()
    assert caught.value.code is ErrorCode.PLACEMENT_SNAPSHOT
