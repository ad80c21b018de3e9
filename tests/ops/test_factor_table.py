"""Room for the addresses of split factors: what slots give back is whole again."""

from __future__ import annotations

import torch

from loraplex.ops.factor_table import MODULES, FactorTable


def test_room_that_neighbours_give_back_serves_a_larger_one() -> None:
    table = FactorTable(5, 1, [16] * MODULES, [16] * MODULES, 4, torch.device("cpu"), split_rows=12)
    for slot in (1, 2, 3):
        assert table._take(slot, 4) == 4 * (slot - 1)
    for slot in (2, 1, 3):
        table.clear(slot)
    assert table._take(4, 12) == 0
