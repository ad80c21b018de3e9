"""Who gives pages up: eligibility, ranking and reuse, three functions that never replace each other.

*Eligible* is a safety predicate. *Ranking* orders only what is eligible, in one currency over classes of pages: what it
costs to bring a page back, by how long ago it was used. *Reusable* says when the bytes of a page may be overwritten.
Policies plug in as rankings; a floor for each class keeps one class from taking everything.

Never frees a page and never changes a state.

Specification: 0x04F (counts), 0x05D (three steps); rulings "Residency".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from loraplex.memory.residency import EVICTABLE, AdapterEntry, AdapterState


class PageClass(StrEnum):
    """Classes of pages that can be brought back after they were given up."""

    ADAPTER = "adapter"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An eligible object. restore_ns: what bringing all of its pages back costs. last_touch: launch that last used it."""

    kind: PageClass
    key: str
    pages: int
    restore_ns: int
    last_touch: int


Ranking = Callable[[Sequence[Candidate], int], list[Candidate]]
"""Candidates in the order in which they go. The second argument is the newest launch."""


def eligible(entry: AdapterEntry, completed_launch: int) -> bool:
    """The full safety predicate of 0x04F with 0x05D's verified host source. No ranking replaces it.

    A removed adapter that only waiting requests still lease counts as idle: they hold its revision, not its pages, and
    may need those pages themselves.
    """
    unused = entry.state in EVICTABLE or (entry.state is AdapterState.RETIRING and not entry.evicting)
    return (
        unused
        and entry.refcount == 0
        and entry.pin_count == 0
        and entry.queued_reservations == 0
        and entry.inflight_events == 0
        and entry.last_plan <= completed_launch
        and entry.host_source_verified
    )


def recency_class(age: int) -> int:
    """Powers of two of launches since the last use: 0, 1, 2 to 3, 4 to 7, ..."""
    return max(age, 0).bit_length()


def rank_by_restore_cost(candidates: Sequence[Candidate], now: int) -> list[Candidate]:
    """Longest unused class first; inside a class what is cheapest to bring back a page, then older, larger, by key."""
    return sorted(
        candidates,
        key=lambda c: (
            -recency_class(now - c.last_touch),
            c.restore_ns // max(c.pages, 1),
            c.last_touch,
            -c.pages,
            c.key,
        ),
    )


def rank_lru(candidates: Sequence[Candidate], now: int) -> list[Candidate]:
    """0x05D's example: least recently used, then larger, then by key."""
    return sorted(candidates, key=lambda c: (c.last_touch, -c.pages, c.key))


RANKINGS: Final[dict[str, Ranking]] = {"restore_cost": rank_by_restore_cost, "lru": rank_lru}
"""Rankings by the name that configures them."""


def choose(
    candidates: Iterable[Candidate],
    pages_needed: int,
    *,
    now: int,
    ranking: Ranking,
    held: Mapping[PageClass, int],
    floors: Mapping[PageClass, int],
    count_needed: int = 0,
) -> list[Candidate] | None:
    """Fewest candidates in ranking order that cover `pages_needed` and `count_needed`; None when they do not.

    held: pages of each class now. floors: pages below which a class gives nothing up; what would take it below is
    passed over.
    """
    chosen: list[Candidate] = []
    reclaimed = 0
    left = dict(held)
    for candidate in ranking(list(candidates), now):
        if reclaimed >= pages_needed and len(chosen) >= count_needed:
            break
        if left.get(candidate.kind, 0) - candidate.pages < floors.get(candidate.kind, 0):
            continue
        left[candidate.kind] = left.get(candidate.kind, 0) - candidate.pages
        chosen.append(candidate)
        reclaimed += candidate.pages
    return chosen if reclaimed >= pages_needed and len(chosen) >= count_needed else None


def reusable(fence: int, completed_launch: int, *, on_compute_stream: bool) -> bool:
    """Whether a page with this fence may be overwritten: at once by work ordered after its launches, else after them."""
    return on_compute_stream or fence <= completed_launch
