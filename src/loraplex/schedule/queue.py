"""Waiting requests: a heap by urgency and arrival, and a parking place for those that wait for an adapter.

Owns order only. A step touches heads; removal of a request from the middle is lazy. Arrival order is given
once and never reset, neither by loading nor by preemption.

Specification: 0x09A (clocks), 0x09B; rulings "The plan" (heads only).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final


@dataclass(order=True, frozen=True, slots=True)
class Ticket:
    """A place in the queue: lower priority value first, then arrival order."""

    priority: int
    order: int
    request_id: str = field(compare=False)


_FORGOTTEN_KEPT: Final = 64
"""Tickets of forgotten requests that are kept however few live ones there are."""


class WaitingQueue:
    """Heap of tickets, plus tickets parked under the adapter key that they wait for.

    Forgotten tickets leave when they come up, and all at once when they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[Ticket] = []
        self._parked: dict[str, list[Ticket]] = {}
        self._live: dict[str, Ticket] = {}
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._live)

    def push(self, ticket: Ticket) -> None:
        """Add a ticket, or put a popped one back in its old place."""
        self._live[ticket.request_id] = ticket
        heapq.heappush(self._heap, ticket)

    def pop(self) -> Ticket | None:
        """The first live ticket, removed; None when nothing waits unparked."""
        while self._heap:
            ticket = heapq.heappop(self._heap)
            if self._is_live(ticket):
                del self._live[ticket.request_id]
                return ticket
        return None

    def park(self, ticket: Ticket, key: str) -> None:
        """Set a popped ticket aside until `unpark(key)`."""
        self._live[ticket.request_id] = ticket
        self._parked.setdefault(key, []).append(ticket)

    def unpark(self, key: str) -> None:
        """Put the tickets that waited for `key` back into the heap."""
        for ticket in self._parked.pop(key, ()):
            if self._is_live(ticket):
                heapq.heappush(self._heap, ticket)

    def discard(self, request_id: str) -> bool:
        """Forget a waiting request; whether it was there."""
        if self._live.pop(request_id, None) is None:
            return False
        self._forgotten += 1
        if self._forgotten > len(self._live) + _FORGOTTEN_KEPT:
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Drop every ticket of a forgotten request, from the heap and from what is parked."""
        self._heap = [ticket for ticket in self._heap if self._is_live(ticket)]
        heapq.heapify(self._heap)
        parked = {key: [t for t in tickets if self._is_live(t)] for key, tickets in self._parked.items()}
        self._parked = {key: tickets for key, tickets in parked.items() if tickets}
        self._forgotten = 0

    def _is_live(self, ticket: Ticket) -> bool:
        return self._live.get(ticket.request_id) is ticket

    def heads(self, count: int) -> list[str]:
        """Ids of up to `count` live tickets near the front, the first one first; nothing is removed."""
        near = [t for t in self._heap[: 2 * count] if self._is_live(t)]
        return [t.request_id for t in sorted(near, key=lambda t: (t.priority, t.order))[:count]]
