"""Eight methods over shared prefixes through `LLM` on the device, with the cache on and off: as PEFT in
float32, and in half types no further from it than those types are on the CPU.

The bodies are those of the CPU's tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.level_b import assert_level_b  # noqa: E402
from tests.model.interleaved import NAMES, check_float, deviations  # noqa: E402
from tests.model.methods import write_folders  # noqa: E402

pytestmark = pytest.mark.gpu
FAMILY = "wide-llama-biased"
SPREAD = 0.05
REQUESTS = 40
POOL_GB = 0.05


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("interleaved"), FAMILY, SPREAD, NAMES)


@pytest.mark.parametrize("seed", [1, 2])
def test_float32(folders: Path, seed: int) -> None:
    check_float(folders, FAMILY, SPREAD, seed, REQUESTS, device="cuda", pool_gb=POOL_GB, max_requests=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cached", [True, False], ids=["cache on", "cache off"])
def test_half_types(folders: Path, dtype: str, cached: bool) -> None:
    own, yardstick = (
        deviations(
            folders,
            FAMILY,
            SPREAD,
            3,
            REQUESTS,
            cached=on,
            device=device,
            dtype=dtype,
            pool_gb=POOL_GB,
            max_requests=8,
        )
        for device, on in (("cuda", cached), ("cpu", False))
    )
    assert_level_b(own, yardstick)
