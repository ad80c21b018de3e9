"""Every kernel of ours once, on small shapes, each against its definition: what a memory checker runs.

`python -m tests.gpu.every_kernel` launches on the CUDA device there is, in Triton's interpreter where there
is none, and fails where a kernel of the three kernel modules was not launched. Nothing here is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import tests.conftest  # noqa: F401 - the interpreter is chosen before triton is imported

# isort: split
import numpy as np
import torch
from tests.model.cuda.adapters import GENERATION, SORTS, load_sorts
from tests.model.cuda.world import plain_executor
from tests.model.drive import Driver, Request, greedy
from tests.model.sampling_rows import arange, open_rows, random_row
from tests.model.tiny import decoder, save
from tests.ops.lora_world import LIMIT, OWNERS, SINGLE, SMALL, World, run
from tests.prompts import prompt

from loraplex.model.cuda import draw_kernels, kernels
from loraplex.model.cuda.draws import DeviceDraws
from loraplex.model.sampler import Sampler
from loraplex.ops import triton_kernels
from loraplex.ops.worklist import Phase

MODULES = (triton_kernels, kernels, draw_kernels)
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


class Noted:
    """A kernel that remembers that it was launched."""

    def __init__(self, name: str, kernel: Any, seen: set[str]) -> None:
        self._name, self._kernel, self._seen = name, kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self._seen.add(self._name)
        launch: Callable[..., Any] = self._kernel[grid]
        return launch


def kernels_of(module: ModuleType) -> list[str]:
    """Names of a module's kernels; what begins with an underscore is called by kernels only."""
    return [name for name in vars(module) if name.endswith("_kernel") and not name.startswith("_")]


@contextmanager
def noting() -> Iterator[set[str]]:
    """The names of the kernels that the body launches."""
    seen: set[str] = set()
    originals = [(module, name, getattr(module, name)) for module in MODULES for name in kernels_of(module)]
    for module, name, kernel in originals:
        setattr(module, name, Noted(name, kernel, seen))
    try:
        yield seen
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)


def adapter_kernels() -> None:
    """Records, shrink and expand: both phases, split factors, vectors, every type; one cut of K and
    several.
    """
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32,)
    for dtype in dtypes:
        world = World({1: 8, 2: 16, 3: 1, 4: 33, 5: 17}, dtype)
        prefill = [1] * 21 + [0] * 3 + [2] * 16 + [1, 3, 5, 0]
        found = run(world, OWNERS, Phase.DECODE, 0, SMALL, layers=(1,))
        if GPU:
            found += run(world, OWNERS, Phase.DECODE, 0, SINGLE, layers=(0,))
        found += run(world, prefill, Phase.PREFILL, 42, SMALL, groups=(0, 3) if GPU else (0,), layers=(1,))
        assert all(error < LIMIT[dtype] and kept for error, kept in found), (dtype, found)
    split = World({1: 8, 2: 21, 3: 20}, seed=3, split=True, vectors=True)
    assert all(
        error < 1e-6 and kept
        for error, kept in run(split, [1, 2, 3, 0, 3, 2], Phase.DECODE, 0, SMALL, (0,), (1,))
    )


def step_kernels() -> None:
    """Deltas, unpack, padding, RoPE with append, greedy choice: prefill, mixed and decode steps over
    adapters.
    """
    with tempfile.TemporaryDirectory() as name:
        model = decoder("llama", save("llama", Path(name)), torch.float32, DEVICE)
    driver = Driver(model, 4, slots=6, pages=900, adapters=9, executor=plain_executor)
    load_sorts(driver, SORTS[:2])
    base, other = Request(0, prompt(7, 1)), Request(1, prompt(5, 2), adapter=(1, GENERATION))
    driver.step([(base, 7)])  # fewer rows than a bucket of pieces: padding
    driver.step([(other, 5), (base, 0)])
    for _ in range(2):
        driver.step([(base, 0), (other, 0)])
    assert base.out == greedy(base.prompt, 4)


def sampling_kernels() -> None:
    """Best of slices, cuts, draws and the pick, against the definition in torch."""
    for vocab in (1, 300, 5003) if GPU else (1, 131):
        rng = np.random.default_rng(vocab)
        rows = 8
        opens = open_rows(*[random_row(rng, vocab) for _ in range(rows)])
        cpu = torch.device("cpu")
        samplers = [
            Sampler(rows, vocab, vocab, cpu, compiled=False),
            Sampler(rows, vocab, vocab, DEVICE, compiled=False),
        ]
        samplers[1]._draws = DeviceDraws(DEVICE) if GPU else DeviceDraws(DEVICE, block=128, splits=2)
        for sampler in samplers:
            sampler.open(*opens)
        logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32))
        positions = np.full(rows, 100, dtype=np.int32)
        first, second = (
            sampler.sample(logits.to(device), arange(rows), arange(rows), positions).cpu()
            for sampler, device in zip(samplers, (cpu, DEVICE), strict=True)
        )
        assert int((first == second).sum()) >= rows - 1, (vocab, first, second)


def main() -> None:
    """Run all of it; raises where a result is wrong or a kernel was left out."""
    with noting() as seen:
        for part in (adapter_kernels, step_kernels, sampling_kernels):
            part()
            if GPU:
                torch.cuda.synchronize()
            print(f"{part.__name__}: right", flush=True)
    missing = {name for module in MODULES for name in kernels_of(module)} - seen
    assert not missing, f"not launched: {sorted(missing)}"
    print(f"{len(seen)} kernels on {DEVICE.type}: {', '.join(sorted(seen))}")


if __name__ == "__main__":
    main()
