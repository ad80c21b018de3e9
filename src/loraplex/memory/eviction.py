"""What may give pages up and in which order: safety, ranking and reuse, three functions that never replace
each other.

*Evictable* is a safety predicate. A *ranking* orders only what may go, in one currency over classes of pages:
what it costs to bring a page back, by how long ago it was used. *Reusable* says when the bytes of a page may
be overwritten. Policies plug in as rankings; a floor for each class keeps one class from taking everything.

Knows no engine: who is asked, and who goes, is `engine.residency.victims`'. Never frees a page and never
changes a state.

Specification: 0x04F (counts), 0x05D (three steps); rulings "Residency".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from loraplex.memory.residency import UNLEASED, AdapterEntry, AdapterState


class PageClass(StrEnum):
    """Classes of pages that can be brought back after they were given up."""

    ADAPTER = "adapter"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may go as one. restore_ns: what bringing all of its pages back costs. last_use: launch that last
    used it.
    """

    kind: PageClass
    key: str
    pages: int
    restore_ns: int
    last_use: int


C = TypeVar("C", bound=Candidate)

Ranking = Callable[[Candidate, int], tuple[int | str, ...]]
"""A candidate's place in the order in which they go, least first. The second argument is the newest launch.
"""


def evictable(entry: AdapterEntry, committed_launch: int) -> bool:
    """The full safety predicate of 0x04F with 0x05D's verified host source. No ranking replaces it.

    A removed adapter that only waiting requests still lease counts as idle: they hold its revision, not its
    pages, and may need those pages themselves.
    """
    unused = entry.state in UNLEASED or (entry.state is AdapterState.RETIRING and not entry.evicting)
    return (
        unused
        and entry.refcount == 0
        and entry.pin_count == 0
        and entry.inflight_events == 0
        and entry.last_launch <= committed_launch
        and entry.host_source_verified
    )


def recency_class(age: int) -> int:
    """Powers of two of launches since the last use: 0, 1, 2 to 3, 4 to 7, ..."""
    return max(age, 0).bit_length()


def by_restore_cost(candidate: Candidate, now: int) -> tuple[int | str, ...]:
    """Longest unused class first; inside a class what is cheapest to bring back a page, then older, larger,
    by key.
    """
    return (
        -recency_class(now - candidate.last_use),
        candidate.restore_ns // max(candidate.pages, 1),
        candidate.last_use,
        -candidate.pages,
        candidate.key,
    )


def by_last_use(candidate: Candidate, now: int) -> tuple[int | str, ...]:
    """0x05D's example: least recently used, then larger, then by key."""
    return candidate.last_use, -candidate.pages, candidate.key


RANKINGS: Final[dict[str, Ranking]] = {"restore_cost": by_restore_cost, "lru": by_last_use}
"""Rankings by the name that configures them."""


def ranked(candidates: Iterable[C], ranking: Ranking, now: int) -> list[C]:
    """Candidates in the order in which they go; equal ones stay in theirs."""
    return sorted(candidates, key=lambda candidate: ranking(candidate, now))


@dataclass(frozen=True, slots=True)
class Cover(Generic[C]):
    """What `cover` took. left: pages of each class that are then left. enough: whether it is all that was
    needed.
    """

    taken: list[C]
    left: Mapping[PageClass, int]
    enough: bool


def cover(
    candidates: Iterable[C],
    pages_needed: int,
    *,
    held: Mapping[PageClass, int],
    floors: Mapping[PageClass, int],
    count_needed: int = 0,
) -> Cover[C]:
    """The fewest of ranked candidates, from the first on, that make up `pages_needed` and `count_needed`;
    else all of them.

    candidates: in the order in which they go, of one class or several; read no further than they are needed.
    held: pages of each class now. floors: pages below which a class gives nothing up; what would take it
    below is passed over.
    """
    taken: list[C] = []
    pages, left = 0, dict(held)
    for candidate in candidates:
        if pages >= pages_needed and len(taken) >= count_needed:
            break
        after = left.get(candidate.kind, 0) - candidate.pages
        if after < floors.get(candidate.kind, 0):
            continue
        left[candidate.kind] = after
        taken.append(candidate)
        pages += candidate.pages
    return Cover(taken, left, pages >= pages_needed and len(taken) >= count_needed)


def reusable(fence: int, committed_launch: int, *, on_compute_stream: bool) -> bool:
    """Whether a page with this fence may be overwritten: at once by work ordered after its launches, else
    after them.
    """
    return on_compute_stream or fence <= committed_launch
