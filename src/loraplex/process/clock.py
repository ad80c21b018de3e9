"""The real clock. Monotonic and the same in all processes of a host, so arrival times may cross processes."""

from __future__ import annotations

import time


class MonotonicClock:
    """`core.ports.Clock` over CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin of this host, never decreasing."""
        return time.monotonic_ns()
