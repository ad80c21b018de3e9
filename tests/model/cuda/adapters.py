"""Random adapters put into a driver's slots: the same values in float32 and in bfloat16."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tests.model.drive import Driver
from tests.ops.build import make_image, random_adapter
from tests.sections import adapters

from loraplex.core.ids import Module
from loraplex.core.layout import AdapterImage, Factor

ATTENTION = (Module.Q, Module.K, Module.V, Module.O)
SEVEN = (*ATTENTION, Module.GATE, Module.UP, Module.DOWN)
GENERATION = 7


@dataclass(frozen=True)
class Sort:
    """A kind of adapter: ranks drawn from, modules, vectors."""

    ranks: Sequence[int]
    modules: Sequence[Module] = SEVEN
    vectors: Sequence[Factor] = ()


SORTS = (
    Sort((4,), ATTENTION),
    Sort((1, 3, 8)),
    Sort((2,), (Module.Q, Module.DOWN)),
    Sort((0, 5), SEVEN, (Factor.G, Factor.C)),
    Sort((2,), (Module.UP, Module.LM_HEAD)),
    Sort((3,), (Module.V, Module.EMBED)),
    Sort((2,), (Module.O, Module.DOWN), (Factor.H,)),
)
"""The first four are served by captured launches, the others by operator families."""


def random_image(driver: Driver, sort: Sort, seed: int) -> AdapterImage:
    """Values that bfloat16 holds, whatever the driver's type."""
    spec, dtype = driver.runner.decoder.spec, driver.runner.decoder.weights.dtype
    rng = np.random.default_rng(seed)
    adapter = random_adapter(rng, spec.module_dims(), torch.bfloat16, sort.ranks, sort.modules, sort.vectors)
    image = make_image(adapter, dtype, driver.kv.page_bytes)
    digest = hashlib.sha256(f"{sort}{seed}".encode()).hexdigest()
    return replace(image, kernel_digest=digest)


def load_sorts(driver: Driver, sorts: Sequence[Sort], first_slot: int = 1) -> None:
    """Adapters of these sorts in consecutive slots, generation 7 each."""
    for slot, sort in enumerate(sorts, start=first_slot):
        result = driver.load(random_image(driver, sort, slot), slot, GENERATION)
        assert result.copied.array.tolist() == [[slot, GENERATION, 1]]
        driver.step([], deltas={"publishes": adapters((slot, GENERATION))})
