"""Random plans over random adapters of every method against float64, on the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.ops.build import make_plan  # noqa: E402
from tests.ops.random_worlds import (  # noqa: E402
    DTYPES,
    PLANS,
    check,
    random_world,
    sweep,
)

pytestmark = pytest.mark.gpu
SERVED = ("triton", "segmented", "gather_bmm")
"""What runs on a device: the work lists, the torch family beside them, and a plain one."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", SERVED)
def test_empty_phases_one_row_and_the_base_alone(family: str, dtype: torch.dtype) -> None:
    world = random_world(11, dtype, 5, [1, 2, 3, 5, 8, 16, 17], 1024, "cuda")
    for name, (prefills, decodes) in PLANS.items():
        check(world, make_plan(prefills, decodes, all_logits=name == "mixed"), family)


@pytest.mark.parametrize("page_bytes", [512, 4096, 16384])
@pytest.mark.parametrize("family", SERVED)
def test_random_plans_of_up_to_64_adapters(family: str, page_bytes: int) -> None:
    """Three worlds, one of each type; small pages split factors row by row."""
    sweep(family, 700 + page_bytes, 3, 4, 64, most=10, device="cuda", page_bytes=page_bytes)


@pytest.mark.parametrize("family", SERVED)
def test_sixty_four_adapters_in_one_batch(family: str) -> None:
    world = random_world(12, torch.float32, 64, [1, 7, 16, 33, 64], 4096, "cuda")
    check(world, make_plan([(9, 3), (0, 2), (64, 40)], list(range(1, 65))), family)
    check(world, make_plan([], [0, *range(64, 0, -1), 0]), family)
