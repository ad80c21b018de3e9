"""Room for the addresses of split factors: taken when a slot is installed; what slots give back is whole
again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.ops.build import Adapter, make_image, make_world, random_adapter

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.ops.factor_table import FactorTable
from loraplex.ops.interface import ModuleDims
from loraplex.ops.work_layout import MODULES


def test_room_that_neighbours_give_back_serves_a_larger_one() -> None:
    table = FactorTable(5, 1, [16] * MODULES, [16] * MODULES, 4, torch.device("cpu"), split_rows=12)
    for slot in (1, 2, 3):
        assert table._take(slot, 4) == 4 * (slot - 1)
    for slot in (2, 1, 3):
        table.emptied(slot)
    assert table._take(4, 12) == 0


DIMS = ModuleDims(2, {Module.Q: (64, 64), Module.V: (64, 32)})


def split_adapters(count: int) -> list[Adapter]:
    """Adapters of 48 ranks, whose factors of 64 columns are split over pages of 4 KiB."""
    rng = np.random.default_rng(3)
    return [random_adapter(rng, DIMS, torch.float32, [48], [Module.Q, Module.V]) for _ in range(count)]


def test_room_for_split_factors_is_taken_at_install_and_its_lack_fails_the_load_and_no_step() -> None:
    world = make_world(np.random.default_rng(1), split_adapters(3), DIMS, torch.float32, 4096)
    table = world.table
    image = make_image(world.adapters[3], torch.float32, 4096)
    pages = table.adapter(3).pages.astype(np.int32)
    table.retire(3, 12)
    need = sum(room for _, room in FactorTable.mirror_of(table)._held.values()) // 2
    assert need > 0
    mirror = FactorTable.mirror_of(table, split_rows=2 * need)
    mirror.sync(table)
    before = (mirror.addresses.clone(), mirror.row_list.clone(), list(mirror._free), table.revision)
    with pytest.raises(InternalFault, match="no such room") as caught:
        table.install(3, image, pages)
    assert caught.value.code is ErrorCode.OPERATOR_LAYOUT
    assert list(mirror._free) == before[2]
    assert table.revision == before[3]
    mirror.sync(table)  # a step: it has nothing to do and nothing to fail at
    assert torch.equal(mirror.addresses, before[0])
    assert torch.equal(mirror.row_list, before[1])
    table.retire(1, 10)
    table.install(3, image, pages)  # what another slot gave back is enough
    table.install(3, image, pages)  # and an install that comes again takes it once
    table.publish(3, 20)
    mirror.sync(table)
    assert int(mirror.ranks[1].sum()) == 0
    assert int(mirror.ranks[3].max()) == 48
    listed = -1 - int(mirror.addresses[3, 0, Module.Q, 0])
    first = int(table.adapter(3).extents[:, 0].min()) // 4
    assert listed >= 0
    assert int(mirror.row_list[listed : listed + 48].min()) >= first


def test_a_slot_that_is_given_up_before_it_is_published_gives_its_room_back() -> None:
    world = make_world(np.random.default_rng(1), split_adapters(1), DIMS, torch.float32, 4096)
    table = world.table
    mirror = FactorTable.mirror_of(table)
    free = list(mirror._free)
    image = make_image(split_adapters(2)[1], torch.float32, 4096)
    pages = table.adapter(1).pages.astype(np.int32)
    table.retire(1, 10)
    table.install(2, image, pages)
    table.retire(2, 11)
    mirror.sync(table)
    assert mirror._held == {}
    assert sum(room for _, room in mirror._free) > sum(room for _, room in free)


def test_a_mirror_that_comes_later_takes_room_for_what_is_there() -> None:
    world = make_world(np.random.default_rng(1), split_adapters(2), DIMS, torch.float32, 4096)
    with pytest.raises(InternalFault, match="no such room"):
        FactorTable.mirror_of(world.table, split_rows=10)
