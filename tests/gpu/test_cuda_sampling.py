"""What is drawn on CUDA is what the torch definition draws on the CPU from the same logits."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.model.sampling_rows import (  # noqa: E402
    arange,
    open_rows,
    random_row,
)

from loraplex.model.sampler import Sampler  # noqa: E402

pytestmark = pytest.mark.gpu
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("vocab", [1, 3, 64, 65, 1000, 5003, 128256])
def test_both_devices_draw_the_same_tokens(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 48
    opens = open_rows(*[random_row(rng, vocab) for _ in range(rows)])
    samplers = [Sampler(rows, vocab, max(1, vocab - 2), device) for device in (CPU, GPU)]
    for sampler in samplers:
        sampler.open(*opens)
    drawn = equal = 0
    for step in range(4):
        logits = rng.standard_normal((rows, vocab)) * rng.choice([0.1, 1.0, 3.0, 30.0], (rows, 1))
        if step == 1:
            logits = np.round(logits)  # many ties
        if step == 2:
            logits[:, rng.integers(0, vocab, vocab // 3)] = -np.inf
            logits[:, 0] = 0.0
        tensor = torch.from_numpy(logits.astype(np.float32))
        if step == 3:
            tensor = tensor.bfloat16().float()
        positions = np.full(rows, step + 100, dtype=np.int32)
        first, second = (
            s.sample(tensor.to(device), arange(rows), arange(rows), positions).cpu()
            for s, device in zip(samplers, (CPU, GPU), strict=True)
        )
        drawn += rows
        equal += int((first == second).sum())
    # Noise and mass are float32 on both, from two mathematics libraries: a near tie may fall either way.
    assert equal >= drawn - max(2, drawn // 64), f"{equal} of {drawn}"
