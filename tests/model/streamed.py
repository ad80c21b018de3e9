"""Copies on a stream for tests: ends that are held back, failures, and streams where there is no device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from loraplex.model import residents
from loraplex.model.copies import Copy
from loraplex.model.stream_copies import Moving, StreamCopies
from loraplex.ops.table import AdapterTable


class DoneEvent:
    """An event of a device that has always finished."""

    def record(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class NoStream:
    """A stream of that device."""

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


def fake_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """`StreamCopies` over pools in host memory: its thread, its buffers and its order, on a device that is
    the processor.
    """
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: NoStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: NoStream())
    monkeypatch.setattr(residents, "make_copies", StreamCopies)


class HeldEvent:
    """The event of a copy's end, which does not come before it is let go. waits: how often somebody waited
    till then.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.held, self.waits = inner, True, 0

    def query(self) -> bool:
        return not self.held and bool(self.inner.query())

    def synchronize(self) -> None:
        self.waits += self.held
        self.inner.synchronize()


class HeldStream(StreamCopies):
    """Copies of which one image's never end until they are let go."""

    def __init__(self, table: AdapterTable, digest: str) -> None:
        super().__init__(table)
        self.digest = digest
        self.events: list[HeldEvent] = []

    def _sum(self, copy: Copy) -> None:
        super()._sum(copy)
        if copy.image.kernel_digest == self.digest:
            event: Any = HeldEvent(copy.ready)
            self.events.append(event)
            copy.ready = event

    def let_go(self) -> None:
        assert [event.waits for event in self.events] == [0] * len(self.events), (
            "a step waited for an open copy"
        )
        for event in self.events:
            event.held = False


def hold_copies(rig: Any, digest: str) -> HeldStream:
    """Have a rig's runner copy by a `HeldStream`, in place of what it copied by; to be closed by the
    caller.
    """
    rig.runner._residents.close()
    copies = HeldStream(rig.runner.table, digest)
    rig.runner._residents._copies = copies
    return copies


def fail_first_copies(monkeypatch: pytest.MonkeyPatch, *, half_way: bool) -> dict[int, Copy]:
    """The first copy into each slot raises; those copies by slot. half_way: in its last slice, after a page
    of that was moved.
    """
    failing: dict[int, Copy] = {}
    move = StreamCopies._move

    def fail(self: StreamCopies, moving: Moving, first: int, count: int, buffer: torch.Tensor) -> None:
        copy = moving.copy
        last = first + count == len(copy.pages)
        if failing.setdefault(copy.slot, copy) is not copy or (half_way and not last):
            move(self, moving, first, count, buffer)
            return
        if half_way:
            move(self, moving, first, 1, buffer)
        raise RuntimeError("the device refused the copy")

    monkeypatch.setattr(StreamCopies, "_move", fail)
    return failing


def count_moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every slice from now on; a page that moves in a step's own thread is an error."""
    moved: list[int] = []
    move = StreamCopies._move

    def count_bytes(self: StreamCopies, moving: Moving, first: int, count: int, buffer: torch.Tensor) -> None:
        moved.append(count * moving.copy.image.pages.shape[1])
        move(self, moving, first, count, buffer)

    def refuse(self: AdapterTable, *page: object) -> None:
        raise AssertionError("pages move on the copies' own stream")

    monkeypatch.setattr(StreamCopies, "_move", count_bytes)
    monkeypatch.setattr(AdapterTable, "copy_page", refuse)
    return moved
