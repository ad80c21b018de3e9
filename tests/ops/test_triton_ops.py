"""The Triton family behind the operator interface, against float64, over plans of the shipping planner."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.ops.build import make_plan, make_world, random_adapter  # noqa: E402
from tests.ops.random_worlds import DIMS, PLANS, check  # noqa: E402
from tests.ops.tunings import TINY, TINY_PREFILL  # noqa: E402

from loraplex.core.errors import InternalFault  # noqa: E402
from loraplex.core.ids import Module  # noqa: E402
from loraplex.core.layout import Factor  # noqa: E402
from loraplex.ops.triton_ops import TritonState, state_of  # noqa: E402
from loraplex.ops.worklist import Phase  # noqa: E402

pytestmark = [
    # The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU test; the GPU runs test_triton_lora"),
]


def world_of(seed: int, dtype=torch.float32, page_bytes: int = 4096):
    rng = np.random.default_rng(seed)
    adapters = [
        random_adapter(rng, DIMS, dtype, [16], [Module.Q, Module.V, Module.DOWN]),
        random_adapter(rng, DIMS, dtype, [1, 5, 17], list(DIMS.dims)),
        random_adapter(rng, DIMS, dtype, [0, 8], list(DIMS.dims), (Factor.G, Factor.C)),
        random_adapter(rng, DIMS, dtype, [33], [Module.O, Module.GATE], (Factor.H,)),
        random_adapter(rng, DIMS, dtype, [2], [Module.UP], (Factor.C,)),
    ]
    world = make_world(rng, adapters, DIMS, dtype, page_bytes)
    world.table.kernel_state = TritonState(world.table, tunings=(TINY_PREFILL, TINY))
    return world


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_family_agrees_with_float64(name) -> None:
    prefills, decodes = PLANS[name]
    check(world_of(21), make_plan(prefills, decodes, all_logits=True), "triton")


def test_factors_split_over_small_pages() -> None:
    """Pages of 512 bytes hold one to three rows of these factors: addresses come row by row."""
    check(world_of(22, page_bytes=512), make_plan([(2, 3)], [4, 3, 2]), "triton")


def test_a_row_longer_than_a_page_is_refused_by_name() -> None:
    with pytest.raises(
        InternalFault, match="cut over"
    ):  # when it is installed, or the kernels' mirror is made
        world_of(23, page_bytes=128)


def test_the_mirror_follows_retirement_and_a_new_adapter_in_the_same_slot() -> None:
    world = world_of(24)
    plan = make_plan([], [1, 2])
    check(world, plan, "triton")
    mirror = state_of(world.table).mirror
    assert mirror.max_ranks[1].max() == 16
    world.table.retire(1, 10)
    state_of(world.table).plan(make_plan([], [2, 2]))
    assert mirror.max_ranks[1].max() == 0
    assert int(mirror.ranks[1].sum()) == 0
    assert mirror.max_ranks[2].max() > 0


def test_an_unchanged_batch_sends_nothing_and_a_changed_one_does(monkeypatch) -> None:
    world = world_of(25)
    state = state_of(world.table)
    sent: list[int] = []
    check(world, make_plan([], [1, 2, 5]), "triton")
    step = state.steps[Phase.DECODE]
    original = step.send
    monkeypatch.setattr(step, "send", lambda packed: (sent.append(packed.numel()), original(packed)))
    check(world, make_plan([], [1, 2, 5]), "triton")
    assert not sent
    check(world, make_plan([], [1, 5, 2]), "triton")
    world.table.retire(5, 14)
    check(world, make_plan([], [1, 2, 2]), "triton")
    assert len(sent) == 2
