"""The image store: what comes out is what went in, or a typed refusal; a killed writer leaves nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.images.make import make_image, refused, same

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.images import adoption
from loraplex.images.adoption import PageThreads
from loraplex.images.disk_store import ImageStore

DIGEST = "12" * 32


@pytest.mark.parametrize(("pages", "page_bytes"), [(1, 8), (3, 256), (2, 8192), (0, 64)])
def test_round_trip(tmp_path: Path, pages: int, page_bytes: int) -> None:
    store = ImageStore(tmp_path / "images")
    image = make_image(1, pages, page_bytes)
    path = store.put(image)
    got = ImageStore(tmp_path / "images").verify(image.kernel_digest)
    assert same(got, image)
    assert not got.pages.flags.writeable
    assert store.total_bytes() == path.stat().st_size
    assert store.digests() == (image.kernel_digest,)


def test_storing_again_changes_nothing(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    path = store.put(make_image())
    before = path.stat()
    store.put(make_image())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_damaged_image_is_replaced(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    path = store.put(make_image())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store.put(make_image())
    assert same(store.verify(make_image().kernel_digest), make_image())


def test_an_open_image_survives_its_deletion(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    image = make_image()
    store.put(image)
    opened = store.open(image.kernel_digest)
    assert store.delete(image.kernel_digest) is True
    assert store.delete(image.kernel_digest) is False
    assert store.digests() == ()
    assert same(opened, image)
    refused(store.open, image.kernel_digest)


def test_pages_are_read_as_they_are_mapped_also_after_a_deletion(tmp_path: Path) -> None:
    store, image = ImageStore(tmp_path), make_image(1, 5, 4096)
    store.put(image)
    opened = store.open(image.kernel_digest)
    store.delete(image.kernel_digest)
    for source in (opened, image):  # of a file, of memory
        for page in (4, 0, 2):
            into = np.zeros(4096, dtype=np.uint8)
            source.read_page(page, into)
            assert np.array_equal(into, image.pages[page])


def test_an_image_with_other_pages_is_not_read_from_the_file(tmp_path: Path) -> None:
    store, image = ImageStore(tmp_path), make_image(1, 3, 4096)
    store.put(image)
    opened = store.open(image.kernel_digest)
    other = replace(opened, pages=make_image(2, 3, 4096).pages)
    for source, pages in ((other, other.pages), (replace(opened, key="cd" * 32), image.pages)):
        into = np.zeros(4096, dtype=np.uint8)
        source.read_page(1, into)
        assert np.array_equal(into, pages[1])


def test_a_page_that_the_file_has_lost_is_a_typed_refusal(tmp_path: Path) -> None:
    store, image = ImageStore(tmp_path), make_image(1, 3, 4096)
    path = store.put(image)
    opened = store.open(image.kernel_digest)
    os.truncate(path, path.stat().st_size - 4096 - 1)
    into = np.zeros(4096, dtype=np.uint8)
    opened.read_page(0, into)
    for page in (1, 2):
        assert f"within page {page}" in refused(opened.read_page, page, into)


@pytest.mark.parametrize("shape", [(4095,), (4097,), (1, 4096)])
def test_a_page_is_read_into_its_own_size_only(tmp_path: Path, shape: tuple[int, ...]) -> None:
    store, image = ImageStore(tmp_path), make_image(1, 3, 4096)
    store.put(image)
    for source in (store.open(image.kernel_digest), image):
        with pytest.raises(InternalFault) as caught:
            source.read_page(0, np.zeros(shape, dtype=np.uint8))
        assert caught.value.code is ErrorCode.OPERATOR_LAYOUT


def test_an_image_that_nobody_holds_leaves_no_descriptor(tmp_path: Path) -> None:
    store, image = ImageStore(tmp_path), make_image(1)
    path = store.put(image)
    before = len(os.listdir("/proc/self/fd"))
    opened = [store.open(image.kernel_digest) for _ in range(8)]
    del opened
    path.write_bytes(path.read_bytes()[:200])
    for _ in range(8):
        refused(store.open, image.kernel_digest)
    assert len(os.listdir("/proc/self/fd")) <= before  # others' may have gone meanwhile


def test_tables_longer_than_one_read_arrive_whole(tmp_path: Path) -> None:
    image = make_image(1)
    image = replace(image, extents=np.arange(4000 * 9, dtype=np.int32).reshape(4000, 9))
    store = ImageStore(tmp_path)
    store.put(image)
    assert same(store.verify(image.kernel_digest), image)


@pytest.mark.parametrize("name", ["../escape", "", "AB" * 32, "ab" * 31])
def test_a_name_that_is_no_digest_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InternalFault) as caught:
        ImageStore(tmp_path).open(name)
    assert caught.value.code is ErrorCode.IDENTITY_INVALID


@pytest.mark.parametrize("at", [0, 8, 12, 16, 20, 24, 32, 63, 64, 96, 128, 160, 200])
def test_a_changed_byte_of_header_or_tables_is_refused(tmp_path: Path, at: int) -> None:
    store = ImageStore(tmp_path)
    path = store.put(make_image())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    refused(store.open, make_image().kernel_digest)


@pytest.mark.parametrize(
    ("at", "words"),
    [(0, "starts with"), (64, "holds the image"), (24, "header implies"), (130, "their digest")],
)
def test_what_is_wrong_is_named(tmp_path: Path, at: int, words: str) -> None:
    store = ImageStore(tmp_path)
    path = store.put(make_image())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert words in refused(store.open, make_image().kernel_digest)


def test_a_full_disk_is_a_typed_refusal_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    store = ImageStore(tmp_path)
    monkeypatch.setattr(os, "write", full)
    assert "No space left" in refused(store.put, make_image())
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_changed_page_is_found_by_verify(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    path = store.put(make_image())
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x80
    path.write_bytes(data)
    assert "page 2" in refused(store.verify, make_image().kernel_digest)


@pytest.mark.parametrize("size", [0, 10, 127, 128, 4096])
def test_a_truncated_or_extended_file_is_refused(tmp_path: Path, size: int) -> None:
    store = ImageStore(tmp_path)
    path = store.put(make_image())
    whole = path.read_bytes()
    for data in (whole[:size], whole + b"\0"):
        path.write_bytes(data)
        refused(store.open, make_image().kernel_digest)


@pytest.mark.parametrize(
    "change",
    [
        {"modules": np.zeros((2, 4), np.int32)},
        {"extents": np.zeros((2, 8), np.int32)},
        {"checksums": np.zeros(2, np.int64)},
    ],
)
def test_an_image_that_contradicts_itself_is_not_stored(
    tmp_path: Path, change: dict[str, np.ndarray]
) -> None:
    refused(ImageStore(tmp_path).put, replace(make_image(), **change))
    assert list(tmp_path.iterdir()) == []


CHILD = """
import os, signal, sys
sys.path[:0] = {path!r}
from tests.images.make import make_image
from loraplex.images.disk_store import ImageStore
if {kill}:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ImageStore({directory!r}).put(make_image(7, 64, 4096))
"""


def child(directory: Path, kill: bool) -> subprocess.Popen[bytes]:
    code = CHILD.format(path=[p for p in sys.path if p] + [os.getcwd()], kill=kill, directory=str(directory))
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    assert child(tmp_path, kill=True).wait() == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    store = ImageStore(tmp_path)
    assert list(tmp_path.iterdir()) == []
    refused(store.open, make_image(7).kernel_digest)


def test_a_living_writers_file_is_left_alone(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with store._temporary() as (_, path):
        ImageStore(tmp_path)
        assert path.exists()
    assert not path.exists()


def test_several_processes_store_the_same_image(tmp_path: Path) -> None:
    children = [child(tmp_path, kill=False) for _ in range(2)]
    assert [c.wait() for c in children] == [0, 0]
    image = make_image(7, 64, 4096)
    assert same(ImageStore(tmp_path).verify(image.kernel_digest), image)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[PageThreads | None]:
    made = PageThreads(request.param) if request.param > 1 else None
    yield made
    if made is not None:
        made.close()


@pytest.fixture(params=[True, False], ids=["populates", "allocates"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds memory for a part of a mapping when asked, and an older one."""
    if not request.param:
        advise = adoption._advise

        def older(memory: np.ndarray, start: int, nbytes: int, advice: int) -> int:
            known = advice != adoption._POPULATE_WRITE
            return advise(memory, start, nbytes, advice) if known else errno.EINVAL

        monkeypatch.setattr(adoption, "_advise", older)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("pages", "page_bytes"), [(1, 8), (0, 64), (5, 1 << 20), (300, 10_000)])
