"""Every adapter method in one batch on the device against PEFT: tightly in float32, at level b in half types.

The bodies are those of the CPU's tests.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from tests.gpu.level_b import Deviations, assert_level_b, step_best  # noqa: E402
from tests.gpu.world import GPU, cuda_executor, stream  # noqa: E402
from tests.model.cuda.world import plain_executor  # noqa: E402
from tests.model.drive import Driver, Request, logits_of  # noqa: E402
from tests.model.methods import BASE, CONFIGS, check_mixed_batch, driver_of, load_all, tuned, write_folders  # noqa: E402
from tests.model.tiny import CPU, VOCAB, decoder, reference, save  # noqa: E402

from loraplex.model import executor  # noqa: E402
from loraplex.ops.dispatch import make_operator  # noqa: E402

pytestmark = pytest.mark.gpu
SPREAD = 0.05
"""Smaller factors than in float32's tests: logits of the wide models stay in the range that half types
resolve.
"""
CAPTURED = ["lora", "rslora", "dora", "dora-bitfit", "lora-bias", "bitfit", "bitfit-only"]
"""Methods that captured launches serve: no vector on an input, nothing on head or embedding."""
TOGETHER = 4
"""Decode steps after the prompts."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folders(tmp_path_factory.mktemp("methods"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_folders(tmp_path_factory.mktemp(family), family, SPREAD)
        for family in ("wide-llama-biased", "wide-qwen2")
    }


@pytest.mark.parametrize("page_tokens", [4, 16])
def test_the_step_kernels_in_float32_equal_peft(root: Path, page_tokens: int) -> None:
    """The executor of a device over its own kernels, attention apart, which has no fused form in float32."""
    model = decoder(BASE, root / "base", torch.float32, GPU)
    driver = driver_of(model, list(CONFIGS), executor=plain_executor, page_tokens=page_tokens)
    check_mixed_batch(root, driver, list(CONFIGS), steps=TOGETHER)


@pytest.mark.parametrize("family", ["triton", "segmented", "gather_bmm"])
def test_operator_families_in_float32_equal_peft(
    root: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "make_operator", functools.partial(make_operator, family=family))
    driver = driver_of(decoder(BASE, root / "base", torch.float32, GPU), list(CONFIGS))
    check_mixed_batch(root, driver, list(CONFIGS), steps=TOGETHER)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["wide-llama-biased", "wide-qwen2"])
@pytest.mark.parametrize("names", [CAPTURED, list(CONFIGS)], ids=["captured methods", "all methods"])
def test_a_mixed_batch_in_half_precision_follows_peft(
    wide: dict[str, Path], family: str, dtype: torch.dtype, captured: bool, names: list[str]
) -> None:
    from loraplex.model.cuda.flashinfer_fused import FlashInferFused

    own = driver_of(
        decoder(family, wide[family] / "base", dtype, GPU, FlashInferFused()),
        names,
        executor=cuda_executor(captured),
        stream=stream(),
        page_tokens=16,
    )
    yardstick = driver_of(decoder(family, wide[family] / "base", dtype, CPU), names, page_tokens=16)
    sides = [Deviations(), Deviations()]
    for driver, side in zip((own, yardstick), sides, strict=True):
        load_all(wide[family], driver, names)
        judges = [reference(family), *(tuned(name, family, SPREAD) for name in names)]
        against_judges(driver, side, judges)
    assert_level_b(*sides)


def against_judges(
    driver: Driver, side: Deviations, judges: list[Any], steps: int = TOGETHER, shortest: int = 3
) -> None:
    """A request over each judge's adapter, the base's in slot 0, fed with the judge's own choices."""
    rng = np.random.default_rng(4)
    requests = [
        Request(
            i,
            rng.integers(0, VOCAB, shortest + i % 5).tolist(),
            adapter=(i, 7) if driver.runner.table.published[i] else (0, 0),
            logprobs=5,
        )
        for i in range(len(judges))
    ]
    histories = [list(request.prompt) for request in requests]
    for step in range(steps):
        result = driver.step([(r, 0 if step else len(r.prompt)) for r in requests])
        for i, (best, token) in enumerate(zip(step_best(result), result.tokens.tolist(), strict=True)):
            top = torch.log_softmax(logits_of(judges[i], histories[i])[-1], dim=-1).topk(5)
            side.note(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)), best, token)
            requests[i].last = int(top.indices[0])
            histories[i].append(int(top.indices[0]))


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["wide-llama", "wide-mistral-window", "wide-qwen2"])
def test_bases_in_half_precision_follow_transformers(
    tmp_path: Path, family: str, dtype: torch.dtype, captured: bool
) -> None:
    """The window of seven is shorter than every history."""
    from loraplex.model.cuda.flashinfer_fused import FlashInferFused

    save(family, tmp_path)
    sides = [Deviations(), Deviations()]
    fused = decoder(family, tmp_path, dtype, GPU, FlashInferFused())
    drivers = (
        Driver(fused, 4, executor=cuda_executor(captured), stream=stream()),
        Driver(decoder(family, tmp_path, dtype, CPU), 4),
    )
    for driver, side in zip(drivers, sides, strict=True):
        against_judges(driver, side, [reference(family)] * 4, steps=8, shortest=9)
    assert_level_b(*sides)
