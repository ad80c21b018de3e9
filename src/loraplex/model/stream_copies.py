"""Copies into a CUDA pool: the device moves pages on a stream of its own, events tell the end.

The step's thread only puts a copy into a queue and asks events. An image in page-locked memory goes as it
lies. Any other is read into page-locked buffers first, in a few slices, so that several threads read one
image at once and two images overlap. A thread spends its time in reads and event waits, which hold no lock of
the interpreter: one read for each slice, and a few microseconds of Python for each run of pages. The buffers
are few and fixed, so what they lock is bounded.

Specification: 0x04A (pinned staging), 0x04E (copy, event, validate); rulings "Loading".
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from loraplex.core.packed import I32
from loraplex.model.copies import Copy
from loraplex.ops.table import AdapterTable

_log: Final = logging.getLogger(__name__)
THREADS: Final = 4
"""Threads that read at most: a few move bytes as fast as memory lets them."""
SLICE_BYTES: Final = 8 << 20
"""Bytes that a thread reads at once, at least a page."""
BUFFERS: Final = 2
"""Page-locked slices of each thread: one is filled while the other moves."""
IDLE_WAIT_S: Final = 0.002
"""How long a step without rows waits for the oldest copy: a copy that hangs must not keep a request that
comes now.
"""
IDLE_PAUSE_S: Final = 0.00002


@dataclass(slots=True, eq=False)
class Moving:
    """A copy on its way. before: what its pages wait for. left: slices that were not given to the device yet.
    failed: one of them could not be.
    """

    copy: Copy
    before: torch.cuda.Event
    left: int
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class StreamCopies:
    """`copies.Copies` of a CUDA pool."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._stream = torch.cuda.Stream(table.pool.device)
        self._slice_pages = max(1, SLICE_BYTES // table.page_bytes)
        self._asked: queue.SimpleQueue[tuple[Moving, int, int] | None] = queue.SimpleQueue()
        self._open: deque[Copy] = deque()
        self._summing = threading.Lock()
        count = min(THREADS, len(os.sched_getaffinity(0)))
        shape = (count, BUFFERS, self._slice_pages, table.page_bytes)
        buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._threads = [
            threading.Thread(target=self._work, args=(own,), name=f"copies-{index}", daemon=True)
            for index, own in enumerate(buffers)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, copy: Copy) -> None:
        """Queue it behind what the compute stream has been given: scrubs of these pages, where tests ask for
        them.
        """
        before = torch.cuda.Event()
        before.record(torch.cuda.current_stream(self._table.pool.device))
        self._open.append(copy)
        pages = len(copy.pages)
        share = -(-pages // len(self._threads))
        step = max(1, pages if copy.image.locked else min(self._slice_pages, share))
        starts = range(0, max(pages, 1), step)
        moving = Moving(copy, before, len(starts))
        for first in starts:
            self._asked.put((moving, first, min(step, pages - first)))

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
                copy.queued.wait()
                if copy.ready is not None:
                    copy.ready.synchronize()

    def close(self) -> None:
        """End the threads after the copies that were asked for; then the device neither writes the pool nor
        reads an image.
        """
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        self._stream.synchronize()
        self._open.clear()

    def _work(self, buffers: torch.Tensor) -> None:
        """A thread: one slice after the other, until `close`. buffers: uint8 [BUFFERS, pages, page bytes],
        its own.
        """
        moved: list[torch.cuda.Event | None] = [None] * BUFFERS
        turn = 0
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            while (asked := self._asked.get()) is not None:
                moving, first, count = asked
                turn = (turn + 1) % BUFFERS
                try:
                    last = moved[turn]
                    if last is not None:
                        last.synchronize()
                    try:
                        self._move(moving, first, count, buffers[turn])
                    finally:
                        moved[turn] = self._mark()
                except Exception:  # noqa: BLE001 - the thread's boundary: such a copy is not intact
                    _log.exception("the copy into adapter slot %d failed", moving.copy.slot)
                    moving.failed = True
                self._given(moving)

    def _mark(self) -> torch.cuda.Event:
        """An event behind everything that the stream was given."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _move(self, moving: Moving, first: int, count: int, buffer: torch.Tensor) -> None:
        """Give pages of a copy to the device, by way of a page-locked slice where they do not lie in such
        memory.
        """
        copy = moving.copy
        offset, width = self._table.block_span(copy.size_class, copy.block)
        if copy.image.locked:
            source = torch.from_numpy(copy.image.pages)
        else:
            source = buffer.view(-1)[: count * width].view(count, width)
            copy.image.read_pages(first, source.numpy())
        self._stream.wait_event(moving.before)
        for at, page, run in runs(copy.pages[first : first + count]):
            target = self._table.pool[page : page + run, offset : offset + width]
            target.copy_(source[at : at + run], non_blocking=True)

    def _given(self, moving: Moving) -> None:
        """A slice was given to the device, or failed; behind the last one the pages are summed where they
        lie.
        """
        with moving.lock:
            moving.left -= 1
            if moving.left:
                return
        copy = moving.copy
        try:
            if not moving.failed:
                self._sum(copy)
                return
        except Exception:  # noqa: BLE001 - as in `_work`
            _log.exception("the copy into adapter slot %d could not be summed", copy.slot)
        finally:
            try:
                if copy.ready is None:
                    self._stream.synchronize()  # its pages go to others as soon as it is reported
            finally:
                copy.queued.set()

    def _sum(self, copy: Copy) -> None:
        """Sum the pages on the device, and have the sums come to the host; sets the event of the end."""
        with self._summing:  # what the sums are made of is kept from call to call
            sums = self._table.checksums(copy.pages, copy.size_class, copy.block)
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        copy.sums, copy.ready = on_host, self._mark()


def runs(pages: I32) -> list[tuple[int, int, int]]:
    """Pages that follow one another: (index of the first, its page, how many)."""
    if not pages.size:
        return []
    first = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    return list(
        zip(first.tolist(), pages[first].tolist(), np.diff(first, append=pages.size).tolist(), strict=True)
    )
