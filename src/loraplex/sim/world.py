"""The clock of an engine under a virtual device."""

from __future__ import annotations


class VirtualClock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1

    def now_ns(self) -> int:
        """Current virtual nanoseconds."""
        return self.now
