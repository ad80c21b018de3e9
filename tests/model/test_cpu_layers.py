"""The compiled layers against torch's, for every family; and a row's bits, whatever is beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.drive import Driver, Request
from tests.model.tiny import FAMILIES, VOCAB, Paged, decoder, save

from loraplex.model.attention.backend import Histories
from loraplex.model.cpu_layers import CpuLayers
from loraplex.model.linear import Linear, panel_kernel
from loraplex.ops.interface import NoAdapters

CPU = torch.device("cpu")
needs_panels = pytest.mark.skipif(
    panel_kernel(torch.float32, CPU) is None, reason="needs AVX-512 and a compiler"
)
needs_bf16 = pytest.mark.skipif(panel_kernel(torch.bfloat16, CPU) is None, reason="needs AVX-512 bf16")


class Compiled(Paged):
    """`Paged`, with layers through the compiled kernels."""

    def forward(self, histories: Histories, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        compiled = self.model.compiled_over(self.pool, self.kv)
        assert isinstance(compiled, CpuLayers)
        every = torch.arange(len(tokens))
        attention = self.attention.begin(histories)
        assert compiled.serves(attention, NoAdapters())
        return self.model.forward(tokens, positions, attention, NoAdapters(), every, compiled)


def conversation(paged: Paged) -> list[torch.Tensor]:
    """Chunked prefill, mixed steps, decode steps; logits of every row."""
    rng = np.random.default_rng(3)
    draw = lambda n: rng.integers(0, VOCAB, n).tolist()  # noqa: E731
    out = paged.step({0: draw(5), 1: draw(9)})
    out += paged.step({2: draw(3), 1: draw(4)}, {0: 7})
    for _ in range(4):
        out += paged.step({}, {2: draw(1)[0], 0: draw(1)[0], 1: draw(1)[0]})
    return out


@needs_panels
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_equal_those_of_torch(name: str, tmp_path: Path) -> None:
    model = decoder(name, save(name, tmp_path / "model"))
    for expected, got in zip(conversation(Paged(model, 4)), conversation(Compiled(model, 4)), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@needs_bf16
def test_layers_equal_those_of_torch_in_bfloat16_up_to_rounding(tmp_path: Path) -> None:
    model = decoder("llama", save("llama", tmp_path / "model"), torch.bfloat16)
    for expected, got in zip(conversation(Paged(model, 4)), conversation(Compiled(model, 4)), strict=True):
        assert float((got - expected).abs().max()) < 0.06 * float(expected.abs().max())


@needs_panels
@pytest.mark.parametrize("name", ["llama-biased", "mistral-window", "qwen3"])
def test_a_decode_row_has_the_same_bits_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    model = decoder(name, save(name, tmp_path / "model"))
    prompts = {slot: list(range(slot + 1, 6 + 2 * slot)) for slot in range(4)}
    together, alone = Compiled(model, 4), Compiled(model, 4)
    together.step(prompts)
    for slot, prompt in prompts.items():
        alone.step({slot: prompt})
    # The histories must agree before the rows can: attention of prefill rows is torch's.
    alone.pool.copy_(together.pool)
    for _ in range(3):
        rows = together.step({}, {slot: 5 + slot for slot in prompts})
        for slot, row in zip(prompts, rows, strict=True):
            assert torch.equal(row, alone.step({}, {slot: 5 + slot})[0])


@needs_panels
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)])
@pytest.mark.parametrize(("columns", "d_in"), [(48, 64), (17, 5), (1, 1), (130, 71), (96, 4100)])
def test_panels_keep_the_weight_and_multiply_rows_one_by_one(
    dtype: torch.dtype, columns: int, d_in: int
) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn((columns, d_in), generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    packed = Linear(weight.clone(), bias)
    packed.pack()
    assert packed.panels is not None
    assert torch.equal(packed.weight, weight)
    wide = torch.randn((85, d_in + 3), generator=generator).to(dtype)
    x = wide[:, 1 : d_in + 1]
    y = packed(x)
    expected = x.double() @ weight.double().T + bias.double()
    error = (y.double() - expected).abs() / (x.double().abs() @ weight.double().abs().T + 1)
    assert float(error.max()) < 2 * torch.finfo(dtype).eps
    for lo, hi in ((0, 1), (3, 10), (13, 21), (20, 37), (30, 85)):
        assert torch.equal(packed(x[lo:hi]), y[lo:hi])


@needs_panels
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_change_no_bit_of_a_decode_step(threads: int, tmp_path: Path) -> None:
    model = decoder("llama", save("llama", tmp_path / "model"))
    first, second = Compiled(model, 4), Compiled(model, 4)
    for paged in (first, second):
        paged.step({slot: list(range(slot + 1, 6 + 2 * slot)) for slot in range(4)})
    before = torch.get_num_threads()
    for _ in range(3):
        expected = first.step({}, dict.fromkeys(range(4), 5))
        torch.set_num_threads(threads)
        try:
            got = second.step({}, dict.fromkeys(range(4), 5))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@needs_panels
def test_two_runners_over_one_decoder_keep_to_their_own_pools(tmp_path: Path) -> None:
    model = decoder("llama", save("llama", tmp_path / "model"))
    drivers = [Driver(model), Driver(model)]
    requests = [Request(0, [3, 1, 4, 1, 5, 9]) for _ in drivers]
    for driver, request in zip(drivers, requests, strict=True):
        driver.step([(request, 6)])
    for _ in range(4):
        for driver, request in zip(drivers, requests, strict=True):
            driver.step([(request, 0)])
    assert requests[0].out == requests[1].out
