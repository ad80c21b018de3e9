"""A device's copies, thread and all, over a device that is faked at its streams: what `tests/gpu` claims of a
real one.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.model import page_checks
from tests.model.copy_checks import TornOnce, check_damaged_copies, check_removal_under_load
from tests.model.drive import Images
from tests.model.page_checks import check_open_copy, check_warm_steps
from tests.model.rig import Rig, check_engine
from tests.model.streamed import count_moved, fail_first_copies, fake_streams, hold_copies
from tests.model.tiny import decoder
from tests.model.tuned import image, loaded

from loraplex.core.layout import AdapterImage
from loraplex.model.decoder import Decoder
from loraplex.model.stream_copies import StreamCopies, runs


@pytest.fixture
def model(root: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    fake_streams(monkeypatch)
    return decoder("llama", root / "base")


def test_a_warm_step_copies_no_byte(root: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = count_moved(monkeypatch)
    check_warm_steps(root, loaded(root, model, ["all-r4", "rs-r16"]), moved)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_copy_that_stays_open_delays_nobody(
    root: Path, model: Decoder, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred steps here, a thousand on a device: some are without rows, and those must not wait for it
    either.
    """
    monkeypatch.setattr(page_checks, "STEPS", 100)
    rig = Rig(root, model, depth=depth, pages=200)
    digest = image(root, model, "rs-r16", rig.runner.pool.shape[1]).kernel_digest
    copies = hold_copies(rig, digest)
    check_open_copy(rig, lambda: len(copies.events), copies.let_go)
    copies.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_torn_copies_are_made_again(root: Path, model: Decoder, depth: int) -> None:
    check_damaged_copies(Rig(root, model, depth=depth, pages=200, images=TornOnce()))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("half_way", [False, True])
def test_copies_that_fail_are_made_again(
    root: Path, model: Decoder, depth: int, half_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail_first_copies(monkeypatch, half_way=half_way)
    check_damaged_copies(Rig(root, model, depth=depth, pages=200))
    assert failed


@pytest.mark.parametrize("depth", [0, 1])
def test_an_adapter_leaves_while_it_is_used(root: Path, model: Decoder, depth: int) -> None:
    check_removal_under_load(Rig(root, model, depth=depth, pages=200))


@pytest.mark.parametrize("depth", [0, 1])
def test_adapters_are_evicted_and_restored(root: Path, model: Decoder, depth: int) -> None:
    check_engine(Rig(root, model, depth=depth, pages=40), True)


def test_runs_of_pages_go_together() -> None:
    assert runs(np.array([5, 6, 7, 3, 9, 10], dtype=np.int32)) == [(0, 5, 3), (3, 3, 1), (4, 9, 2)]
    assert runs(np.array([2], dtype=np.int32)) == [(0, 2, 1)]
    assert runs(np.array([], dtype=np.int32)) == []


def test_images_in_locked_memory_are_read_where_they_lie(
    root: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: AdapterImage, first: int, into: object) -> None:
        raise AssertionError("nothing reads an image that a device reaches")

    class Locked(Images):
        def open(self, kernel_digest: str) -> AdapterImage:
            return replace(super().open(kernel_digest), locked=True)

    monkeypatch.setattr(AdapterImage, "read_pages", refuse)
    check_engine(Rig(root, model, depth=1, pages=40, images=Locked()), True)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_slice_without_an_event_fails_its_copy_and_no_thread(
    root: Path, model: Decoder, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device takes the first slice of all, and no event behind it: that copy is made again, by threads
    that live.
    """
    mark, refused = StreamCopies._mark, []

    def refuse(self: StreamCopies) -> object:
        if not refused:
            refused.append(threading.current_thread().name)
            raise RuntimeError("the device gives no event")
        return mark(self)

    monkeypatch.setattr(StreamCopies, "_mark", refuse)
    rig = Rig(root, model, depth=depth, pages=200, images=TornOnce())
    check_damaged_copies(rig)
    assert refused
    assert all(thread.is_alive() for thread in rig.runner._residents._copies._threads)


def test_a_closed_pool_is_left_alone(root: Path, model: Decoder) -> None:
    """Closing waits for the device: what comes next frees the pool, and takes images out of locked memory."""
    rig, waited = Rig(root, model, depth=1, pages=200), []
    copies = StreamCopies(rig.runner.table)
    copies._stream.synchronize = lambda: waited.append([t.is_alive() for t in copies._threads])
    copies.close()
    assert waited == [[False] * len(copies._threads)]
