"""Adapters on CUDA: captured and mixed steps against float32 on the CPU; base rows keep their bits beside any
of them.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.drivers import HALF, Trio, device_driver, triples  # noqa: E402
from tests.model.cuda.adapters import GENERATION, SORTS, load_sorts, random_image  # noqa: E402
from tests.model.drive import Driver, Request  # noqa: E402
from tests.prompts import prompt  # noqa: E402
from tests.sections import adapters  # noqa: E402

pytestmark = pytest.mark.gpu


def adapted(lengths: list[int], slots: list[int]) -> dict[int, tuple[Request, ...]]:
    made = triples(lengths)
    for requests, slot in zip(made.values(), slots, strict=True):
        for request in requests:
            request.adapter = (slot, GENERATION if slot else 0)
    return made


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_tokens_of_every_sort_follow_float32_on_the_cpu(captured: bool, dtype: torch.dtype) -> None:
    trio = Trio(captured=captured, dtype=dtype)
    for driver in trio.drivers:
        load_sorts(driver, SORTS)
    requests = adapted([9, 5, 17, 6, 11, 8, 7, 4], [0, 1, 2, 3, 4, 5, 6, 7])
    trio.follow([(0, 9), (1, 5), (2, 6)], requests)
    trio.follow([(1, 0), (0, 0), (2, 11), (3, 6), (4, 11)], requests)
    for _ in range(3):
        trio.follow([(4, 0), (2, 0), (0, 0), (1, 0), (3, 0)], requests)  # captured, all groups
    trio.follow([(1, 0), (0, 0)], requests)  # captured, attention alone
    trio.follow([(0, 0)], requests)  # captured, no adapter
    trio.follow([(5, 8), (6, 7), (7, 4), (1, 0), (0, 0)], requests)  # sorts that are not captured
    for _ in range(2):
        trio.follow([(i, 0) for i in range(8)], requests)
    trio.follow([(4, 0), (3, 0)], requests)
    trio.check()


def random_mixes(driver: Driver, steps: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and log probability bits of decode steps, each of other requests in another order."""
    load_sorts(driver, SORTS[:4])
    requests = [
        Request(i, prompt(3 + i, i), adapter=(i % 5, GENERATION if i % 5 else 0), logprobs=5)
        for i in range(12)
    ]
    driver.step([(r, len(r.prompt)) for r in requests])
    rng = np.random.default_rng(3)
    out = []
    for _ in range(steps):
        chosen = [r for r in rng.permutation(requests).tolist() if r.planned < 60][: int(rng.integers(1, 13))]
        if not chosen:
            break
        result = driver.step([(r, 0) for r in chosen])
        out.append((result.tokens.tolist(), result.logprob_values.tolist()))
    return out


def test_captured_steps_of_changing_mixes_equal_launches_one_by_one_bit_for_bit() -> None:
    captured, eager = (random_mixes(device_driver(captured=c), 200) for c in (True, False))
    assert len(captured) > 50
    assert captured == eager


def test_base_rows_keep_their_bits_whatever_runs_beside_them() -> None:
    outputs = []
    for slots in ([0, 0, 0], [0, 1, 2], [0, 4, 4], [0, 3, 0]):
        own = device_driver()
        load_sorts(own, SORTS[:4])
        requests = [
            Request(i, prompt(7 + i, i), adapter=(slot, GENERATION if slot else 0), logprobs=5)
            for i, slot in enumerate(slots)
        ]
        steps = [own.step([(requests[0], 7)])]
        own.step([(r, len(r.prompt)) for r in requests[1:]])
        # The first is the base's in scheduler order, and in packed order wherever its group lies.
        steps += [own.step([(r, 0) for r in requests]) for _ in range(4)]
        outputs.append([(s.tokens[0], s.logprob_values[:6].tolist()) for s in steps])
    assert all(output == outputs[0] for output in outputs)


def test_a_slot_is_reused_by_another_adapter_under_captured_steps() -> None:
    trio = Trio()
    for driver in trio.drivers:
        load_sorts(driver, SORTS[:2])
    requests = adapted([9, 5], [1, 2])
    trio.follow([(0, 9), (1, 5)], requests)
    trio.follow([(0, 0), (1, 0)], requests)
    for driver in trio.drivers:
        driver.step([], deltas={"retires": adapters((1, GENERATION))})
        driver.load(random_image(driver, SORTS[3], 99), 1, GENERATION + 1)
        driver.step([], deltas={"publishes": adapters((1, GENERATION + 1))})
    fresh = triples([6, 6, 6])[2]
    for request in fresh:
        request.adapter = (1, GENERATION + 1)
    requests = {1: requests[1], 2: fresh}
    trio.follow([(2, 6), (1, 0)], requests)
    for _ in range(3):
        trio.follow([(2, 0), (1, 0)], requests)
    trio.check()
