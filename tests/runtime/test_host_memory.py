"""Where host images of an engine lie, what of it is locked, and what is left when it cannot be."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.runtime import build
from loraplex.runtime import loader as loader_module
from loraplex.runtime.build import GIB, make_loader, make_runner
from loraplex.runtime.region import Region

MIB = 1 / 1024


def wire(tmp_path: Path, shared: int, **options: Any) -> tuple[int | None, list[str]]:
    """Bytes of the region that an engine gets where shared memory has so much room, and what is said; typed refusals raise."""
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
    assert wire(tmp_path, GIB)[0] == 4 << 20
    assert wire(tmp_path, GIB, host_locked_gb=3 * MIB) == (
        3 << 20, ["host images: at most 4 MiB, in shared memory", "of them 3 MiB page-locked"],
    )  # fmt: skip
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

    device = ModuleType("loraplex.runtime.cuda")
    vars(device).update(cuda_runner=lambda *arguments: (Runner(), None), lock_images=lock_images)
    monkeypatch.setitem(sys.modules, "loraplex.runtime.cuda", device)
    monkeypatch.setattr(build, "sampled_vocab", lambda folder, base: 1)
    base: Any = None
    with pytest.raises(CallerError, match="no memory"):
        make_runner(EngineConfig(model="m", images_dir=str(tmp_path), device="cuda"), base)
    assert closed == [True]