def test_an_adopted_image_is_the_other_stores(
    tmp_path: Path, threads: PageThreads | None, pages: int, page_bytes: int
) -> None:
    disk, host = ImageStore(tmp_path / "disk"), ImageStore(tmp_path / "host")
    image = make_image(1, pages, page_bytes)
    path = disk.put(image)
    there = host.adopt(disk.open(image.kernel_digest), threads)
    assert there.read_bytes() == path.read_bytes()
    assert same(host.verify(image.kernel_digest), image)
    assert [p.name for p in (tmp_path / "host").iterdir()] == [path.name]


def test_an_image_in_memory_is_adopted(tmp_path: Path, threads: PageThreads | None) -> None:
    host, image = ImageStore(tmp_path), make_image(1, 5, 1 << 20)
    host.adopt(image, threads)
    assert same(host.verify(image.kernel_digest), image)


@pytest.mark.parametrize("bad", [0, 3])
def test_an_image_with_a_damaged_page_is_not_adopted(
    tmp_path: Path, threads: PageThreads | None, bad: int
) -> None:
    disk, host = ImageStore(tmp_path / "disk"), ImageStore(tmp_path / "host")
    image = make_image(1, 5, 1 << 20)
    path = disk.put(image)
    data = bytearray(path.read_bytes())
    for page in (bad, 4):
        data[(page - 5 << 20) + 77] ^= 4
    path.write_bytes(data)
    assert f"page {bad} " in refused(host.adopt, disk.open(image.kernel_digest), threads)
    assert list((tmp_path / "host").iterdir()) == []


