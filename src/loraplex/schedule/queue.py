"""Waiting requests: for each urgency one lane a tenant in arrival order, merged at their heads.

Owns places only: who is owed a turn, who is parked for an adapter or a block, who waits in which lane.
Arrival order is given once and never reset, neither by loading nor by preemption. Whoever looks is given
tickets in the order of (urgency, the tenant's rank, arrival); a tenant's rank changes with its service, so it
is asked for when a lane comes up and is no key that a heap keeps. Nothing here takes longer because more
requests wait behind the heads.

Specification: 0x09A (clocks), 0x09C (urgency, tenant, age); rulings "Scheduling".
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

_VOID_KEPT: Final = 64
"""Void entries of lanes' heads that are kept however few lanes there are."""

Rank = Callable[[str], int | None]
"""A tenant's place among those of one urgency, lower first; None: nobody of it may run now."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue. priority: lower first. order: of arrival. pressing: its deadline is near."""

    priority: int
    order: int
    request_id: str
    tenant: str = "default"
    pressing: bool = False

    @property
    def urgency(self) -> int:
        """Lower runs first: by priority, and within one those whose deadline presses."""
        return 2 * self.priority + (not self.pressing)


@dataclass(slots=True)
class _Lane:
    """Waiting tickets of one tenant, oldest first. front: its entry among the lanes' heads, None while
    walked.
    """

    tenant: str
    orders: list[int] = field(default_factory=list)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    front: tuple[int, int, str] | None = None
    walked: bool = False

    def add(self, ticket: Ticket) -> None:
        if not self.orders or ticket.order > self.orders[-1]:
            self.orders.append(ticket.order)
        else:
            insort(self.orders, ticket.order)
        self.tickets[ticket.order] = ticket

    def remove(self, order: int) -> None:
        del self.tickets[order]
        del self.orders[bisect_left(self.orders, order)]


@dataclass(slots=True)
class _Level:
    """Everybody of one urgency. fronts: heap of (rank, order of the head, tenant); an entry that is not its
    lane's `front` is void. owed: those whose turn it is, by order, before all lanes.
    """

    lanes: dict[str, _Lane] = field(default_factory=dict)
    fronts: list[tuple[int, int, str]] = field(default_factory=list)
    owed: _Lane = field(default_factory=lambda: _Lane(""))


