"""The loader process: verified images arrive in the host store; damage, absence and death are typed and
survived.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.rig import Rig
from tests.images.make import make_image, same

from loraplex.core.layout import EXTENT_COLUMNS, MODULE_COLUMNS, AdapterImage, page_checksum
from loraplex.core.ports import Fetched
from loraplex.engine.step import Engine
from loraplex.images import loader as loader_module
from loraplex.images.disk_store import ImageStore
from loraplex.images.host_store import HostStore
from loraplex.images.loader import InlineLoader, LoaderAsk, LoaderProcess, LoaderStart, host_folder
from loraplex.images.region import Region


@pytest.fixture
def stores(tmp_path: Path) -> tuple[ImageStore, ImageStore]:
    return ImageStore(tmp_path / "disk"), ImageStore(tmp_path / "host")


@pytest.fixture(params=[0, 1], ids=["threads", "yields"])
def loader(tmp_path: Path, stores: object, request: pytest.FixtureRequest) -> Iterator[LoaderProcess]:
    made = LoaderProcess(tmp_path / "disk", tmp_path / "host", nice=request.param)
    yield made
    made.close()


def ended(loader: LoaderProcess, count: int) -> list[Fetched]:
    out: list[Fetched] = []
    while len(out) < count:
        out += loader.poll(wait=True)
    return out


def until(loader: LoaderProcess, holds: Callable[[], bool]) -> None:
    while not holds():
        assert not loader.poll(wait=True)


def test_images_arrive_verified_and_go_when_told(
    stores: tuple[ImageStore, ImageStore], loader: LoaderProcess
) -> None:
    disk, host = stores
    images = [make_image(seed) for seed in range(5)]
    for image in images:
        disk.put(image)
        loader.fetch(image.kernel_digest)
    answers = {f.kernel_digest: f.code for f in ended(loader, 5)}
    assert answers == {image.kernel_digest: None for image in images}
    assert all(same(host.verify(image.kernel_digest), image) for image in images)
    loader.drop(images[0].kernel_digest)
    until(loader, lambda: images[0].kernel_digest not in host.digests())
    assert len(host.digests()) == 4


def test_what_is_damaged_or_absent_is_refused_by_name(
    stores: tuple[ImageStore, ImageStore], loader: LoaderProcess
) -> None:
    disk, host = stores
    path = disk.put(make_image(1))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for digest in (make_image(1).kernel_digest, make_image(2).kernel_digest):
        loader.fetch(digest)
    answers = sorted(ended(loader, 2), key=lambda answer: answer.kernel_digest)
    assert [answer.code for answer in answers] == ["adapter_load_failed"] * 2
    assert "checksum" in answers[0].message
    assert "not in the store" in answers[1].message
    assert host.digests() == ()


def test_a_loader_that_dies_fails_what_it_was_asked_for_and_is_replaced(
    stores: tuple[ImageStore, ImageStore], loader: LoaderProcess
) -> None:
    disk, host = stores
    first, image = make_image(2), make_image(3)
    disk.put(first)
    disk.put(image)
    loader.fetch(first.kernel_digest)
    assert [f.code for f in ended(loader, 1)] == [None]
    pid = loader.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # whatever it is asked from now on, it does not answer
    loader.fetch(image.kernel_digest)
    os.kill(pid, signal.SIGKILL)
    (answer,) = ended(loader, 1)
    assert (answer.kernel_digest, answer.code) == (image.kernel_digest, "adapter_load_failed")
    assert "SIGKILL" in answer.message
    assert loader.pid is None
    loader.fetch(image.kernel_digest)
    assert [f.code for f in ended(loader, 1)] == [None]
    assert loader.pid != pid
    assert same(host.verify(image.kernel_digest), image)


def test_what_a_dead_loader_was_told_to_drop_takes_no_memory(tmp_path: Path) -> None:
    disk, folder = ImageStore(tmp_path / "disk"), tmp_path / "host"
    folder.mkdir()
    Region.create(folder, 1 << 20)
    images = [make_image(seed, 3, 8192) for seed in range(4)]
    for image in images:
        disk.put(image)
    kept, untold, told, later = (image.kernel_digest for image in images)
    loader = LoaderProcess(tmp_path / "disk", folder, nice=0)
    try:
        for digest in (kept, untold, told):
            loader.fetch(digest)
        assert [f.code for f in ended(loader, 3)] == [None] * 3
        pid = loader.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        loader.drop(told)
        os.kill(pid, signal.SIGKILL)
        until(loader, lambda: loader.pid is None)
        loader.drop(untold)
        loader.fetch(later)
        assert [f.code for f in ended(loader, 1)] == [None]
    finally:
        loader.close()
    store = HostStore(folder)
    assert set(store.digests()) == {kept, later}
    assert store._room.free_bytes == (1 << 20) - 2 * images[0].pages.nbytes
    assert same(store.verify(kept), images[0])


def test_a_loader_that_cannot_be_started_fails_the_fetch_and_nothing_else(
    stores: tuple[ImageStore, ImageStore], loader: LoaderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, _ = stores
    image = make_image(3)
    disk.put(image)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(loader))
        loader.fetch(image.kernel_digest)
        (answer,) = ended(loader, 1)
    assert (answer.code, loader.pid) == ("adapter_load_failed", None)
    assert "could not be started" in answer.message
    loader.fetch(image.kernel_digest)
    assert [f.code for f in ended(loader, 1)] == [None]


def test_an_engine_survives_the_death_of_its_loader(tmp_path: Path) -> None:
    """The child is killed before it is asked: the fetch fails, is tried again, and the request is
    answered.
    """

    class Killed(LoaderProcess):
        kills = 2

        def _send(self, message: LoaderStart | LoaderAsk) -> None:
            if self.kills and self.pid is not None and isinstance(message, LoaderAsk):
                self.kills -= 1
                os.kill(self.pid, signal.SIGKILL)
            super()._send(message)

    rig = Rig()
    disk = ImageStore(tmp_path / "disk")
    pages = np.arange(2 * 32, dtype=np.uint8).reshape(2, 32)
    empty = np.zeros((0, MODULE_COLUMNS), dtype=np.int32), np.zeros((0, EXTENT_COLUMNS), dtype=np.int32)
    disk.put(AdapterImage("ab" * 32, rig.kernel_digest("a"), 4, *empty, pages, page_checksum(pages)))
    loader = Killed(tmp_path / "disk", tmp_path / "host")
    rig.engine = Engine(rig.limits, rig.device, rig.mailbox, rig.clock, rig.log, loader=loader)
    try:
        rig.register("a")
        rig.submit("r", [1, 2, 3], "a")
        while not rig.engine.idle or rig.mailbox.inbox:
            rig.step()
        rig.assert_answered("r")
        assert loader.kills == 0
    finally:
        loader.close()


def test_the_inline_loader_maps_the_disk_store(stores: tuple[ImageStore, ImageStore]) -> None:
    disk, _ = stores
    disk.put(make_image(1))
    loader = InlineLoader(disk)
    loader.fetch(make_image(1).kernel_digest)
    loader.fetch(make_image(2).kernel_digest)
    answers = [*loader.poll(False), *loader.poll(False), *loader.poll(False)]
    assert [answer.code for answer in answers] == [None, "adapter_load_failed"]


def test_host_images_lie_where_their_bound_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "SHARED_MEMORY", tmp_path)
    with host_folder(tmp_path / "disk", 1 << 20) as (folder, limit, sentence):
        assert folder.is_dir()
        assert limit == 1 << 20
        assert "in shared memory" in sentence
    assert not folder.exists()
    with host_folder(tmp_path / "disk", 1 << 60) as (folder, _, sentence):
        assert folder.is_relative_to(tmp_path / "disk")
        assert "in files" in sentence


def test_what_a_killed_server_left_takes_no_room_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are gone before the room is measured."""
    left = tmp_path / f"loraplex-{os.getuid()}" / "0123456789abcdef"
    left.mkdir(parents=True)
    monkeypatch.setattr(loader_module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(loader_module, "_free_bytes", lambda folder: 0 if left.exists() else 1 << 20)
    with host_folder(tmp_path / "disk", 1 << 20) as (_, _, sentence):
        assert "in shared memory" in sentence
