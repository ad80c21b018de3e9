"""Every family against transformers on the same random weights: logits, greedy tokens, chunks, mixtures, page
sizes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.model.tiny import FAMILIES, VOCAB, Paged, decoder, reference, save
from tests.prompts import prompt

from loraplex.model.attention.backend import Histories
from loraplex.ops.interface import NoAdapters

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(name, root / name) for name in FAMILIES}


def expected(name: str, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(name)(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, folders: dict[str, Path]) -> None:
    tokens = prompt(40, 3)
    (logits,) = Paged(decoder(name, folders[name]), 4).step({0: tokens})
    torch.testing.assert_close(logits, expected(name, tokens), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name: str, folders: dict[str, Path]) -> None:
    tokens = prompt(11, 3)
    with torch.no_grad():
        whole = (
            reference(name).generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False)[0].tolist()
        )
    paged = Paged(decoder(name, folders[name]), 3)
    token = int(paged.step({0: tokens})[0][-1].argmax())
    generated = [token]
    for _ in range(11):
        token = int(paged.step({}, {0: token})[0][-1].argmax())
        generated.append(token)
    assert generated == whole[len(tokens) :]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-mixed-window"])
@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_chunked_prefill_equals_one_piece(name: str, page_tokens: int, folders: dict[str, Path]) -> None:
    tokens = prompt(37, 3)
    model = decoder(name, folders[name])
    (whole,) = Paged(model, page_tokens).step({0: tokens})
    for sizes in ([1, 36], [16, 16, 5], [5] * 7 + [2], [36, 1]):
        paged, parts, at = Paged(model, page_tokens), [], 0
        for size in sizes:
            parts += paged.step({0: tokens[at : at + size]})
            at += size
        torch.testing.assert_close(torch.cat(parts), whole, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-mixed-window", "qwen3"])
@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_mixed_batch_equals_each_request_alone(name: str, page_tokens: int, folders: dict[str, Path]) -> None:
    """Prefill with and without history beside decode rows of very different length, in poisoned pages."""
    model = decoder(name, folders[name])
    prompts = [prompt(n, seed=n) for n in (9, 30, 2, 21, 14)]
    alone = [Paged(model, page_tokens).step({0: tokens})[0] for tokens in prompts]
    paged = Paged(model, page_tokens, requests=5)
    paged.step({1: prompts[1][:-1], 0: prompts[0][:4]})
    paged.step({2: prompts[2][:1], 4: prompts[4][:-1]})
    mixed = paged.step(
        {3: prompts[3], 0: prompts[0][4:]}, {2: prompts[2][-1], 1: prompts[1][-1], 4: prompts[4][-1]}
    )
    for slot, logits in zip((3, 0, 2, 1, 4), mixed, strict=True):
        torch.testing.assert_close(logits, alone[slot][-len(logits) :], rtol=TOLERANCE, atol=TOLERANCE)


def test_decode_requests_of_unlike_length_are_grouped_and_come_back_in_order(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.model.attention.torch_paged.PADDING_POSITIONS", 6)
    model = decoder("llama", folders["llama"])
    prompts = [prompt(n, seed=n) for n in (40, 3, 38, 5, 20)]
    paged = Paged(model, 4, requests=5)
    for slot, tokens in enumerate(prompts):
        paged.step({slot: tokens[:-1]})
    mixed = paged.step({}, {slot: tokens[-1] for slot, tokens in enumerate(prompts)})
    for tokens, logits in zip(prompts, mixed, strict=True):
        torch.testing.assert_close(logits[0], expected("llama", tokens)[-1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(dtype: torch.dtype, folders: dict[str, Path]) -> None:
    tokens = prompt(24, 3)
    paged = Paged(decoder("llama", folders["llama"], dtype), 5)
    (first,), (second,) = paged.step({0: tokens[:20]}), paged.step({0: tokens[20:]})
    logits = torch.cat([first, second])
    assert logits.dtype is dtype
    logits = logits.float()
    want = expected("llama", tokens)
    assert float((logits - want).norm() / want.norm()) < (0.05 if dtype is torch.bfloat16 else 0.01)


def test_logits_are_computed_for_the_rows_asked_for(folders: dict[str, Path]) -> None:
    model, tokens = decoder("llama", folders["llama"]), prompt(9, 3)
    for wanted in ([], [8], [0, 3, 8]):
        paged = Paged(model, 4)
        histories = Histories(1, np.array([0], np.int32), np.array([9], np.int32), paged.tables[:1])
        logits = model.forward(
            torch.tensor(tokens),
            torch.arange(9),
            paged.attention.begin(histories),
            NoAdapters(),
            torch.tensor(wanted, dtype=torch.long),
        )
        assert logits.shape == (len(wanted), VOCAB)
        torch.testing.assert_close(logits, expected("llama", tokens)[wanted], rtol=TOLERANCE, atol=TOLERANCE)
