"""Eight methods over shared prefixes through `LLM`, in random interleavings: with the cache on as with it
off, and as PEFT.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.model.interleaved import NAMES, check_float
from tests.model.methods import BASE, write_folders

SPREAD = 0.2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("interleaved"), BASE, SPREAD, NAMES)


def check(folders: Path, seed: int, requests: int) -> None:
    check_float(
        folders,
        BASE,
        SPREAD,
        seed,
        requests,
        pool_gb=(0.01, 0.004)[seed % 2],
        pipeline_depth=seed // 2 % 2,
        token_budget=16,
        max_requests=8,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_methods_over_shared_prefixes(folders: Path, seed: int) -> None:
    check(folders, seed, 16)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 43))
def test_many_interleavings(folders: Path, seed: int) -> None:
    check(folders, seed, 40)
