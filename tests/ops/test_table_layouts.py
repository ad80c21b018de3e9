"""Checked tables are kept by their content: what was right once is not looked at again, what differs is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.ops.build import make_image, make_world, random_adapter

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import Module
from loraplex.ops import table as table_module
from loraplex.ops.interface import ModuleDims

DIMS = ModuleDims(2, {Module.Q: (64, 64), Module.V: (64, 32)})


def test_the_same_tables_are_checked_once_and_others_are_refused_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    adapters = [random_adapter(rng, DIMS, torch.float32, [8], [Module.Q, Module.V]) for _ in range(2)]
    world = make_world(np.random.default_rng(1), adapters, DIMS, torch.float32, 4096)
    table, image = world.table, make_image(adapters[0], torch.float32, 4096)
    pages = table.adapter(1).pages.astype(np.int32)
    table.retire(1, 10)
    calls = []
    check = table_module.check_image
    monkeypatch.setattr(table_module, "check_image", lambda *words: calls.append(1) or check(*words))
    table._layouts.clear()
    for _ in range(3):
        table.install(1, image, pages)
    assert len(calls) == 1
    other = image.extents.copy()
    other[0, 3] += 1
    for damaged in (
        replace(image, extents=other),
        replace(image, modules=image.modules[:-1]),
        replace(image, itemsize=2),
        replace(image, extents=image.extents.reshape(-1, 3)),
        replace(image, pages=image.pages[:, :-8]),
    ):
        with pytest.raises(InternalFault) as caught:
            table.install(1, damaged, pages)
        assert caught.value.code is ErrorCode.OPERATOR_LAYOUT
    table.install(1, image, pages)
    assert len(calls) == 6
    assert len(table._layouts) == 1


def test_only_so_many_checked_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_LAYOUTS", 2)
    rng = np.random.default_rng(3)
    adapters = [random_adapter(rng, DIMS, torch.float32, [rank], [Module.Q]) for rank in (1, 2, 3, 4)]
    world = make_world(np.random.default_rng(1), adapters, DIMS, torch.float32, 4096)
    assert len(world.table._layouts) == 2
