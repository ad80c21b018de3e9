"""Copies of adapter images into the page pool, beside the steps: started by a plan, reported by a later
result.

On a CPU a copy advances by bounded pieces, one at the end of each step's start, so that no step waits for a
whole adapter; a step without rows goes on until a copy has ended. On CUDA pages move on a stream of their own
(`stream_copies`) and nothing waits at all. Either way each page is summed where it lies, and the sums are
compared with those of the verified image.

Never decides what is copied and never publishes.

Specification: 0x04E (copy, event, validate); rulings "Residency", "Loading".
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch

from loraplex.core.errors import LoraplexError
from loraplex.core.layout import AdapterImage
from loraplex.core.packed import I32
from loraplex.ops.table import AdapterTable

_log: Final = logging.getLogger(__name__)
PIECE_BYTES: Final = 1 << 20
"""Bytes that a step with rows copies at most on a CPU: about a millisecond of one core, copy and checksum."""
IDLE_PIECE_BYTES: Final = 64 << 20
"""The same for a step without rows."""


@dataclass(slots=True, eq=False)
class Copy:
    """One copy under way. size_class, block: where in its one page it goes, above class 0. done: pages moved.
    sums: int64 checksums of the moved pages, on the host in the end.

    queued, ready: on a stream, everything was given to the device, and the event of its end.
    """

    slot: int
    generation: int
    image: AdapterImage
    pages: I32
    size_class: int = 0
    block: int = 0
    done: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ready: torch.cuda.Event | None = None
    queued: threading.Event = field(default_factory=threading.Event)

    @property
    def intact(self) -> bool:
        """Whether every page lies on the device as it was verified."""
        return bool(np.array_equal(self.sums.numpy(), self.image.checksums))


class Copies(Protocol):
    """Copies of one device, in the order in which they were started."""

    def start(self, copy: Copy) -> None:
        """Begin; returns at once."""
        ...

    def advance(self, idle: bool) -> None:
        """Move on. idle: there are no rows to run; may go on until a copy has ended."""
        ...

    def ended(self) -> list[Copy]:
        """Copies that have ended since the last call."""
        ...

    def complete(self, slot: int, generation: int) -> None:
        """Wait until this copy, if it is under way, has ended."""
        ...

    def close(self) -> None:
        """Let go of the pool; copies under way are not reported any more."""
        ...


class SteppedCopies:
    """Copies of a CPU pool, in pieces."""

    def __init__(
        self, table: AdapterTable, piece_bytes: int = PIECE_BYTES, idle_bytes: int = IDLE_PIECE_BYTES
    ) -> None:
        """piece_bytes, idle_bytes: what one step copies, with rows and without; at least a page, unless 0."""
        self._table = table
        self._pieces = {False: piece_bytes, True: idle_bytes}
        self._open: deque[Copy] = deque()
        self._ended: list[Copy] = []

    def start(self, copy: Copy) -> None:
        """Begin; the first piece moves with the next `advance`."""
        copy.sums = torch.zeros(len(copy.pages), dtype=torch.int64)
        self._open.append(copy)

    def advance(self, idle: bool) -> None:
        """Move one piece, first copy first; an idle step stops at the end of a copy."""
        budget = self._pieces[idle]
        before = len(self._ended)
        while self._open and budget > 0 and not (idle and len(self._ended) > before):
            budget -= self._page(self._open[0])

    def ended(self) -> list[Copy]:
        """Copies that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def complete(self, slot: int, generation: int) -> None:
        """Move the rest of this copy now."""
        for copy in list(self._open):
            if (copy.slot, copy.generation) == (slot, generation):
                while copy in self._open:
                    self._page(copy)

    def close(self) -> None:
        """Nothing runs by itself."""
        self._open.clear()

    def _page(self, copy: Copy) -> int:
        """Move and sum one page or block; bytes. A copy whose image cannot be read has ended,
        without sums.
        """
        page = copy.pages[copy.done : copy.done + 1]
        offset, width = self._table.block_span(copy.size_class, copy.block)
        ended = not page.size
        if not ended:
            try:
                self._table.copy_page(int(page[0]), copy.image, copy.done, offset)
                copy.sums[copy.done] = self._table.checksums(page, copy.size_class, copy.block)[0]
                copy.done += 1
                ended = copy.done == len(copy.pages)
            except LoraplexError as error:
                _log.warning("the copy into adapter slot %d failed: %s", copy.slot, error)
                copy.sums = copy.sums[:0]
                ended = True
        if ended:
            self._open.remove(copy)
            self._ended.append(copy)
        return width
