"""Random adapters of every method, random plans over them, and their comparison with float64."""

from __future__ import annotations

import numpy as np
import torch
from tests.ops.build import GATE_UP, QKV, World, make_plan, make_world, random_adapter, reference

from loraplex.core.ids import Module
from loraplex.core.layout import Factor
from loraplex.core.plan import BatchPlan
from loraplex.ops.dispatch import make_operator
from loraplex.ops.interface import ModuleDims, RowSet

DIMS = ModuleDims(
    2,
    {
        Module.Q: (40, 48),
        Module.K: (40, 17),
        Module.V: (40, 17),
        Module.O: (48, 40),
        Module.GATE: (40, 71),
        Module.UP: (40, 71),
        Module.DOWN: (71, 40),
        Module.LM_HEAD: (40, 130),
        Module.EMBED: (130, 40),
    },
)
CALLS = (QKV, (Module.O,), GATE_UP, (Module.DOWN,))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_world(
    seed: int,
    dtype: torch.dtype,
    adapters: int,
    ranks: list[int],
    page_bytes: int | None = None,
    device: str = "cpu",
) -> World:
    """Adapters of every method: plain, subsets of modules, vectors only, vectors beside factors."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(adapters):
        subset = (
            list(DIMS.dims)
            if index % 3 == 0
            else rng.permutation(list(DIMS.dims))[: rng.integers(1, 6)].tolist()
        )
        vectors = [(), (Factor.G, Factor.C), (Factor.H,), (Factor.C,)][index % 4]
        own = [*ranks, 0] if vectors else ranks
        adapter = random_adapter(rng, DIMS, dtype, own, [Module(m) for m in subset], vectors)
        made.append(adapter or random_adapter(rng, DIMS, dtype, ranks, [Module.Q]))
    chosen = page_bytes or int(rng.choice([128, 512, 4096, 16384]))
    return make_world(rng, made, DIMS, dtype, page_bytes=chosen, device=device)


def check(world: World, plan: BatchPlan, family: str | None, seed: int = 0) -> None:
    """One operator over all calls of a layer, the head and the embedding, within the rounding that is
    allowed.
    """
    rng = np.random.default_rng(seed)
    ops = make_operator(plan, world.table, family)
    slots = plan.row_adapters
    for layer in range(DIMS.layers):
        for modules in CALLS:
            check_call(world, ops, rng, slots, layer, modules, RowSet.ALL)
    check_call(world, ops, rng, slots[plan.logit_rows], 0, (Module.LM_HEAD,), RowSet.LOGIT)


def check_call(world, ops, rng, slots, layer, modules, rows) -> None:
    dtype, device = world.table.dtype, world.table.pool.device
    d_in = DIMS.dims[modules[0]][0]
    width = sum(DIMS.dims[m][1] for m in modules)
    x = torch.from_numpy(rng.standard_normal((slots.size, d_in))).to(dtype).to(device)
    buffer = torch.from_numpy(rng.standard_normal((slots.size, width + 3))).to(dtype).to(device)
    before = buffer.clone()
    y = buffer[:, 1 : width + 1]
    given = [operand.double().cpu().numpy() for operand in (y, x)]
    expected, bound = reference(world, slots, *given, layer, modules)
    ops.apply(y, x, layer, modules, rows)
    error = np.abs(y.double().cpu().numpy() - expected)
    assert (error <= bound).all(), (
        f"layer {layer} {modules}: {error.max()} at {np.argwhere(error > bound)[:3]}"
    )
    base = torch.from_numpy(slots == 0).to(device)
    assert torch.equal(buffer[base], before[base])
    assert torch.equal(buffer[:, 0], before[:, 0])
    assert torch.equal(buffer[:, width + 1 :], before[:, width + 1 :])


PLANS = {
    "mixed": ([(1, 3), (2, 2), (0, 4), (3, 1)], [1, 0, 4, 5, 1]),
    "decode": ([], [3, 1, 2, 0, 1, 5]),
    "prefill": ([(5, 7), (1, 2)], []),
    "one row": ([], [2]),
    "all base": ([(0, 3)], [0, 0]),
    "one adapter": ([(4, 6)], [4, 4]),
    "nothing": ([], []),
}


def random_plan(rng: np.random.Generator, adapters: int, most: int) -> BatchPlan:
    """Phases of any size, empty ones too; base rows among them; chunks of up to seven rows."""
    prefills = [
        (int(rng.integers(0, adapters + 1)), int(rng.integers(1, 8))) for _ in range(rng.integers(0, most))
    ]
    decodes = rng.integers(0, adapters + 1, rng.integers(0, 3 * most)).tolist()
    return make_plan(prefills, decodes, all_logits=bool(rng.integers(0, 2)))


def sweep(
    family: str,
    seed: int,
    worlds: int,
    plans: int,
    most_adapters: int,
    most: int = 4,
    device: str = "cpu",
    page_bytes: int | None = None,
) -> None:
    """Random worlds and plans; `PLANS` adds the empty phases, the one row and the base alone to each
    world.
    """
    rng = np.random.default_rng(seed)
    for index in range(worlds):
        adapters = int(rng.integers(1, most_adapters + 1))
        ranks = rng.integers(1, 65, 4).tolist()
        world = random_world(seed + index, DTYPES[(seed + index) % 3], adapters, ranks, page_bytes, device)
        for _ in range(plans):
            check(world, random_plan(rng, adapters, most), family, seed=int(rng.integers(1 << 30)))
