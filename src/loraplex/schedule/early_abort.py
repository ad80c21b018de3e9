"""S-LoRA's early abort: who can still get a first token in time, and who is served where not everybody can.

A request is too late once its wait and its prefill exceed the limit. Where requests arrive faster than they
are admitted, only so many as can be admitted within the limit are served, and these are the newest; else the
earliest come first. It maximises a reward and sacrifices old requests; it is no fairness. So a ledger says of
every request that was offered what became of it, and a rejected one is never left out.

Specification: 0x09F (early abort), 0x09M (its protection: the ledger).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault

NEW_SHARE: Final = 7
"""Tenths that the last window counts in a moving estimate; those before it count the rest."""
WINDOWS: Final = 8
"""Windows of the moving estimates within the limit, at whose ends overload is looked for."""
KEPT_SHARE: Final = 2
"""Under overload so many requests stay as are admitted within this part of the limit: the half of it. Whoever
waits the whole limit earns nothing.
"""


def _refuse(what: str) -> InternalFault:
    return InternalFault(ErrorCode.ABORT_LEDGER, what)


def _count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise _refuse(f"{name} is {value!r}, not a count")


@dataclass(frozen=True, slots=True)
class Offered:
    """A request without its first token. prefill: what computing its prompt is estimated at, in the clock's
    unit.
    """

    request_id: str
    arrival: int
    prefill: int

    def __post_init__(self) -> None:
        _count("arrival", self.arrival)
        _count("prefill", self.prefill)
        if not isinstance(self.request_id, str) or not self.request_id:
            raise _refuse(f"request id {self.request_id!r} names nobody")

    def latest_start(self, limit: int) -> int:
        """The last moment at which its prefill may begin; later it is too late."""
        return self.arrival + limit - self.prefill


def chosen(
    offered: Sequence[Offered],
    now: int,
    limit: int,
    serviceable: int,
    arrivals: float,
    admissions: float,
) -> list[str]:
    """The requests to serve, in that order. offered: by arrival. serviceable: how many can be admitted in
    time.

    arrivals, admissions: moving estimates of their rates. Above: the newest, newest first; else the earliest.
    Raises `abort_ledger` for what is out of order or no count.
    """
    for name, value in (("now", now), ("limit", limit), ("serviceable", serviceable)):
        _count(name, value)
    if not arrivals >= 0 or not admissions >= 0:
        raise _refuse(f"rates are {arrivals!r} and {admissions!r}, not 0 or more")
    times = [one.arrival for one in offered]
    if times != sorted(times) or (times and times[-1] > now):
        raise _refuse(f"arrivals {times} at {now} are not in order, or have not come yet")
    if len({one.request_id for one in offered}) < len(offered):
        raise _refuse("a request is offered twice")
    in_time = [one.request_id for one in offered if now <= one.latest_start(limit)]
    if arrivals > admissions:
        return in_time[::-1][:serviceable]
    return in_time[:serviceable]


@dataclass(slots=True)
class MovingRate:
    """A count by windows of the clock, as a rate a window that follows slowly. since: when the window
    began.
    """

    window: int
    since: int
    rate: float = 0.0
    _counted: int = 0

    def note(self, now: int, count: int = 1) -> None:
        """So many more at `now`."""
        self.at(now)
        self._counted += count

    def at(self, now: int) -> float:
        """The estimate at `now`."""
        while now - self.since >= self.window:
            if now - self.since >= 64 * self.window:  # nothing of what was counted is left
                self.rate, self._counted, self.since = 0.0, 0, now
                break
            self.rate = (NEW_SHARE * self._counted + (10 - NEW_SHARE) * self.rate) / 10
            self._counted = 0
            self.since += self.window
        return self.rate


@dataclass(frozen=True, slots=True)
class AbortLedger:
    """What became of every request that was offered.

    refused: at the door, by another rule. rejected: by early abort. served: with a first token. withdrawn:
    ended otherwise before it. open: none of these yet.
    """

    offered: int = 0
    refused: int = 0
    rejected: int = 0
    served: int = 0
    withdrawn: int = 0
    open: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            _count(item.name, getattr(self, item.name))
        closed = self.refused + self.rejected + self.served + self.withdrawn
        if self.offered != closed + self.open:
            raise _refuse(f"{self.offered} requests were offered, {closed} closed and {self.open} are open")


class Offers:
    """Requests without a first token: who is too late, and who is one too many.

    limit: from arrival to the first token, in the clock's unit.
    """

    def __init__(self, limit: int, now: int) -> None:
        self._limit = limit
        window = max(limit // WINDOWS, 1)
        self._arrivals, self._admissions = MovingRate(window, now), MovingRate(window, now)
        self._looked = now
        self._waiting: dict[str, Offered] = {}
        self._admitted: set[str] = set()
        self._late: list[tuple[int, str]] = []
        self._offered = self._refused = self._rejected = self._served = self._withdrawn = 0

    def refuse(self, count: int) -> None:
        """So many requests were offered and refused at the door, by another rule."""
        self._offered += count
        self._refused += count

    def offer(self, request_id: str, arrival: int, prefill: int, now: int) -> None:
        """A request came that arrived at `arrival`. prefill: what computing its prompt is estimated at."""
        self._offered += 1
        self._arrivals.note(now)
        one = Offered(request_id, min(arrival, now), prefill)
        self._waiting[request_id] = one
        heapq.heappush(self._late, (one.latest_start(self._limit), request_id))

    def admit(self, request_id: str, now: int) -> None:
        """A request got a place: it is no longer early to abort it."""
        if self._waiting.pop(request_id, None) is not None:
            self._admitted.add(request_id)
            self._admissions.note(now)

    def serve(self, request_id: str) -> None:
        """Its first token was committed."""
        if request_id in self._admitted:
            self._admitted.remove(request_id)
            self._served += 1

    def end(self, request_id: str, *, rejected: bool) -> None:
        """It ended; before its first token it was rejected by early abort, or withdrawn."""
        if self._waiting.pop(request_id, None) or request_id in self._admitted:
            self._admitted.discard(request_id)
            self._rejected += rejected
            self._withdrawn += not rejected

    def due(self, now: int) -> list[str]:
        """The requests to reject now: those that are too late, and under overload all but the newest that can
        be admitted in time. Each is named once.
        """
        gone = []
        while self._late and self._late[0][0] < now:
            _, request_id = heapq.heappop(self._late)
            if request_id in self._waiting:
                gone.append(request_id)
        arrivals, admissions = self._arrivals.at(now), self._admissions.at(now)
        if self._arrivals.since != self._looked:
            self._looked = self._arrivals.since
            if arrivals > admissions > 0:
                gone += self._too_many(set(gone), arrivals, admissions, now)
        return gone

    def _too_many(self, gone: set[str], arrivals: float, admissions: float, now: int) -> list[str]:
        left = sorted(
            (one for request_id, one in self._waiting.items() if request_id not in gone),
            key=lambda one: one.arrival,
        )
        most = max(int(admissions * WINDOWS / KEPT_SHARE), 1)
        kept = set(chosen(left, now, self._limit, most, arrivals, admissions))
        return [one.request_id for one in left if one.request_id not in kept]

    @property
    def ledger(self) -> AbortLedger:
        """What became of everybody so far. Raises `abort_ledger` where that does not add up."""
        counts = self._offered, self._refused, self._rejected, self._served, self._withdrawn
        return AbortLedger(*counts, open=len(self._waiting) + len(self._admitted))

    @property
    def figures(self) -> dict[str, int]:
        """The ledger as plain values."""
        return asdict(self.ledger)
