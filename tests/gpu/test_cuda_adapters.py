"""Adapters on CUDA: captured and mixed steps against float32 on the CPU; base rows keep their bits beside any of them."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.test_cuda_runner import drivers, follow, pairs, prompt  # noqa: E402
from tests.model.cuda.adapters import GENERATION, SORTS, load_sorts, random_image  # noqa: E402
from tests.model.drive import Request  # noqa: E402

pytestmark = pytest.mark.gpu


def adapted(lengths: list[int], slots: list[int]) -> dict[int, tuple[Request, Request]]:
    made = pairs(lengths)
    for (left, right), slot in zip(made.values(), slots, strict=True):
        left.adapter = right.adapter = (slot, GENERATION if slot else 0)
    return made


@pytest.mark.parametrize("captured", [True, False])
def test_tokens_of_every_sort_follow_float32_on_the_cpu(captured: bool) -> None:
    pair = drivers(captured=captured)
    for driver in pair:
        load_sorts(driver, SORTS)
    requests = adapted([9, 5, 17, 6, 11, 8, 7, 4], [0, 1, 2, 3, 4, 5, 6, 7])
    follow(pair, [(0, 9), (1, 5), (2, 6)], requests)
    follow(pair, [(1, 0), (0, 0), (2, 11), (3, 6), (4, 11)], requests)
    for _ in range(3):
        follow(pair, [(4, 0), (2, 0), (0, 0), (1, 0), (3, 0)], requests)  # captured, all groups
    follow(pair, [(1, 0), (0, 0)], requests)  # captured, attention alone
    follow(pair, [(0, 0)], requests)  # captured, no adapter
    follow(pair, [(5, 8), (6, 7), (7, 4), (1, 0), (0, 0)], requests)  # sorts that are not captured
    for _ in range(2):
        follow(pair, [(i, 0) for i in range(8)], requests)
    follow(pair, [(4, 0), (3, 0)], requests)


def test_base_rows_keep_their_bits_whatever_runs_beside_them() -> None:
    outputs = []
    for slots in ([0, 0, 0], [0, 1, 2], [0, 4, 4], [0, 3, 0]):
        own = drivers()[1]
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
    pair = drivers()
    for driver in pair:
        load_sorts(driver, SORTS[:2])
    requests = adapted([9, 5], [1, 2])
    follow(pair, [(0, 9), (1, 5)], requests)
    follow(pair, [(0, 0), (1, 0)], requests)
    for driver in pair:
        driver.step([], deltas={"retires": np.array([[1, GENERATION]], dtype=np.int32)})
        driver.load(random_image(driver, SORTS[3], 99), 1, GENERATION + 1)
        driver.step([], deltas={"publishes": np.array([[1, GENERATION + 1]], dtype=np.int32)})
    fresh = pairs([6, 6, 6])[2]
    for request in fresh:
        request.adapter = (1, GENERATION + 1)
    requests = {1: requests[1], 2: fresh}
    follow(pair, [(2, 6), (1, 0)], requests)
    for _ in range(3):
        follow(pair, [(2, 0), (1, 0)], requests)
