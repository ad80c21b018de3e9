"""The device's draws are those of the torch definition: kernel interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.model.sampling_rows import CPU, arange, open_rows, random_row

from loraplex.model.cuda.draws import DeviceDraws
from loraplex.model.sampler import Sampler

pytestmark = [
    # The interpreter of Triton 3.6 itself turns one-element arrays into scalars.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU test; tests/gpu runs the real kernel"),
]


@pytest.mark.parametrize("vocab", [1, 300])
def test_the_kernel_draws_what_the_definition_draws(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 8
    opens = open_rows(*[random_row(rng, vocab) for _ in range(rows)])
    samplers = [Sampler(rows, vocab, max(1, vocab - 2), CPU, compiled=False) for _ in range(2)]
    samplers[1]._draws = DeviceDraws(CPU, block=128, splits=2)
    for sampler in samplers:
        sampler.open(*opens)
    for step in range(3):
        logits = rng.standard_normal((rows, vocab)) * rng.choice([0.1, 1.0, 3.0, 30.0], (rows, 1))
        if step == 1:
            logits = np.round(logits)  # many ties
        if step == 2:
            logits[:, rng.integers(0, vocab, vocab // 3)] = -np.inf
            logits[:, 0] = 0.0
        tensor = torch.from_numpy(logits.astype(np.float32))
        positions = np.full(rows, step + 100, dtype=np.int32)
        first, second = (s.sample(tensor, arange(rows), arange(rows), positions) for s in samplers)
        assert first.tolist() == second.tolist()
