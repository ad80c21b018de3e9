"""0x09D, 0x09E and 0x09F through the shipping recurrences, placement, prefetch and early abort.

The specification gives 0x09D's groups and totals, so five entries of its cost tables; the others are ours,
large enough to be no better.
"""

from __future__ import annotations

from loraplex.schedule.early_abort import Offered, chosen
from loraplex.schedule.grouping import Cost, Piece, group
from loraplex.schedule.placement import Worker, place
from loraplex.schedule.prefetch import Ledger, Wish, first_fit


def table(given: dict[tuple[int, int], int]) -> Cost:
    """Costs of the points that are given; one more than all of them together elsewhere."""
    return lambda count, length: given.get((count, length), 1 + sum(given.values()))


def test_pets_groups_two_tasks() -> None:
    own = {
        "A": table({(2, 4): 7, (1, 8): 9, (1, 2): 5, (1, 4): 6, (3, 8): 18}),
        "B": table({(2, 3): 6, (1, 3): 4}),
    }
    shared = table({(4, 4): 10, (1, 8): 9, (2, 3): 6, (2, 4): 7, (3, 8): 18, (5, 8): 22})
    found = group(["A", "A", "A", "B", "B"], [2, 4, 8, 3, 3], shared, own)
    a0, a1, b0 = Piece("A", (0, 1), 4), Piece("A", (2,), 8), Piece("B", (3, 4), 3)
    assert found.tasks == {"A": 16, "B": 6}
    assert found.shared == 19
    assert found.batches == ((b0, a0), (a1,))
    assert found.order == [3, 4, 0, 1, 2]


def test_punica_places_on_the_second_of_two_alike() -> None:
    workers = [Worker("gpu-0", 8, 32, 100), Worker("gpu-1", 12, 32, 5), Worker("gpu-2", 8, 32, 20)]
    assert place(workers, 8) == "gpu-2"


def test_a_queue_of_four_prefetches_what_fits() -> None:
    pages = {"B": 3, "C": 4, "D": 2}
    ledger = Ledger(available=6, growth=0, safety=0, adapters=6, slots=4)
    taken = first_fit([Wish(name, pages[name]) for name in "BBCD"], ledger, 4)
    assert [wish.adapter for wish in taken] == ["B", "D"]
    assert sum(wish.pages for wish in taken) == 5


def test_early_abort_takes_the_newest_under_overload() -> None:
    offered = [Offered(f"q{index}", arrival, 2) for index, arrival in enumerate((0, 4, 6, 8))]
    assert chosen(offered, 10, 8, 2, 5, 2) == ["q3", "q2"]
    assert chosen(offered, 10, 8, 2, 2, 5) == ["q1", "q2"]
    assert chosen(offered, 10, 8, 9, 2, 5) == ["q1", "q2", "q3"]  # q0 is infeasible either way
