"""Random plans over random adapters of every method, for every family, against float64; base rows keep their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.ops.build import make_plan
from tests.ops.test_families import check, random_world
from tests.ops.test_triton_ops import TINY, TINY_PREFILL

from loraplex.core.plan import BatchPlan
from loraplex.ops.dispatch import FAMILIES
from loraplex.ops.triton_ops import TritonState

# The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_plan(rng: np.random.Generator, adapters: int, most: int) -> BatchPlan:
    """Phases of any size, empty ones too; base rows among them; chunks of up to seven rows."""
    prefills = [
        (int(rng.integers(0, adapters + 1)), int(rng.integers(1, 8))) for _ in range(rng.integers(0, most))
    ]
    decodes = rng.integers(0, adapters + 1, rng.integers(0, 3 * most)).tolist()
    return make_plan(prefills, decodes, all_logits=bool(rng.integers(0, 2)))


def sweep(
    family: str, seed: int, worlds: int, plans: int, most_adapters: int, most: int = 4, device: str = "cpu",
    page_bytes: int | None = None,
) -> None:  # fmt: skip
    """Random worlds and plans; `PLANS` adds the empty phases, the one row and the base alone to each world."""
    rng = np.random.default_rng(seed)
    for index in range(worlds):
        adapters = int(rng.integers(1, most_adapters + 1))
        ranks = rng.integers(1, 65, 4).tolist()
        world = random_world(seed + index, DTYPES[(seed + index) % 3], adapters, ranks, page_bytes, device)
        for _ in range(plans):
            check(world, random_plan(rng, adapters, most), family, seed=int(rng.integers(1 << 30)))


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
