"""Copies into a CUDA pool: a thread fills page-locked buffers, a stream of its own moves them, events tell the end.

The step's thread only puts a copy into a queue and asks events. The copying thread spends its time in memory copies and
event waits, which hold no lock of the interpreter; what it runs of Python between two of them is a few microseconds a
page. The buffers are few and fixed, so page-locked memory is bounded whatever is loaded.

Specification: 0x04A (pinned staging), 0x04E (copy, event, validate); DESIGN 4 "Loading".
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import Final

import numpy as np
import torch

from loraplex.model.copies import Copy
from loraplex.ops.table import AdapterTable

_log: Final = logging.getLogger(__name__)
BUFFERS: Final = 4
"""Page-locked pages: one is filled while the others move."""
IDLE_WAIT_S: Final = 0.002
"""How long a step without rows waits for the oldest copy: a copy that hangs must not keep a request that comes now."""
IDLE_PAUSE_S: Final = 0.00002


class StreamCopies:
    """`copies.Copies` of a CUDA pool."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        device = table.pool.device
        self._stream = torch.cuda.Stream(device)
        self._buffers = torch.empty((BUFFERS, table.page_bytes), dtype=torch.uint8, pin_memory=True)
        self._filled = [buffer.numpy() for buffer in self._buffers]
        self._moved: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._asked: queue.SimpleQueue[tuple[Copy, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._open: deque[Copy] = deque()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def start(self, copy: Copy) -> None:
        """Queue it behind what the compute stream has been given: scrubs of these pages, where tests ask for them."""
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(self._table.pool.device))
        self._open.append(copy)
        self._asked.put((copy, before))

    def advance(self, idle: bool) -> None:
        """The device moves by itself; an idle step waits a little for the oldest copy."""
        if not idle or not self._open:
            return
        oldest, until = self._open[0], time.monotonic() + IDLE_WAIT_S
        if not oldest.queued.wait(IDLE_WAIT_S):
            return
        while oldest.ready is not None and not oldest.ready.query() and time.monotonic() < until:
            time.sleep(IDLE_PAUSE_S)

    def ended(self) -> list[Copy]:
        """Copies whose event has come since the last call."""
        ended: list[Copy] = []
        while self._open and self._open[0].queued.is_set():
            ready = self._open[0].ready
            if ready is not None and not ready.query():
                break
            ended.append(self._open.popleft())
        return ended

    def complete(self, slot: int, generation: int) -> None:
        """Wait for this copy."""
        for copy in self._open:
            if (copy.slot, copy.generation) == (slot, generation):
                self._wait(copy)

    def close(self) -> None:
        """End the thread after the copies that were asked for: it must not hold the pool any longer."""
        self._asked.put(None)
        self._thread.join()
        self._open.clear()

    @staticmethod
    def _wait(copy: Copy) -> None:
        copy.queued.wait()
        if copy.ready is not None:
            copy.ready.synchronize()

    def _work(self) -> None:
        """The thread: one copy after the other, until `close`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            while (asked := self._asked.get()) is not None:
                copy, before = asked
                try:
                    self._stream.wait_event(before)
                    self._move(copy)
                except Exception:  # noqa: BLE001 - the thread's boundary: a copy without checksums is not intact
                    _log.exception("the copy into adapter slot %d failed", copy.slot)
                    copy.ready = None
                    self._stream.synchronize()  # its pages go to others as soon as it is reported
                finally:
                    copy.queued.set()

    def _move(self, copy: Copy) -> None:
        offset, width = self._table.block_span(copy.size_class, copy.block)
        for index, page in enumerate(copy.pages.tolist()):
            turn = index % BUFFERS
            moved = self._moved[turn]
            if moved is not None:
                moved.synchronize()
            np.copyto(self._filled[turn][:width], copy.image.pages[index])
            target = self._table.pool[page, offset : offset + width]
            target.copy_(self._buffers[turn, :width], non_blocking=True)
            moved = torch.cuda.Event()
            moved.record(self._stream)
            self._moved[turn] = moved
        sums = self._table.checksums(copy.pages, copy.size_class, copy.block)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record(self._stream)
        copy.sums, copy.ready = on_host, ready
