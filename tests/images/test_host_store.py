"""The loader's store: images in a region come out as they went in, their room returns exactly, damage is
seen.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.images.make import make_image, refused, same

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.images import adoption
from loraplex.images.adoption import PageThreads, populate
from loraplex.images.disk_store import ImageStore
from loraplex.images.host_store import HostStore
from loraplex.images.loader import LoaderProcess
from loraplex.images.region import ALIGN_BYTES, REGION_FILE, Region, Room

REGION_BYTES = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    host = tmp_path / "host"
    host.mkdir()
    Region.create(host, REGION_BYTES + 5)
    return host


@pytest.fixture(params=[0, 3], ids=["one", "threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[PageThreads | None]:
    made = PageThreads(request.param) if request.param else None
    yield made
    if made is not None:
        made.close()


def test_images_lie_in_the_region_and_their_room_returns(folder: Path, threads: PageThreads | None) -> None:
    store, reader = HostStore(folder), ImageStore(folder)
    images = [make_image(seed, pages, 8192) for seed, pages in ((1, 3), (2, 40), (3, 1))]
    for image in images:
        assert store.adopt(image, threads).stat().st_size < image.pages.nbytes
    for image in images:
        got = reader.verify(image.kernel_digest)
        assert same(got, image)
        assert got.reader is None
        assert not got.locked
    assert store._room.free_bytes == REGION_BYTES - sum(image.pages.nbytes for image in images)
    for image in images:
        assert store.delete(image.kernel_digest)
    assert store._room.free_bytes == REGION_BYTES
    assert not store.delete(images[0].kernel_digest)
    assert os.listdir(folder) == [REGION_FILE]


def test_what_finds_no_room_is_a_file_of_its_own(folder: Path, threads: PageThreads | None) -> None:
    store = HostStore(folder)
    large, larger = make_image(1, 100, 8192), make_image(2, 100, 8192)
    for image in (large, larger):
        store.adopt(image, threads)
    assert store.open(large.kernel_digest).reader is None
    assert store.open(larger.kernel_digest).reader is not None
    assert all(same(ImageStore(folder).verify(image.kernel_digest), image) for image in (large, larger))
    store.delete(larger.kernel_digest)
    store.delete(large.kernel_digest)
    assert store._room.free_bytes == REGION_BYTES


def test_a_locked_region_says_so_of_its_images(folder: Path) -> None:
    HostStore(folder).adopt(make_image(1))
    reader = ImageStore(folder)
    region = reader.region()
    assert region is not None
    assert populate(region.memory, 3)
    assert same(reader.verify(make_image(1).kernel_digest), make_image(1))
    region.locked = True
    assert reader.open(make_image(1).kernel_digest).locked


def test_a_page_without_its_checksum_takes_no_room(folder: Path, threads: PageThreads | None) -> None:
    store, image = HostStore(folder), make_image(1, 3, 8192)
    torn = replace(image, checksums=image.checksums ^ np.array([0, 1, 0]))
    assert "page 1" in refused(store.adopt, torn, threads)
    assert store._room.free_bytes == REGION_BYTES
    assert store.digests() == ()


def test_a_damaged_image_is_replaced_in_its_room(folder: Path) -> None:
    store, image = HostStore(folder), make_image(1, 3, 8192)
    store.adopt(image)
    region = store.region()
    assert region is not None
    region.memory[8192] ^= 1
    assert "page 1" in refused(store.verify, image.kernel_digest)
    store.adopt(image)
    assert same(store.verify(image.kernel_digest), image)
    assert store._room.free_bytes == REGION_BYTES - image.pages.nbytes


def test_a_damaged_image_that_is_not_replaced_names_no_part_of_the_region(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, damaged, other = HostStore(folder), make_image(1, 3, 8192), make_image(2, 3, 8192)
    store.adopt(damaged)
    region = store.region()
    assert region is not None
    region.memory[8192] ^= 1
    with monkeypatch.context() as full:
        full.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "it is full")))
        assert "it is full" in refused(store.adopt, damaged)
    store.adopt(other)
    assert store.digests() == (other.kernel_digest,)
    assert same(HostStore(folder).verify(other.kernel_digest), other)  # the next loader's books


def test_the_next_loader_knows_what_lies_where(folder: Path) -> None:
    first = HostStore(folder)
    kept, damaged = make_image(1, 3, 8192), make_image(2, 5, 8192)
    for image in (kept, damaged):
        path = first.adopt(image)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    store = HostStore(folder)
    assert store.digests() == (kept.kernel_digest,)
    assert store._room.free_bytes == REGION_BYTES - kept.pages.nbytes
    later = make_image(3, 100, 8192)
    store.adopt(later)
    assert same(store.verify(kept.kernel_digest), kept)
    assert same(store.verify(later.kernel_digest), later)


def test_a_place_beyond_the_region_is_refused(folder: Path) -> None:
    HostStore(folder).adopt(make_image(1, 3, 8192))
    os.truncate(folder / REGION_FILE, 8192)
    assert "not in a region of 8192" in refused(ImageStore(folder).open, make_image(1).kernel_digest)
    (folder / REGION_FILE).unlink()
    assert "a region that is not there" in refused(ImageStore(folder).open, make_image(1).kernel_digest)


def test_a_loader_process_uses_the_region(folder: Path, tmp_path: Path) -> None:
    disk, reader = ImageStore(tmp_path / "disk"), ImageStore(folder)
    images = [make_image(seed, 20, 8192) for seed in range(4)]
    loader = LoaderProcess(tmp_path / "disk", folder, nice=0)
    try:
        for image in images:
            disk.put(image)
            loader.fetch(image.kernel_digest)
        answers: dict[str, str | None] = {}
        while len(answers) < len(images):
            answers |= {answer.kernel_digest: answer.code for answer in loader.poll(wait=True)}
        assert set(answers.values()) == {None}
        opened = [reader.verify(image.kernel_digest) for image in images]
        assert all(same(got, image) and got.reader is None for got, image in zip(opened, images, strict=True))
    finally:
        loader.close()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 6 * ALIGN_BYTES)), max_size=60))
def test_room_is_nobodys_twice_and_comes_back_whole(steps: list[tuple[int, int]]) -> None:
    room, held = Room(16 * ALIGN_BYTES), dict[int, tuple[int, int]]()
    for name, size in steps:
        if name in held:
            room.give(*held.pop(name))
            continue
        offset = room.take(size)
        whole = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        if offset is not None:
            assert offset % ALIGN_BYTES == 0
            assert all(
                offset + whole <= at or at + -(-n // ALIGN_BYTES) * ALIGN_BYTES <= offset
                for at, n in held.values()
            )
            held[name] = (offset, size)
        else:
            assert room.free_bytes < 16 * ALIGN_BYTES
    again = Room(16 * ALIGN_BYTES, tuple(held.values()))
    assert again.free_bytes == room.free_bytes
    for place in held.values():
        room.give(*place)
    assert room.take(16 * ALIGN_BYTES) == 0


def test_room_that_is_free_is_not_given_back() -> None:
    room = Room(4 * ALIGN_BYTES)
    with pytest.raises(InternalFault) as caught:
        room.give(0, ALIGN_BYTES)
    assert caught.value.code is ErrorCode.HOST_TIER_STATE
    with pytest.raises(InternalFault):
        Room(4 * ALIGN_BYTES, [(0, 2 * ALIGN_BYTES), (ALIGN_BYTES, 1)])


@pytest.mark.parametrize(
    ("error", "outcome"), [(0, "found"), (errno.EINVAL, "not asked"), (errno.EFAULT, "full")]
)
def test_memory_is_found_ahead_where_the_kernel_can(
    folder: Path, error: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is asked for; an older kernel finds it when it is locked, and only a lack of it is
    an error.
    """
    region, asked = Region.find(folder), set[int]()
    assert region is not None

    def advise(memory: np.ndarray, start: int, nbytes: int, advice: int) -> int:
        asked.update(range(start, start + nbytes, ALIGN_BYTES))
        return error

    monkeypatch.setattr(adoption, "_advise", advise)
    if outcome == "full":
        with pytest.raises(OSError, match="No space left"):
            populate(region.memory, 3)
    else:
        assert populate(region.memory, 3) == (outcome == "found")
        assert asked == set(range(0, REGION_BYTES, ALIGN_BYTES))
