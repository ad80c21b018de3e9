"""Placement of factors in rank-row pages: every element once, nothing overlaps, everything is aligned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import LAYER_MODULES, Module
from loraplex.core.layout import (
    EXTENT_ALIGN_BYTES,
    VECTOR_ITEMSIZE,
    Extent,
    Factor,
    Geometry,
    ModuleShape,
    PageGeometry,
    page_checksum,
    page_demand,
    place,
)


def rank_rows(page_bytes: int, itemsize: int = 2) -> PageGeometry:
    return PageGeometry(Geometry.RANK_ROWS, itemsize, row_page_bytes=page_bytes)


def itemsize_of(geometry: PageGeometry, factor: Factor) -> int:
    return geometry.itemsize if factor in (Factor.A, Factor.B) else VECTOR_ITEMSIZE


def stored(shape: ModuleShape) -> tuple[Factor, ...]:
    return ((Factor.A, Factor.B) if shape.rank else ()) + shape.vectors


def check(
    geometry: PageGeometry, modules: list[ModuleShape], extents: tuple[Extent, ...], pages: int
) -> None:
    used = np.zeros((pages, geometry.page_bytes), dtype=np.int32)
    covered = {
        (m.layer, m.module, f): np.zeros(m.factor_shape(f), dtype=np.int32)
        for m in modules
        for f in stored(m)
    }
    for e in extents:
        size = e.rank_n * e.col_n * itemsize_of(geometry, e.factor)
        assert e.offset % EXTENT_ALIGN_BYTES == 0
        assert 0 < size <= geometry.page_bytes - e.offset
        used[e.page, e.offset : e.offset + size] += 1
        covered[e.layer, e.module, e.factor][
            e.rank_lo : e.rank_lo + e.rank_n, e.col_lo : e.col_lo + e.col_n
        ] += 1
    assert used.max(initial=0) <= 1
    assert all((count == 1).all() for count in covered.values())
    assert not pages or used.any(axis=1).all()


VECTORS = st.sets(st.sampled_from([Factor.H, Factor.G, Factor.C])).map(lambda s: tuple(sorted(s)))
SHAPES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(LAYER_MODULES),
        st.integers(0, 9),
        st.integers(1, 70),
        st.integers(1, 70),
        VECTORS,
    ),
    max_size=12,
    unique_by=lambda item: item[:2],
)


@given(SHAPES, st.integers(1, 40).map(lambda n: 4 * n), st.sampled_from([2, 4]))
def test_every_element_has_one_place(
    items: list[tuple[int, Module, int, int, int, tuple[Factor, ...]]], page_bytes: int, itemsize: int
) -> None:
    modules = [ModuleShape(*item) for item in items]
    geometry = rank_rows(page_bytes, itemsize)
    extents, pages = place(geometry, modules)
    check(geometry, modules, extents, pages)
    assert page_demand(geometry, modules) == pages
    assert list(extents) == sorted(extents, key=lambda e: (e.layer, e.module, e.factor, e.col_lo, e.rank_lo))


def test_a_factor_that_fits_is_never_split() -> None:
    modules = [ModuleShape(layer, Module.Q, rank, 24, 40) for layer, rank in enumerate([1, 2, 3, 5, 8])]
    extents, _ = place(rank_rows(8 * 40 * 2), modules)
    assert len(extents) == 2 * len(modules)
    assert all(e.rank_lo == e.col_lo == 0 for e in extents)


def test_a_vector_longer_than_a_page_is_cut_into_column_tiles() -> None:
    geometry = rank_rows(64)  # 32 elements
    extents, pages = place(geometry, [ModuleShape(0, Module.DOWN, 2, 70, 8)])
    a = [(e.rank_lo, e.rank_n, e.col_lo, e.col_n) for e in extents if e.factor is Factor.A]
    assert a == [(0, 1, 0, 32), (1, 1, 0, 32), (0, 1, 32, 32), (1, 1, 32, 32), (0, 2, 64, 6)]
    check(geometry, [ModuleShape(0, Module.DOWN, 2, 70, 8)], extents, pages)


def test_rows_split_between_pages_by_whole_ranks() -> None:
    geometry = rank_rows(100)  # three rows of 16 elements
    extents, pages = place(geometry, [ModuleShape(0, Module.Q, 7, 16, 16)])
    assert [(e.rank_lo, e.rank_n) for e in extents if e.factor is Factor.A] == [(0, 3), (3, 3), (6, 1)]
    assert pages == 5  # four full pieces of 96 bytes; the two single rows of 32 bytes share the fifth


def test_equal_adapters_have_equal_layouts_whatever_the_order() -> None:
    modules = [ModuleShape(layer, module, 4, 32, 24) for layer in range(3) for module in (Module.Q, Module.V)]
    assert place(rank_rows(512), modules) == place(rank_rows(512), modules[::-1])


def test_many_pieces_are_placed_in_near_linear_time() -> None:
    # 40 of 64 KiB: no two share a page, so every page stays open; a scan from the first would take 2 * 10^8
    # steps.
    modules = [ModuleShape(layer, Module.Q, 4, 5120, 5120) for layer in range(10_000)]
    _, pages = place(rank_rows(65_536), modules)
    assert pages == 20_000


@pytest.mark.parametrize("kind", [Geometry.VECTOR, Geometry.PAIRED_SLOT])
def test_only_rank_rows_have_extents(kind: Geometry) -> None:
    with pytest.raises(InternalFault) as caught:
        place(PageGeometry(kind, 2, width=8), [])
    assert caught.value.code is ErrorCode.OPERATOR_LAYOUT


def test_a_page_must_hold_an_element() -> None:
    with pytest.raises(InternalFault) as caught:
        place(rank_rows(1), [ModuleShape(0, Module.Q, 1, 4, 4)])
    assert caught.value.code is ErrorCode.OPERATOR_LAYOUT


def test_checksum_sees_order_value_and_position() -> None:
    page = np.arange(64, dtype=np.uint8).reshape(1, 64)
    swapped = page.copy()
    swapped[0, :16] = page[0, [*range(8, 16), *range(8)]]
    changed = page.copy()
    changed[0, 63] ^= 0x80
    sums = {int(page_checksum(p)[0]) for p in (page, swapped, changed)}
    assert len(sums) == 3
    words = page.view(np.int64)[0].tolist()
    exact = sum((2 * i + 1) * w for i, w in enumerate(words))
    assert (int(page_checksum(page)[0]) - exact) % (1 << 64) == 0


@pytest.mark.parametrize("words", [1, 16384, 16385, 16 * 1024, 17 * 1024, 17 * 1024 + 5, 46 * 1024])
def test_checksum_is_the_weighted_sum_at_every_length_also_in_the_middle_of_a_line(words: int) -> None:
    around = np.random.default_rng(words).integers(0, 256, (2, 8 * words + 32), dtype=np.uint8)
    pages = around[:, 16:-16]
    for row, got in zip(pages, page_checksum(pages), strict=True):
        exact = sum((2 * i + 1) * w for i, w in enumerate(row.view(np.int64).tolist()))
        assert (int(got) - exact) % (1 << 64) == 0


def test_checksum_wraps_modulo_2_to_the_64() -> None:
    pages = np.full((2, (1 << 18) + 8), 0x7F, dtype=np.uint8)  # more than one block of words
    pages[1, ::3] = 0x80
    for row, got in zip(pages, page_checksum(pages), strict=True):
        exact = sum((2 * i + 1) * w for i, w in enumerate(row.view(np.int64).tolist()))
        assert (int(got) - exact) % (1 << 64) == 0
