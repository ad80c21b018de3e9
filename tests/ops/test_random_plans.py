"""Random plans over random adapters of every method, for every family, against float64; base rows keep their
bits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.ops.random_worlds import check, random_plan, random_world, sweep
from tests.ops.tunings import TINY, TINY_PREFILL

from loraplex.ops.dispatch import FAMILIES
from loraplex.ops.triton_ops import TritonState

# The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.parametrize("seed", [100, 101, 102])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_random_plans_agree_with_float64(family: str, seed: int) -> None:
    sweep(family, seed, 1, 2, 9)


def test_random_plans_agree_with_float64_in_the_interpreter() -> None:
    rng = np.random.default_rng(7)
    world = random_world(7, torch.float32, 4, [1, 9, 17, 40], page_bytes=1024)  # a page holds a row
    world.table.kernel_state = TritonState(world.table, tunings=(TINY_PREFILL, TINY))
    check(world, random_plan(rng, 4, 3), "triton")


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_many_random_plans_of_up_to_64_adapters(family: str) -> None:
    sweep(family, 500, 6, 4, 64, most=10)
