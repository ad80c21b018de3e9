"""Waiting requests: a heap by urgency and arrival, and a parking place for those that wait for an adapter.

Owns order only. A step touches heads; removal of a request from the middle is lazy. Arrival order is given once and
never reset, neither by loading nor by preemption.

Specification: 0x09A (clocks), 0x09B; DESIGN 4 "The plan" (heads only).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(order=True, frozen=True, slots=True)
class Ticket:
    """A place in the queue: lower priority value first, then arrival order."""

    priority: int
    order: int
    request_id: str = field(compare=False)


class WaitingQueue:
    """Heap of tickets, plus tickets parked under the adapter key that they wait for."""

    def __init__(self) -> None:
        self._heap: list[Ticket] = []
        self._parked: dict[str, list[Ticket]] = {}
        self._live: dict[str, Ticket] = {}

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
            if self._live.get(ticket.request_id) is ticket:
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
            if self._live.get(ticket.request_id) is ticket:
                heapq.heappush(self._heap, ticket)

    def discard(self, request_id: str) -> bool:
        """Forget a waiting request; whether it was there."""
        return self._live.pop(request_id, None) is not None

    def heads(self, count: int) -> list[str]:
        """Ids of up to `count` live tickets near the front, the first one first; nothing is removed."""
        near = [t for t in self._heap[: 2 * count] if self._live.get(t.request_id) is t]
        return [t.request_id for t in sorted(near, key=lambda t: (t.priority, t.order))[:count]]

    def waiting_ids(self) -> Iterator[str]:
        """Ids of all waiting requests, in no order that matters."""
        return iter(list(self._live))
