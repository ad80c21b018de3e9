"""When somebody must look at a waiting request for its deadline's sake: a heap of its own.

Owns moments, not decisions. Where a request stands in the queue, whether it is parked and whether a place is
free make no difference to when it comes up here.

Specification: 0x09C (urgency); rulings "Scheduling".
"""

from __future__ import annotations

import heapq
from typing import Final

_FORGOTTEN_KEPT: Final = 64
"""Moments of forgotten requests that are kept however few live ones there are."""


class Deadlines:
    """The next moment of each request that has a deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, str]] = []
        self._at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._at)

    def look_at(self, request_id: str, at_ns: int) -> None:
        """Let the request come up at `at_ns`, in place of any earlier word."""
        self._at[request_id] = at_ns
        heapq.heappush(self._heap, (at_ns, request_id))
        if len(self._heap) > 2 * len(self._at) + _FORGOTTEN_KEPT:
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def forget(self, request_id: str) -> None:
        """The request needs no look any more."""
        self._at.pop(request_id, None)

    def due(self, now_ns: int) -> list[str]:
        """Requests whose moment has come, the earliest first; each comes up once."""
        out = []
        while self._heap and self._heap[0][0] <= now_ns:
            at, request_id = heapq.heappop(self._heap)
            if self._at.get(request_id) == at:
                del self._at[request_id]
                out.append(request_id)
        return out
