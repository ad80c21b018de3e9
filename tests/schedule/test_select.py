"""Rows of an iteration: decode rows first, prefill rows under the budget and under the bound beside
decode.
"""

from __future__ import annotations

import pytest

from loraplex.schedule.select import MixedBound


@pytest.mark.parametrize(
    ("decodes", "rows"),
    [(1, 383), (64, 448), (128, 512), (250, 774), (256, 768)],
)
def test_prefill_rows_grow_with_what_decodes_and_fill_a_multiple(decodes: int, rows: int) -> None:
    bound = MixedBound(256, 2, 128)
    assert bound.prefill_rows(decodes) == rows
    assert (decodes + rows) % 128 == 0
    assert 256 + 2 * decodes <= rows < 256 + 2 * decodes + 128


def test_a_plain_bound_is_its_rows() -> None:
    assert MixedBound(7).prefill_rows(3) == 7