def test_an_image_that_loses_its_end_is_not_adopted(tmp_path: Path, threads: PageThreads | None) -> None:
    disk, host = ImageStore(tmp_path / "disk"), ImageStore(tmp_path / "host")
    image = make_image(1, 5, 1 << 20)
    path = disk.put(image)
    opened = disk.open(image.kernel_digest)
    os.truncate(path, path.stat().st_size - 10)
    assert "within page 4" in refused(host.adopt, opened, threads)
    assert list((tmp_path / "host").iterdir()) == []


@pytest.mark.parametrize("room", [0, 1, 4])
def test_memory_that_fills_up_ends_an_adoption_with_all_its_threads(
    tmp_path: Path, threads: PageThreads | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, host = ImageStore(tmp_path / "disk"), ImageStore(tmp_path / "host")
    image, advise = make_image(1, 8, 1 << 20), adoption._advise
    disk.put(image)
    asked = iter(range(100))

    def full(memory: np.ndarray, start: int, nbytes: int, advice: int) -> int:
        if advice == adoption._POPULATE_WRITE and next(asked) >= room:
            return errno.EFAULT
        return advise(memory, start, nbytes, advice)

    with monkeypatch.context() as filled:
        filled.setattr(adoption, "_advise", full)
        assert "No space left" in refused(host.adopt, disk.open(image.kernel_digest), threads)
    assert list((tmp_path / "host").iterdir()) == []
    host.adopt(disk.open(image.kernel_digest), threads)  # none of the threads is lost
    assert same(host.verify(image.kernel_digest), image)


def test_memory_that_an_older_kernel_does_not_find_is_a_typed_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(adoption, "_advise", lambda *_: errno.EINVAL)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left" in refused(ImageStore(tmp_path).adopt, make_image(1, 8, 1 << 20))
    assert list(tmp_path.iterdir()) == []
