"""Where host images of an engine lie, what of it is locked, and what is left when it cannot be."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.images.make import make_image

from loraplex.build import engine_build
from loraplex.build.engine_build import GIB, make_loader, make_runner
from loraplex.config import EngineConfig, ServeConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.images import loader as loader_module
from loraplex.images.disk_store import ImageStore
from loraplex.images.host_store import HostStore
from loraplex.images.region import Region

MIB = 1 / 1024


def wire(tmp_path: Path, shared: int, **options: Any) -> tuple[int | None, list[str]]:
    """Bytes of the region that an engine gets where shared memory has so much room, and what is said; typed
    refusals raise.
    """
    with pytest.MonkeyPatch.context() as patch, ExitStack() as held:
        patch.setattr(loader_module, "SHARED_MEMORY", tmp_path / "shm")
        patch.setattr(loader_module, "_free_bytes", lambda folder: shared)
        options = {"device": "cuda", "loader": "process", "host_gb": 4 * MIB, **options}
        _, config, _, said = make_loader(
            EngineConfig(model="m", images_dir=str(tmp_path / "disk"), **options), held
        )
        assert config.host_dir is not None
        region = Region.find(Path(config.host_dir))
        return None if region is None else region.memory.size, said


def refused(tmp_path: Path, shared: int, **options: Any) -> str:
    with pytest.raises(CallerError) as caught:
        wire(tmp_path, shared, **options)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, "host_locked_gb")
    return caught.value.message


def test_what_is_locked_lies_in_shared_memory(tmp_path: Path) -> None:
    assert wire(tmp_path, GIB)[0] == 2 << 20
    assert wire(tmp_path, GIB, host_locked_gb=3 * MIB) == (
        3 << 20,
        ["host images: at most 4 MiB, in shared memory", "of them 3 MiB page-locked"],
    )
    assert wire(tmp_path, GIB, host_locked_gb=0)[0] is None
    assert wire(tmp_path, GIB, device="cpu")[0] is None


def test_nothing_is_locked_in_files(tmp_path: Path) -> None:
    nbytes, said = wire(tmp_path, 1 << 20)
    assert nbytes is None
    assert "in files" in said[0]
    assert said[1] == "none of them page-locked"
    assert "no room for 0.00391 GiB" in refused(tmp_path, 1 << 20, host_locked_gb=MIB)


def test_sizes_that_cannot_be_locked_are_refused(tmp_path: Path) -> None:
    assert "host images have 0.00391 GiB together" in refused(tmp_path, GIB, host_locked_gb=5 * MIB)
    assert "100 bytes" in refused(tmp_path, GIB, host_locked_gb=100.5 / GIB)
    assert "-1" in refused(tmp_path, GIB, host_locked_gb=-1)
    assert "on cpu" in refused(tmp_path, GIB, host_locked_gb=MIB, device="cpu")
    assert "inline loader" in refused(tmp_path, GIB, host_locked_gb=MIB, loader="inline")


def test_a_runner_whose_images_cannot_be_locked_lets_go_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class Runner:
        def close(self) -> None:
            closed.append(True)

    def lock_images(source: object) -> None:
        raise CallerError(ErrorCode.CONFIG_INVALID, "no memory")

    device = ModuleType("loraplex.build.cuda_start")
    vars(device).update(cuda_runner=lambda *arguments: (Runner(), None), lock_images=lock_images)
    monkeypatch.setitem(sys.modules, "loraplex.build.cuda_start", device)
    monkeypatch.setattr(engine_build, "sampled_vocab", lambda folder, base: 1)
    base: Any = None
    with pytest.raises(CallerError, match="no memory"):
        make_runner(EngineConfig(model="m", images_dir=str(tmp_path), device="cuda"), base)
    assert closed == [True]


class Device:
    """A CUDA runtime that locks what it is told to, unless `refuses`; code 0 is success."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.locked = refuses, list[tuple[int, int]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.locked.append((address, size))
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked = [part for part in self.locked if part[0] != address]
        return 0


def check_error(code: int) -> None:
    if code:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("refuses", [False, True])
def test_a_region_is_locked_from_start_to_end(
    tmp_path: Path, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from loraplex.build.cuda_start import lock_images

    device, store = Device(refuses), ImageStore(tmp_path)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: device)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    lock_images(store)()  # there is no region
    assert device.locked == []
    Region.create(tmp_path, 1 << 20)
    HostStore(tmp_path).adopt(make_image(1))
    if refuses:
        with pytest.raises(CallerError, match="out of memory") as caught:
            lock_images(store)
        assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, "host_locked_gb")
        assert not store.open(make_image(1).kernel_digest).locked
        return
    unlock = lock_images(store)
    region = store.region()
    assert region is not None
    assert device.locked == [(region.memory.ctypes.data, 1 << 20)]
    assert store.open(make_image(1).kernel_digest).locked
    unlock()
    assert device.locked == []
    assert not store.open(make_image(1).kernel_digest).locked


@pytest.mark.parametrize(("device", "asked"), [("cpu", 1.0), ("cuda", -1.0), ("cuda", float("nan"))])
def test_sizes_that_mean_nothing_are_refused_before_anything_starts(device: str, asked: float) -> None:
    with pytest.raises(CallerError) as caught:
        ServeConfig(model="model", device=device, host_locked_gb=asked)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, "host_locked_gb")