class WaitingQueue:
    """Tickets in lanes, owed a turn, or parked under the key of what they wait for."""

    def __init__(self, rank: Rank = lambda tenant: 0) -> None:
        """rank: see `Rank`; asked of a tenant when its lane may come up. pushes: how many there were."""
        self._rank = rank
        self._levels: dict[int, _Level] = {}
        self._urgencies: list[int] = []
        self._places: dict[str, Ticket] = {}
        self._owed: set[str] = set()
        self._parked: dict[str, dict[str, Ticket]] = {}
        self._parked_for: dict[str, str] = {}
        self.pushes = 0

    def __len__(self) -> int:
        return len(self._places)

    def push(self, ticket: Ticket) -> None:
        """Add a ticket, or put one back in its old place."""
        self.pushes += 1
        self._places[ticket.request_id] = ticket
        level = self._level(ticket.urgency)
        lane = level.lanes.get(ticket.tenant)
        if lane is None:
            lane = level.lanes[ticket.tenant] = _Lane(ticket.tenant)
        lane.add(ticket)
        if lane.orders[0] == ticket.order:
            self._to_front(level, lane, self._rank(ticket.tenant) or 0)

    def take(self, ticket: Ticket) -> None:
        """Remove a ticket that a walk gave."""
        self._leave(self._places.pop(ticket.request_id))

    def owe(self, ticket: Ticket) -> None:
        """From now on its turn comes before all others' of its urgency."""
        self._leave(ticket)
        self._owed.add(ticket.request_id)
        self._level(ticket.urgency).owed.add(ticket)

    def press(self, ticket: Ticket) -> Ticket:
        """The ticket that stands for this one now that its deadline is near."""
        pressing = replace(ticket, pressing=True)
        key = self._parked_for.get(ticket.request_id)
        if key is not None:
            self._parked[key][ticket.request_id] = self._places[ticket.request_id] = pressing
        elif ticket.request_id in self._places:
            owed = ticket.request_id in self._owed
            self.take(ticket)
            self.push(pressing)
            if owed:
                self.owe(pressing)
        return pressing

    def park(self, ticket: Ticket, key: str) -> None:
        """Set a ticket aside until `unpark(key)`."""
        self._leave(ticket)
        self._parked.setdefault(key, {})[ticket.request_id] = ticket
        self._parked_for[ticket.request_id] = key

    def unpark(self, key: str) -> None:
        """Put the tickets that waited for `key` back into their places."""
        for request_id, ticket in self._parked.pop(key, {}).items():
            del self._parked_for[request_id]
            self.push(ticket)

    def discard(self, request_id: str) -> bool:
        """Forget a waiting request; whether it was there."""
        ticket = self._places.pop(request_id, None)
        if ticket is None:
            return False
        key = self._parked_for.pop(request_id, None)
        if key is None:
            self._leave(ticket)
        else:
            parked = self._parked[key]
            del parked[request_id]
            if not parked:
                del self._parked[key]
        return True

    def parked_for(self, request_id: str) -> str | None:
        """The key that a request is parked under; None for one that is not parked."""
        return self._parked_for.get(request_id)

    def heads(self, count: int) -> list[str]:
        """Ids of up to `count` tickets from the front; nothing is removed."""
        walk = self.walk()
        found = [ticket.request_id for ticket in islice(walk, count)]
        walk.close()
        return found

    def walk(self) -> Generator[Ticket]:
        """Tickets from the front: by urgency, then those owed a turn, then by the tenant's rank, then by
        arrival. Tickets may leave while the walk goes on; one that comes is met in the next walk. Close it.
        """
        for urgency in self._urgencies.copy():
            level = self._levels.get(urgency)
            if level is None:
                continue
            try:
                yield from [level.owed.tickets[order] for order in level.owed.orders]
                yield from self._walk_lanes(level)
            finally:
                self._forget_empty(urgency, level)

    def _walk_lanes(self, level: _Level) -> Generator[Ticket]:
        aside: list[tuple[_Lane, int]] = []
        ahead: list[tuple[int, int, str]] = []  # the next ticket of each lane that was met
        try:
            while level.fronts or ahead:
                if level.fronts and (not ahead or level.fronts[0] < ahead[0]):
                    entry = heapq.heappop(level.fronts)
                    lane = level.lanes.get(entry[2])
                    if lane is None or lane.front is not entry:
                        continue
                    rank = self._rank(lane.tenant)
                    if rank is not None and rank != entry[0]:
                        lane.front = (rank, entry[1], lane.tenant)
                        heapq.heappush(level.fronts, lane.front)
                        continue
                    lane.front, lane.walked = None, True
                    aside.append((lane, rank or 0))
                    if rank is None:
                        continue
                else:
                    entry = heapq.heappop(ahead)
                    lane = level.lanes[entry[2]]
                ticket = lane.tickets.get(entry[1])
                if ticket is not None:
                    yield ticket
                at = bisect_right(lane.orders, entry[1])
                if at < len(lane.orders):
                    heapq.heappush(ahead, (entry[0], lane.orders[at], lane.tenant))
        finally:
            for lane, rank in aside:
                lane.walked = False
                if lane.orders:
                    self._to_front(level, lane, rank)
                else:
                    level.lanes.pop(lane.tenant, None)

    def _level(self, urgency: int) -> _Level:
        level = self._levels.get(urgency)
        if level is None:
            level = self._levels[urgency] = _Level()
            insort(self._urgencies, urgency)
        return level

    def _to_front(self, level: _Level, lane: _Lane, rank: int) -> None:
        """Note a lane's head among the others', at a rank that its tenant had: the walk asks again, and ranks
        only grow.
        """
        if lane.walked:
            return
        lane.front = (rank, lane.orders[0], lane.tenant)
        heapq.heappush(level.fronts, lane.front)
        if len(level.fronts) > 2 * len(level.lanes) + _VOID_KEPT:
            level.fronts = [lane.front for lane in level.lanes.values() if lane.front is not None]
            heapq.heapify(level.fronts)

    def _leave(self, ticket: Ticket) -> None:
        """Out of its lane, or of those owed a turn."""
        level = self._levels[ticket.urgency]
        if ticket.request_id in self._owed:
            self._owed.remove(ticket.request_id)
            level.owed.remove(ticket.order)
        else:
            lane = level.lanes[ticket.tenant]
            head = lane.orders[0] == ticket.order
            lane.remove(ticket.order)
            if lane.orders and head:
                self._to_front(level, lane, self._rank(ticket.tenant) or 0)
            elif not lane.orders and not lane.walked:
                del level.lanes[ticket.tenant]
        self._forget_empty(ticket.urgency, level)

    def _forget_empty(self, urgency: int, level: _Level) -> None:
        if not level.lanes and not level.owed.orders and self._levels.get(urgency) is level:
            del self._levels[urgency]
            del self._urgencies[bisect_left(self._urgencies, urgency)]
