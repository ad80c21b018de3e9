"""A virtual loader: images arrive in host memory after a time, or do not arrive.

Specification: 0x04A, 0x04B (load time); `core.ports.Loader`.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.ports import Fetched
from loraplex.engine.deltas import digest_words
from loraplex.sim.faults import Fault, Injector
from loraplex.sim.tokens import adapter_number
from loraplex.sim.world import VirtualClock
from loraplex.sim.wrong import Wrong


class VirtualLoader:
    """`core.ports.Loader` over the virtual clock. held: images that it keeps in host memory."""

    def __init__(self, clock: VirtualClock, injector: Injector, fetch_ns: int) -> None:
        self._clock, self._injector, self._fetch_ns = clock, injector, fetch_ns
        self._under_way: list[tuple[int, Fetched]] = []
        self.held: set[str] = set()

    def fetch(self, kernel_digest: str) -> None:
        """Begin; a slow disk takes thirty times as long, a lost source ends in a refusal."""
        if kernel_digest in self.held or any(f.kernel_digest == kernel_digest for _, f in self._under_way):
            raise Wrong("host_tier", f"image {kernel_digest[:12]} is fetched although it is there")
        slower = 30 if self._injector.strikes(Fault.SLOW_FETCH) else 1
        code, message = None, ""
        for kind, why in (
            (Fault.LOST_HOST_SOURCE, "adapter_load_failed"),
            (Fault.DIGEST_MISMATCH, "copy_checksum"),
        ):
            if code is None and self._injector.strikes(kind):
                code, message = why, "injected"
                self._injector.struck_images.add(adapter_number(digest_words(kernel_digest)))
        ends = self._clock.now + self._fetch_ns * slower
        self._under_way.append((ends, Fetched(kernel_digest, code, message)))

    def drop(self, kernel_digest: str) -> None:
        """Let go of an image."""
        if kernel_digest not in self.held:
            raise Wrong("host_tier", f"image {kernel_digest[:12]} is dropped although it is not there")
        self.held.discard(kernel_digest)

    def poll(self, wait: bool) -> Sequence[Fetched]:
        """What has ended by now; waiting is the clock's business."""
        ended = [fetched for ends, fetched in self._under_way if ends <= self._clock.now]
        self._under_way = [(ends, fetched) for ends, fetched in self._under_way if ends > self._clock.now]
        self.held |= {fetched.kernel_digest for fetched in ended if fetched.code is None}
        return ended
