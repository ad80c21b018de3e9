"""Ranking and floors over classes of pages (0x05D): one currency, and no class gives up what its
floor keeps.
"""

from __future__ import annotations

import pytest

from loraplex.memory.eviction import (
    Candidate,
    PageClass,
    Ranking,
    by_last_use,
    by_restore_cost,
    cover,
    ranked,
)

NOW = 100
ADAPTER, PREFIX = PageClass.ADAPTER, PageClass.PREFIX
OLD = Candidate(ADAPTER, "old", 4, restore_ns=4_000, last_use=10)
CHEAP = Candidate(PREFIX, "cheap", 1, restore_ns=10, last_use=90)
DEAR = Candidate(PREFIX, "dear", 1, restore_ns=5_000, last_use=89)
LARGE = Candidate(ADAPTER, "large", 8, restore_ns=8_000, last_use=91)
ALL = [LARGE, DEAR, CHEAP, OLD]
HELD = {ADAPTER: 12, PREFIX: 2}


@pytest.mark.parametrize(
    ("ranking", "order"),
    [(by_restore_cost, [OLD, CHEAP, LARGE, DEAR]), (by_last_use, [OLD, DEAR, CHEAP, LARGE])],
)
def test_classes_of_pages_are_ranked_together(ranking: Ranking, order: list[Candidate]) -> None:
    assert ranked(ALL, ranking, NOW) == order


@pytest.mark.parametrize(
    ("pages", "floors", "taken", "enough"),
    [
        (0, {}, [], True),
        (4, {}, [OLD], True),
        (5, {}, [OLD, CHEAP], True),
        (6, {}, [OLD, CHEAP, LARGE], True),
        (14, {}, [OLD, CHEAP, LARGE, DEAR], True),
        (15, {}, [OLD, CHEAP, LARGE, DEAR], False),
        (5, {PREFIX: 1}, [OLD, CHEAP], True),
        (
            6,
            {ADAPTER: 5, PREFIX: 1},
            [OLD, CHEAP],
            False,
        ),  # the large one would take adapters below their floor
        (5, {PREFIX: 2}, [OLD, LARGE], True),
        (1, {ADAPTER: 9}, [CHEAP], True),
    ],
)
def test_each_class_keeps_its_floor(
    pages: int, floors: dict[PageClass, int], taken: list[Candidate], enough: bool
) -> None:
    covered = cover(ranked(ALL, by_restore_cost, NOW), pages, held=HELD, floors=floors)
    assert (covered.taken, covered.enough) == (taken, enough)
    for kind, before in HELD.items():
        assert covered.left[kind] == before - sum(c.pages for c in taken if c.kind is kind)


def test_a_number_of_candidates_is_covered_where_pages_are_not_what_is_short() -> None:
    covered = cover([CHEAP, OLD, LARGE], 1, held=HELD, floors={}, count_needed=2)
    assert (covered.taken, covered.enough) == ([CHEAP, OLD], True)
    assert not cover([CHEAP], 1, held=HELD, floors={}, count_needed=2).enough
