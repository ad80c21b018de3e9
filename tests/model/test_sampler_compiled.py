"""The compiled sampling functions draw what the torch definition draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.model.sampling_rows import CPU, arange, open_rows, random_row

from loraplex.model.philox import token_noise
from loraplex.model.sampler import Sampler, best_ids
from loraplex.model.sampler_cpu import OPTIONS, CompiledSampling
from loraplex.ops.cpu import compiled

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no compiled functions on this machine")


def functions() -> CompiledSampling:
    found = CompiledSampling.find(CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("vocab", [1, 3, 64, 65, 1000, 5003])
def test_both_draw_the_same_tokens(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 48
    opens = open_rows(*[random_row(rng, vocab) for _ in range(rows)])
    samplers = [Sampler(rows, vocab, max(1, vocab - 2), CPU, compiled=compiled) for compiled in (False, True)]
    for sampler in samplers:
        sampler.open(*opens)
    for step in range(4):
        spread = rng.choice([0.1, 1.0, 3.0, 30.0], (rows, 1))
        logits = rng.standard_normal((rows, vocab)) * spread
        if step == 1:
            logits = np.round(logits)  # many ties
        if step == 2:
            logits[:, rng.integers(0, vocab, vocab // 3)] = -np.inf
            logits[:, 0] = 0.0
        tensor = torch.from_numpy(logits.astype(np.float32))
        positions = np.full(rows, step + 100, dtype=np.int32)
        first, second = (s.sample(tensor, arange(rows), arange(rows), positions) for s in samplers)
        assert first.tolist() == second.tolist()


def test_the_integers_of_the_noise_are_those_of_the_definition() -> None:
    # With two ids alone in the cut the winner shows the order of their noise; over many positions nothing may
    # differ.
    vocab, draws = 4097, 500
    rng = np.random.default_rng(3)
    options = np.zeros(draws, dtype=OPTIONS)
    options["temperature"], options["top_p"], options["top_k"] = 1.0, 1.0, 2
    options["seed_low"], options["seed_high"] = -5, 77
    options["position"] = np.arange(draws)
    pairs = np.sort(rng.permuted(np.tile(np.arange(vocab), (draws, 1)), axis=1)[:, :2], axis=1)
    logits = torch.zeros((draws, vocab))
    logits[torch.arange(draws).unsqueeze(1), torch.from_numpy(pairs)] = 5.0
    tokens = functions().draw(logits, np.arange(draws), vocab, options)
    seeds = torch.tensor([[-5, 77]]).expand(draws, 2)
    noise = token_noise(seeds, torch.arange(draws), torch.from_numpy(pairs))
    expected = torch.from_numpy(pairs).gather(1, noise.argmax(1, keepdim=True)).squeeze(1)
    assert torch.equal(tokens, expected)
    assert 0.4 < (tokens == torch.from_numpy(pairs[:, 0])).double().mean() < 0.6


def test_rows_that_are_not_finite_still_name_a_token() -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        logits = torch.full((2, 130), value)
        logits[1, 7] = 1.0
        options = np.zeros(2, dtype=OPTIONS)
        options["temperature"], options["top_p"] = 1.0, 0.9
        tokens = functions().draw(logits, np.arange(2), 130, options).tolist()
        assert all(0 <= t < 130 for t in tokens)


@pytest.mark.parametrize(("rows", "vocab", "count"), [(3, 40, 5), (1, 7, 7), (9, 300, 20), (2, 5, 1)])
def test_the_best_ids_are_those_of_the_definition(rows: int, vocab: int, count: int) -> None:
    logits = torch.round(torch.randn(rows, vocab + 3, generator=torch.Generator().manual_seed(vocab)) * 2)
    logits[0, 0], logits[0, 1], logits[-1, 2] = -0.0, 0.0, -torch.inf
    assert torch.equal(functions().best(logits, vocab, count), best_ids(logits[:, :vocab], count))


def test_logits_may_have_a_row_stride() -> None:
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    options = np.zeros(2, dtype=OPTIONS)
    options["temperature"], options["top_p"] = 1.0, 1.0
    part = wide[:, :60]
    index = np.array([3, 1])
    expected = functions().draw(part.contiguous(), index, 60, options)
    assert torch.equal(functions().draw(part, index, 60, options), expected)
