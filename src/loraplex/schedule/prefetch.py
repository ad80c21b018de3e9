"""Which adapters are loaded ahead of the requests that wait for them, and which of these loads are given up.

First fit: wishes are taken in the order of the waiting requests, each adapter once, and one that does not fit
leaves its room to those behind it. All of them draw on one ledger, what is left of the pages beyond what
admitted requests will want. A load whose copy has not begun is given up when nobody waits for its adapter any
more, or when running requests have come to want its pages. Owns no pages and starts nothing.

Specification: 0x09F (prefetch from the queue), 0x09J (the joint ledger), 0x09L (obsolete predictions).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from loraplex.core.errors import ErrorCode, InternalFault


def _refuse(what: str) -> InternalFault:
    return InternalFault(ErrorCode.PREFETCH_LEDGER, what)


def _check_counts(record: Ledger | Wish | Pending, *but: str) -> None:
    """Raise `prefetch_ledger` for a field that is no count."""
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name not in but and (type(value) is not int or value < 0):
            raise _refuse(f"{item.name} of a {type(record).__name__} is {value!r}, not a count")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Pages that loads ahead may draw on.

    available: that may be had without taking an adapter or a request off the device. growth: that running
    requests will take. safety: that stay. adapters: that adapters may take beside those that they have.
    slots: adapters that may be loaded beside those on the device.
    """

    available: int
    growth: int
    safety: int
    adapters: int
    slots: int

    def __post_init__(self) -> None:
        _check_counts(self)

    @property
    def spare(self) -> int:
        """Pages beyond what admitted requests will want; below 0 where they will want more than there is."""
        return self.available - self.growth - self.safety


@dataclass(frozen=True, slots=True)
class Wish:
    """An adapter that a waiting request names. pages: that its load takes now, 0 where it takes a free
    block.
    """

    adapter: str
    pages: int

    def __post_init__(self) -> None:
        _check_counts(self, "adapter")
        if not isinstance(self.adapter, str) or not self.adapter:
            raise _refuse(f"adapter of a Wish is {self.adapter!r}, not a key")


def first_fit(wishes: Iterable[Wish], ledger: Ledger, most: int) -> list[Wish]:
    """The adapters to load ahead, in the order of the wishes. most: so many at most.

    A wish that does not fit is passed over. Raises `prefetch_ledger` for two sizes of one adapter.
    """
    if type(most) is not int or most < 0:
        raise _refuse(f"{most!r} loads at most were asked for, not a count")
    left, places = min(ledger.spare, ledger.adapters), min(most, ledger.slots)
    seen: dict[str, int] = {}
    taken: list[Wish] = []
    for wish in wishes:
        if seen.setdefault(wish.adapter, wish.pages) != wish.pages:
            raise _refuse(f"{wish.adapter!r} takes {seen[wish.adapter]} pages and {wish.pages}, not one size")
        if len(taken) < places and wish.pages <= left and wish not in taken:
            taken.append(wish)
            left -= wish.pages
    return taken


class Obsolete(StrEnum):
    """Why a load ahead is given up before its copy begins."""

    UNWANTED = "unwanted"
    PAGES = "pages"


@dataclass(frozen=True, slots=True)
class Pending:
    """A load ahead whose copy has not begun, by a name of its own. pages: that it has reserved. wanted:
    whether anybody waits for its adapter.
    """

    load: str
    pages: int
    wanted: bool

    def __post_init__(self) -> None:
        _check_counts(self, "load", "wanted")
        if not isinstance(self.load, str) or not self.load or type(self.wanted) is not bool:
            raise _refuse(f"{self.load!r}, wanted {self.wanted!r}, is no load that could be given up")


def given_up(pending: Sequence[Pending], ledger: Ledger) -> list[tuple[str, Obsolete]]:
    """The loads to give up and why: unwanted ones, then the newest while running requests will want more
    than there is. pending: the oldest first. Raises `prefetch_ledger` where a load is there twice.
    """
    if len({one.load for one in pending}) < len(pending):
        raise _refuse(f"a load is there twice: {sorted(one.load for one in pending)}")
    gone = [(one.load, Obsolete.UNWANTED) for one in pending if not one.wanted]
    spare = ledger.spare + sum(one.pages for one in pending if not one.wanted)
    for one in reversed(pending):
        if spare >= 0:
            break
        if one.wanted and one.pages:
            gone.append((one.load, Obsolete.PAGES))
            spare += one.pages
    return gone
