"""Which engines get a region for host images, and what is refused; making one needs no device."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from loraplex.config import EngineConfig, ServeConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.runtime import loader as loader_module
from loraplex.runtime.build import make_loader
from loraplex.runtime.images import ImageStore


def made(tmp_path: Path, **options: object) -> tuple[int, list[str]]:
    """Bytes of the region, and what is said of the host tier."""
    with ExitStack() as held:
        options = {"device": "cuda", "loader": "process", "host_gb": 0.01} | options
        config = EngineConfig(model="model", images_dir=str(tmp_path / "images"), **options)  # type: ignore[arg-type]
        _, config, _, said = make_loader(config, held)
        assert config.host_dir is not None
        region = ImageStore(config.host_dir).region()
        return 0 if region is None else int(region.memory.size), said


def test_a_device_gets_what_the_limit_allows(tmp_path: Path) -> None:
    size, said = made(tmp_path)
    assert size == int(0.01 * (1 << 30)) // 4096 * 4096
    assert said[-1] == "of them 10 MiB page-locked"


def test_as_much_as_was_asked_for_or_none(tmp_path: Path) -> None:
    assert made(tmp_path, host_locked_gb=0.005)[0] == int(0.005 * (1 << 30)) // 4096 * 4096
    assert made(tmp_path, host_locked_gb=0)[0] == 0
    assert made(tmp_path, device="cpu")[0] == 0


@pytest.mark.parametrize("asked", [0.02, 1e-9])
def test_more_than_the_limit_or_less_than_a_page_of_memory_is_refused(tmp_path: Path, asked: float) -> None:
    with pytest.raises(CallerError, match="from 4096 bytes") as caught:
        made(tmp_path, host_locked_gb=asked)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_files_of_a_disk_are_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_free_bytes", lambda folder: 0)
    size, said = made(tmp_path)
    assert size == 0
    assert "none of them page-locked" in said[-1]
    with pytest.raises(CallerError, match="lie in files"):
        made(tmp_path, host_locked_gb=0.005)


@pytest.mark.parametrize(("device", "asked"), [("cpu", 1.0), ("cuda", -1.0), ("cuda", float("nan"))])
def test_sizes_that_mean_nothing_are_refused_before_anything_starts(device: str, asked: float) -> None:
    with pytest.raises(CallerError) as caught:
        ServeConfig(model="model", device=device, host_locked_gb=asked)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, "host_locked_gb")
