"""Rows keep their function when the batch around them changes; bytes nobody owns change nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.ops.build import QKV, World, make_image, make_plan, make_world, random_adapter
from tests.ops.random_worlds import DIMS, random_world

from loraplex.core.ids import Module
from loraplex.core.layout import Factor
from loraplex.core.plan import BatchPlan
from loraplex.ops.cpu import compiled
from loraplex.ops.dispatch import FAMILIES, make_operator
from loraplex.ops.exact import ExactOps, read_adapter
from loraplex.ops.interface import NoAdapters, RowSet

WIDTH = sum(DIMS.dims[m][1] for m in QKV)
ROW_INDEPENDENT = ["bgmv"] + (["cpu_kernel"] if compiled.library() else [])


def operands(rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, DIMS.dims[Module.Q][0]), generator=generator).to(dtype)
    return torch.randn((rows, WIDTH), generator=generator).to(dtype), x


def run(world: World, plan: BatchPlan, family: str | None, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = y.clone()
    make_operator(plan, world.table, family).apply(out, x, 0, QKV)
    return out


REQUESTS = [(1, 3), (2, 1), (3, 1), (0, 1), (1, 1), (4, 1), (2, 1), (5, 1)]
"""(adapter slot, rows) of eight requests; the first is a prefill."""


def batch(members: list[int]) -> tuple[BatchPlan, np.ndarray]:
    """The plan of these requests, and the row uid (of the fixed order above) of each packed row."""
    prefills = [REQUESTS[m] for m in members if m == 0]
    decodes = [m for m in members if m != 0]
    plan = make_plan(prefills, [REQUESTS[m][0] for m in decodes])
    starts = np.cumsum([0] + [n for _, n in REQUESTS])
    scheduled = ([0] if 0 in members else []) + decodes
    packed = [scheduled[i] for i in plan.requests.scheduler_index.tolist()]
    return plan, np.concatenate([np.arange(starts[m], starts[m + 1]) for m in packed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ROW_INDEPENDENT)
def test_a_row_is_bitwise_the_same_in_every_batch(family: str, dtype: torch.dtype) -> None:
    world = random_world(21, dtype, 5, [1, 3, 8, 17, 33])
    y, x = operands(10, dtype)
    plan, uid = batch(list(range(8)))
    whole = torch.empty_like(y)
    whole[torch.from_numpy(uid)] = run(world, plan, family, y[uid], x[uid])
    rng = np.random.default_rng(0)
    for _ in range(20):
        members = rng.permutation(8)[: rng.integers(1, 9)].tolist()
        plan, uid = batch(members)
        assert torch.equal(run(world, plan, family, y[uid], x[uid]), whole[torch.from_numpy(uid)])


@pytest.mark.skipif(compiled.library() is None, reason="no compiled kernel on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_gives_the_same_bits_with_any_cut_and_number_of_threads(dtype: torch.dtype) -> None:
    world = random_world(22, dtype, 5, [8, 40, 64])
    plan = make_plan([(1, 150), (2, 40), (0, 9)], [3, 4, 5, 1, 0])
    y, x = operands(plan.rows, dtype)
    alone = torch.cat(
        [
            run(world, make_plan([], [slot]), "cpu_kernel", y[i : i + 1], x[i : i + 1])
            for i, slot in enumerate(plan.row_adapters.tolist())
        ]
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(run(world, plan, "cpu_kernel", y, x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_split_segments_and_reordered_groups_change_nothing(family: str) -> None:
    world = random_world(23, torch.float32, 3, [2, 5])
    plan = make_plan([(1, 4), (2, 3)], [2, 3, 0, 1])
    y, x = operands(plan.rows, torch.float32)
    whole = run(world, plan, family, y, x)
    split = dataclasses.replace(
        plan,
        segment_offsets=np.arange(plan.rows + 1, dtype=np.int32),
        segment_adapters=plan.row_adapters.astype(np.int32),
    )
    assert torch.allclose(run(world, split, family, y, x), whole, atol=1e-5)
    order = [2, 0, 1]
    bounds = plan.group_offsets
    parts = [plan.group_rows[bounds[i] : bounds[i + 1]] for i in order]
    regrouped = dataclasses.replace(
        plan,
        group_rows=np.concatenate(parts),
        group_offsets=np.cumsum([0] + [p.size for p in parts]).astype(np.int32),
        group_adapters=plan.group_adapters[order],
    )
    assert torch.allclose(run(world, regrouped, family, y, x), whole, atol=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
def test_bytes_outside_owned_extents_are_never_read(family: str, poison: int) -> None:
    rng = np.random.default_rng(24)
    vectors = (Factor.H, Factor.G, Factor.C)
    sources = [random_adapter(rng, DIMS, torch.bfloat16, [3, 9], list(DIMS.dims), vectors) for _ in range(2)]
    world = make_world(rng, sources, DIMS, torch.bfloat16, 208)
    plan = make_plan([(1, 5)], [2, 0, 1])
    y, x = operands(plan.rows, torch.bfloat16)
    before = run(world, plan, family, y, x)
    flat = world.table.pool.view(-1)
    owned = torch.zeros_like(flat, dtype=torch.bool)
    for slot, source in world.adapters.items():
        resident = world.table.adapter(slot)
        for (layer, module), m in source.items():
            views = resident.module(layer, module)
            assert views is not None
            assert views.rank == m.a.shape[0]
            for piece in (p for f in Factor for p in views.pieces(f)):
                start = piece.view.data_ptr() - flat.data_ptr()
                owned[start : start + piece.view.numel() * piece.view.itemsize] = True
    assert 0 < owned.sum() < flat.numel()
    flat[~owned] = poison
    assert torch.equal(run(world, plan, family, y, x), before)


def test_publishing_other_slots_between_steps_changes_nothing() -> None:
    world = random_world(25, torch.float32, 3, [4])
    plan = make_plan([], [1, 1, 0])
    y, x = operands(3, torch.float32)
    before = run(world, plan, None, y, x)
    world.table.retire(2, 11)
    image = make_image(world.adapters[3], torch.float32, world.table.page_bytes)
    pages = world.table.adapter(3).pages.copy()
    world.table.retire(3, 12)
    world.table.install(2, image, pages)
    world.table.publish(2, 99)
    assert torch.equal(run(world, plan, None, y, x), before)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_input_vectors_and_embeddings(family: str) -> None:
    rng = np.random.default_rng(26)
    kinds = [
        (list(DIMS.dims), ()),
        (list(DIMS.dims), (Factor.H, Factor.G, Factor.C)),
        ([Module.DOWN, Module.EMBED], (Factor.H,)),
    ]
    sources = [
        random_adapter(rng, DIMS, torch.float32, [2, 3], modules, vectors) for modules, vectors in kinds
    ]
    world = make_world(rng, sources, DIMS, torch.float32, 256)
    plan = make_plan([(1, 2), (3, 3)], [2, 0, 1])
    ops = make_operator(plan, world.table, family)
    slots = plan.row_adapters.tolist()
    assert ops.scales_input
    for module in (Module.Q, Module.O, Module.DOWN):
        x = torch.randn(plan.rows, DIMS.dims[module][0])
        kept = x.clone()
        scaled = ops.scale_input(x, 1, module)
        assert torch.equal(x, kept)
        adapted = [world.adapters.get(s, {}).get((1, module)) for s in slots]
        h = [None if m is None else m.vectors.get(Factor.H) for m in adapted]
        assert (scaled is x) == all(v is None for v in h)
        for row, v in enumerate(h):
            expected = x[row] if v is None else x[row] * torch.from_numpy(v).float()
            assert torch.equal(scaled[row], expected)
    tokens = torch.randint(0, DIMS.dims[Module.EMBED][0], (plan.rows,))
    hidden = torch.randn(plan.rows, DIMS.dims[Module.EMBED][1])
    expected = hidden.double().numpy()
    for row, slot in enumerate(slots):
        m = world.adapters.get(slot, {}).get((0, Module.EMBED))
        if m is not None:
            value = expected[row] + m.scale * (m.b @ m.a[:, int(tokens[row])])
            expected[row] = np.asarray(m.vectors.get(Factor.G, 1.0)) * value + m.vectors.get(Factor.C, 0.0)
    changed = hidden.clone()
    ops.embed(changed, tokens)
    assert np.allclose(changed.double().numpy(), expected, atol=1e-5)
    base = torch.tensor([s == 0 for s in slots])
    assert torch.equal(changed[base], hidden[base])
    assert not torch.equal(changed, hidden)


def test_the_exact_reference_reads_the_same_bytes() -> None:
    world = random_world(27, torch.bfloat16, 3, [1, 2])
    plan = make_plan([(1, 2)], [2, 3, 0])
    exact = ExactOps(plan, {s: read_adapter(world.table.adapter(s), DIMS) for s in (1, 2, 3)}, DIMS)
    y, x = operands(plan.rows, torch.bfloat16)
    out, rows = y.double().tolist(), x.double().tolist()
    exact.apply(out, rows, 0, QKV)
    got = run(world, plan, "segmented", y, x).double()
    assert np.allclose(got.numpy(), np.array(out, dtype=np.float64), rtol=0.03, atol=0.03)
    assert (
        out[plan.row_adapters.tolist().index(0)] == y[plan.row_adapters.tolist().index(0)].double().tolist()
    )


def test_plans_without_adapter_rows_get_the_operator_that_does_nothing() -> None:
    world = random_world(28, torch.float32, 1, [2])
    for plan in (make_plan([(0, 3)], [0]), make_plan([], [])):
        ops = make_operator(plan, world.table)
        assert isinstance(ops, NoAdapters)
        assert not ops.active


def test_a_row_set_of_logits_follows_the_plan() -> None:
    world = random_world(29, torch.float32, 3, [2])
    plan = make_plan([(1, 4), (2, 2)], [3, 0])
    assert plan.logit_rows.size == 4
    ops = make_operator(plan, world.table)
    x = torch.randn(4, DIMS.dims[Module.LM_HEAD][0])
    y = torch.zeros(4, DIMS.dims[Module.LM_HEAD][1])
    ops.apply(y, x, 0, (Module.LM_HEAD,), RowSet.LOGIT)
    slots = plan.row_adapters[plan.logit_rows].tolist()
    for row, slot in enumerate(slots):
        adapted = (0, Module.LM_HEAD) in world.adapters.get(slot, {})
        assert bool(y[row].any()) == adapted
