"""The adapter table: a slot's life, what it refuses, and that device checksums are those of the host
bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.ops.build import Adapter, holds_image, make_image, make_plan, make_world, random_adapter
from tests.sections import changed

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.core.layout import AdapterImage, Factor, page_checksum, vector_mask
from loraplex.core.limits import MAX_RANK
from loraplex.ops.dispatch import make_operator
from loraplex.ops.image_check import check_image
from loraplex.ops.interface import ModuleDims
from loraplex.ops.table import AdapterTable

DIMS = ModuleDims(
    2, {Module.Q: (40, 24), Module.K: (40, 8), Module.LM_HEAD: (40, 50), Module.EMBED: (50, 40)}
)
PAGE = 256


def adapter(vectors: tuple[Factor, ...] = (Factor.G, Factor.C)) -> Adapter:
    return random_adapter(np.random.default_rng(3), DIMS, torch.float32, [3, 5], list(DIMS.dims), vectors)


def image() -> AdapterImage:
    return make_image(adapter(), torch.float32, PAGE)


def table(pages: int = 60, slots: int = 4) -> AdapterTable:
    return AdapterTable(torch.full((pages, PAGE), 0xFF, dtype=torch.uint8), torch.float32, slots, DIMS)


def pages_of(made: AdapterImage, start: int = 1) -> list[int]:
    return list(range(start, start + len(made.pages)))


def code(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(InternalFault) as caught:
        call()
    return caught.value.code


def test_a_slot_is_usable_only_between_publication_and_retirement() -> None:
    t, made = table(), image()
    assert t.generation(0) == 0
    assert code(lambda: t.generation(1)) is ErrorCode.STALE_SLOT_GENERATION
    t.install(1, made, pages_of(made))
    assert code(lambda: t.adapter(1)) is ErrorCode.STALE_SLOT_GENERATION
    t.publish(1, 5)
    assert t.generation(1) == 5
    assert code(lambda: t.retire(1, 4)) is ErrorCode.STALE_SLOT_GENERATION
    t.retire(1, 5)
    assert code(lambda: t.adapter(1)) is ErrorCode.STALE_SLOT_GENERATION


def test_generations_of_a_slot_only_advance() -> None:
    t, made = table(), image()
    t.install(1, made, pages_of(made))
    t.publish(1, 5)
    assert code(lambda: t.publish(1, 6)) is ErrorCode.STALE_SLOT_GENERATION
    assert code(lambda: t.install(1, made, pages_of(made))) is ErrorCode.STALE_SLOT_GENERATION
    t.retire(1, 5)
    assert code(lambda: t.publish(1, 6)) is ErrorCode.STALE_SLOT_GENERATION
    t.install(1, made, pages_of(made))
    assert code(lambda: t.publish(1, 5)) is ErrorCode.STALE_SLOT_GENERATION
    t.publish(1, 6)


def test_a_failed_copy_may_be_installed_again_or_given_up() -> None:
    t, made = table(), image()
    t.install(1, made, pages_of(made))
    t.install(1, made, pages_of(made, 20))
    t.retire(1, 1)
    assert code(lambda: t.retire(1, 1)) is ErrorCode.STALE_SLOT_GENERATION


@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_slots_outside_the_table_are_refused(slot: int) -> None:
    t, made = table(), image()
    for call in (
        lambda: t.install(slot, made, pages_of(made)),
        lambda: t.publish(slot, 1),
        lambda: t.retire(slot, 1),
    ):
        assert code(call) is ErrorCode.STALE_SLOT_GENERATION


@pytest.mark.parametrize("change", [lambda p: [0, *p[1:]], lambda p: [p[1], *p[1:]], lambda p: [*p[:-1], 60]])
def test_null_repeated_and_foreign_pages_are_refused(change: Callable[[list[int]], list[int]]) -> None:
    made = image()
    assert code(lambda: table().install(1, made, change(pages_of(made)))) is ErrorCode.PLAN_PAGE_TABLE


def test_plans_name_the_published_generation() -> None:
    world = make_world(np.random.default_rng(0), [adapter(), adapter()], DIMS, torch.float32, PAGE)
    plan = make_plan([(1, 2)], [2, 0])
    make_operator(plan, world.table)
    for named in (
        {"adapter_generation": 9},
        {"adapter_generation": 0},
        {"adapter_slot": 3},
        {"adapter_slot": 77},
        {"adapter_slot": -1},
    ):
        stale = dataclasses.replace(plan, requests=changed(plan.requests, 0, **named))
        assert code(lambda stale=stale: make_operator(stale, world.table)) is ErrorCode.STALE_SLOT_GENERATION
    world.table.retire(2, 11)
    assert code(lambda: make_operator(plan, world.table)) is ErrorCode.STALE_SLOT_GENERATION
    assert (
        code(lambda: make_operator(make_plan([], [1]), world.table, "magic"))
        is ErrorCode.OPERATOR_PLAN_UNSUPPORTED
    )


def test_checksums_equal_those_of_the_host_bytes_and_see_a_single_bit() -> None:
    t = table()
    rng = np.random.default_rng(1)
    bytes_ = rng.integers(0, 256, (3, PAGE), dtype=np.uint8)
    bytes_[2] = 0xFF
    some = dataclasses.replace(image(), pages=bytes_)
    for index, page in enumerate((7, 3, 9)):
        t.copy_page(page, some, index)
    assert t.checksums([7, 3, 9]).numpy().tolist() == page_checksum(bytes_).tolist()
    made = image()
    pages = pages_of(made)
    for index, page in enumerate(pages):
        t.copy_page(page, made, index)
    assert holds_image(t, made, pages)
    t.pool[pages[-1], 17] ^= 4
    assert not holds_image(t, made, pages)


def test_views_are_windows_into_the_pool() -> None:
    world = make_world(np.random.default_rng(0), [adapter()], DIMS, torch.float32, PAGE)
    resident = world.table.adapter(1).module(1, Module.Q)
    assert resident is not None
    low = world.table.pool.data_ptr()
    for factor in Factor:
        for piece in resident.pieces(factor):
            assert low <= piece.view.data_ptr() < low + world.table.pool.numel()
    assert world.table.adapter(1).module(1, Module.Q) is resident


def test_a_pool_that_is_a_window_of_a_larger_buffer() -> None:
    whole = torch.full((70, PAGE), 0xFF, dtype=torch.uint8)
    t = AdapterTable(whole[4:], torch.float32, 3, DIMS)
    source = adapter()
    made = make_image(source, torch.float32, PAGE)
    for index, page in enumerate(pages_of(made)):
        t.copy_page(page, made, index)
    t.install(1, made, pages_of(made))
    t.publish(1, 1)
    resident = t.adapter(1).module(0, Module.Q)
    assert resident is not None
    first = resident.pieces(Factor.A)[0]
    wanted = source[0, Module.Q].a[: first.rank_n, : first.col_n]
    assert torch.equal(first.view, torch.from_numpy(wanted).float())


@pytest.mark.parametrize(
    "pool",
    [
        torch.zeros((4, 64), dtype=torch.int8),
        torch.zeros(256, dtype=torch.uint8),
        torch.zeros((4, 128), dtype=torch.uint8)[:, :64],
        torch.zeros((4, 6), dtype=torch.uint8),
    ],
    ids=["dtype", "one dimension", "strided", "not whole words"],
)
def test_pools_of_another_form_are_refused(pool: torch.Tensor) -> None:
    assert code(lambda: AdapterTable(pool, torch.bfloat16, 3, DIMS)) is ErrorCode.OPERATOR_LAYOUT


Change = Callable[[AdapterImage], AdapterImage]


def cell(table_name: str, row: int, column: int, change: Callable[[int], int]) -> Change:
    def apply(made: AdapterImage) -> AdapterImage:
        array = getattr(made, table_name).copy()
        array[row, column] = change(int(array[row, column]))
        return dataclasses.replace(made, **{table_name: array})

    return apply


def keep(table_name: str, select: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda made: dataclasses.replace(made, **{table_name: select(getattr(made, table_name))})


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


MALFORMED: dict[str, Change] = {
    "itemsize": lambda made: dataclasses.replace(made, itemsize=2),
    "checksums": keep("checksums", lambda a: a[:-1]),
    "no modules": keep("modules", lambda a: a[:0]),
    "module columns": keep("modules", lambda a: a[:, :3]),
    "module missing": keep("modules", lambda a: a[1:]),
    "module twice": keep("modules", lambda a: np.concatenate([a, a[:1]])),
    "layer negative": cell("modules", 0, 0, lambda _: -1),
    "layer too large": cell("modules", 0, 0, lambda _: 2),
    "head in layer 1": lambda made: cell("modules", int(np.argmax(made.modules[:, 1] == 7)), 0, lambda _: 1)(
        made
    ),
    "module negative": cell("modules", 0, 1, lambda _: -1),
    "module too large": cell("modules", 0, 1, lambda _: 9),
    "module not of the model": cell("modules", 0, 1, lambda _: 3),
    "rank one more": cell("modules", 0, 2, lambda v: v + 1),
    "rank one less": cell("modules", 0, 2, lambda v: v - 1),
    "rank zero": cell("modules", 0, 2, lambda _: 0),
    "scale infinite": cell("modules", 0, 3, lambda _: _bits(np.inf)),
    "scale not a number": cell("modules", 0, 3, lambda _: _bits(np.nan)),
    "vectors negative": cell("modules", 0, 4, lambda _: -1),
    "vectors unknown": cell("modules", 0, 4, lambda v: v | 8),
    **{
        f"{v.name} declared and not there" if v is Factor.H else f"{v.name} there and not declared": cell(
            "modules", 0, 4, lambda m, v=v: m ^ vector_mask([v])
        )
        for v in (Factor.H, Factor.G, Factor.C)
    },
    **{
        f"whole {v.name} missing": keep(
            "extents", lambda a, v=v: a[(a[:, 2] != v) | (a[:, 0] != 0) | (a[:, 1] != 0)]
        )
        for v in (Factor.G, Factor.C)
    },
    "extent columns": keep("extents", lambda a: a[:, :8]),
    "extent missing": keep("extents", lambda a: a[1:]),
    "last run of a factor missing": keep(
        "extents", lambda a: np.delete(a, np.flatnonzero(a[:, 3])[-1], axis=0)
    ),
    "whole factor missing": keep("extents", lambda a: a[~((a[:, :3] == a[0, :3]).all(axis=1))]),
    "extent twice": keep("extents", lambda a: np.concatenate([a, a[:1]])),
    "no extents": keep("extents", lambda a: a[:0]),
    **{
        f"whole {name} of layer 1 missing": keep(
            "extents", lambda a, f=f: a[(a[:, 2] != f) | (a[:, 0] != 1) | (a[:, 1] != 0)]
        )
        for name, f in (("A", Factor.A), ("B", Factor.B))
    },
    **{
        f"whole {v.name} of the head missing": keep(
            "extents", lambda a, v=v: a[(a[:, 2] != v) | (a[:, 1] != 7)]
        )
        for v in (Factor.G, Factor.C)
    },
    "a vector called another": lambda made: cell(
        "extents", int(np.argmax(made.extents[:, 2] == Factor.G)), 2, lambda _: Factor.H
    )(made),
    "two ranks exchanged": lambda made: dataclasses.replace(
        made,
        modules=np.where(np.arange(5) == 2, np.roll(made.modules, 1, axis=0), made.modules).astype(np.int32),
    ),
    "factor unknown": cell("extents", 0, 2, lambda _: 5),
    "factor negative": cell("extents", 0, 2, lambda _: -1),
    "factor A called B": cell("extents", 0, 2, lambda _: 1),
    "extent of no module": cell("extents", 0, 1, lambda _: 3),
    "extent of no layer": cell("extents", 0, 0, lambda _: 7),
    "page negative": cell("extents", 0, 7, lambda _: -1),
    "page beyond the image": cell("extents", 0, 7, lambda _: 10_000),
    "offset negative": cell("extents", 0, 8, lambda _: -16),
    "offset unaligned": cell("extents", 0, 8, lambda v: v + 4),
    "offset beyond the page": cell("extents", 0, 8, lambda _: PAGE),
    "overlap": lambda made: cell("extents", 1, 7, lambda _: int(made.extents[0, 7]))(
        cell("extents", 1, 8, lambda _: int(made.extents[0, 8]))(made)
    ),
    **{
        f"{name} {sign:+d}, extent {row}": cell("extents", row, column, lambda v, s=sign: v + s)
        for column, name in ((3, "rank_lo"), (4, "rank_n"), (5, "col_lo"), (6, "col_n"))
        for sign in (-1, 1)
        for row in (0, -1)
    },
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_malformed_images_are_refused(name: str) -> None:
    made = MALFORMED[name](image())
    assert code(lambda: table().install(1, made, pages_of(image()))) is ErrorCode.OPERATOR_LAYOUT


def test_there_are_more_cases_than_the_specification_has() -> None:
    print(f"malformed adapter tables refused: {len(MALFORMED)}")
    assert len(MALFORMED) > 60


def test_the_unchanged_image_is_accepted_in_any_order() -> None:
    made = image()
    rng = np.random.default_rng(5)
    shuffled = dataclasses.replace(
        made, modules=rng.permutation(made.modules, axis=0), extents=rng.permutation(made.extents, axis=0)
    )
    first, second = (check_image(m, DIMS, 4, PAGE, len(made.pages)) for m in (made, shuffled))
    assert np.array_equal(first.modules, second.modules)
    assert np.array_equal(first.extents, second.extents)
    assert np.array_equal(first.spans, second.spans)


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1])
def test_ranks_outside_their_range_are_refused_by_name(rank: int) -> None:
    made = cell("modules", 0, 2, lambda _: rank)(image())
    assert code(lambda: table().install(1, made, pages_of(made))) is ErrorCode.OPERATOR_RANK_UNSUPPORTED


def test_the_number_of_pages_given_must_be_that_of_the_image() -> None:
    made = image()
    assert code(lambda: table().install(1, made, pages_of(made)[:-1])) is ErrorCode.OPERATOR_LAYOUT
