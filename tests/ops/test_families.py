"""Every operator family against float64 over random plans, adapters, methods and page sizes."""

from __future__ import annotations

import pytest
import torch
from tests.ops.build import make_plan
from tests.ops.random_worlds import DTYPES, PLANS, check, random_world

from loraplex.ops.dispatch import FAMILIES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_agrees_with_float64(family: str, dtype: torch.dtype) -> None:
    world = random_world(11, dtype, 5, [1, 2, 3, 5, 8, 16, 17])
    for name, (prefills, decodes) in PLANS.items():
        check(world, make_plan(prefills, decodes, all_logits=name == "mixed"), family)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sixty_four_adapters_of_ranks_up_to_64(family: str) -> None:
    world = random_world(12, torch.float32, 64, [1, 7, 16, 33, 64])
    check(world, make_plan([(9, 3)], list(range(1, 65))), family)
