"""The page pool of a CPU has its memory before a step writes to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from loraplex.model.runner import allocate_pool

POOL_PAGES, PAGE_BYTES = 64, 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("poison", "byte"), [(False, 0), (True, 0xFF)])
def test_a_pool_is_there_when_it_is_made(poison: bool, byte: int) -> None:
    before = resident_bytes()
    pool = allocate_pool(POOL_PAGES, PAGE_BYTES, torch.device("cpu"), poison=poison)
    assert resident_bytes() - before > 0.9 * pool.numel()
    assert bool((pool == byte).all())
