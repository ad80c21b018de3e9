"""The sampler: each option alone and together, ties, edges, distributions, and independence of the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.model.sampling_rows import CPU, arange, open_rows

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.plan import BiasColumns
from loraplex.model.sampler import Sampler, TokenMasks, best_ids
from loraplex.model.sampler_cpu import CompiledSampling
from loraplex.ops.cpu import compiled

COMPILED = [False, True]


@pytest.fixture(params=COMPILED, ids=["torch", "compiled"], autouse=True)
def compiled_functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test here runs against the torch definition and against the compiled functions."""
    if request.param and compiled.library() is None:
        pytest.skip("no compiled functions on this machine")
    if not request.param:
        monkeypatch.setattr(CompiledSampling, "find", staticmethod(lambda device: None))
    return bool(request.param)


def make(vocab: int, *rows: dict[str, Any], sampled: int | None = None, requests: int = 8) -> Sampler:
    sampler = Sampler(max(requests, len(rows)), vocab, sampled or vocab, CPU)
    sampler.open(*open_rows(*rows))
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, position: int = 0) -> list[int]:
    n = logits.shape[0]
    return sampler.sample(logits, arange(n), arange(n), np.full(n, position, dtype=np.int32)).tolist()


def many(sampler: Sampler, row: torch.Tensor, draws: int, slot: int = 0) -> np.ndarray:
    """Tokens of one request at positions 0 to draws - 1, from the same logits."""
    index = np.zeros(draws, dtype=np.int32)
    tokens = sampler.sample(row[None, :], index, index + slot, arange(draws))
    return np.bincount(tokens.numpy(), minlength=row.numel())


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The statistic over its degrees of freedom, cells of tiny expectation merged."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    cells = wanted > 0
    return float((((observed - wanted) ** 2)[cells] / wanted[cells]).sum() / max(1, cells.sum() - 1))


def test_greedy_takes_the_first_of_equal_logits_and_leaves_the_logits_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    before = logits.clone()
    assert draw(make(4, {"temperature": 0.0}, {"temperature": 0.0}), logits) == [1, 0]
    assert torch.equal(logits, before)


def test_ids_beyond_the_sampled_vocabulary_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, 1.0, 50.0, 60.0]]).expand(3, 4).contiguous()
    sampler = make(4, {"temperature": 0.0}, {}, {"top_p": 0.9, "bias": [(3, 100.0)]}, sampled=2)
    assert draw(sampler, logits)[0] == 1
    for position in range(50):
        assert max(draw(sampler, logits, position)) < 2


def test_logit_index_chooses_rows_and_may_repeat() -> None:
    logits = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    sampler = make(2, {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.0})
    tokens = sampler.sample(logits, np.array([1, 0, 1], np.int32), arange(3), arange(3))
    assert tokens.tolist() == [1, 0, 1]


def test_no_samples_give_no_tokens() -> None:
    empty = np.empty(0, dtype=np.int32)
    assert make(4).sample(torch.zeros(2, 4), empty, empty, empty).tolist() == []


def test_bias_moves_greedy_and_only_its_own_row() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    sampler = make(3, {"temperature": 0.0, "bias": [(2, 2.5), (1, 1.25)]}, {"temperature": 0.0})
    assert draw(sampler, logits) == [2, 0]


def test_repetition_penalty_covers_prompt_and_output_and_both_signs() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, -1.5]])
    assert draw(make(4, {"temperature": 0.0, "repetition": 2.0, "prompt": [0]}), logits) == [1]
    assert draw(make(4, {"temperature": 0.0, "repetition": 2.0, "output": [0]}), logits) == [1]
    negative = torch.tensor([[-1.0, -1.5]])
    assert draw(make(2, {"temperature": 0.0, "repetition": 2.0, "prompt": [0]}), negative) == [1]


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.0]])
    assert draw(make(3, {"temperature": 0.0, "presence": 1.5, "prompt": [0, 0]}), logits) == [0]
    assert draw(make(3, {"temperature": 0.0, "presence": 1.5, "output": [0]}), logits) == [1]
    assert draw(make(3, {"temperature": 0.0, "frequency": 0.5, "output": [0]}), logits) == [0]
    assert draw(make(3, {"temperature": 0.0, "frequency": 0.5, "output": [0, 0, 0]}), logits) == [1]


def test_penalties_stack_in_their_order() -> None:
    # Repetition first: (4 + 2) / 2 = 3, then 3 - 0.5 * 2 - 0.25 = 1.75.
    sampler = make(
        2,
        {
            "temperature": 0.0,
            "repetition": 2.0,
            "frequency": 0.5,
            "presence": 0.25,
            "bias": [(0, 2.0)],
            "output": [0, 0],
        },
    )
    assert draw(sampler, torch.tensor([[4.0, 1.74]])) == [0]
    sampler.open(
        *open_rows(
            {
                "temperature": 0.0,
                "repetition": 2.0,
                "frequency": 0.5,
                "presence": 0.25,
                "bias": [(0, 2.0)],
                "output": [0, 0],
            }
        )
    )
    assert draw(sampler, torch.tensor([[4.0, 1.76]])) == [1]


def test_drawn_tokens_are_counted() -> None:
    sampler = make(3, {"temperature": 0.0, "frequency": 1.0})
    logits = torch.tensor([[2.5, 1.0, 0.0]])
    assert [draw(sampler, logits, p)[0] for p in range(5)] == [0, 0, 1, 0, 1]


def test_counts_exist_only_for_requests_that_use_them_and_are_reused() -> None:
    sampler = make(3, *[{"temperature": 0.0}] * 8)
    draw(sampler, torch.zeros(8, 3))
    assert sampler.counts.rows == 0
    penalised = {"temperature": 0.0, "presence": 1.0, "output": [0]}
    sampler.open(*open_rows(*[penalised] * 8))
    rows = sampler.counts.rows
    assert rows >= 8
    for _ in range(5):
        sampler.open(*open_rows(*[penalised] * 8))
    assert sampler.counts.rows == rows
    fresh = open_rows(*[{"temperature": 0.0, "presence": 1.0}] * 8)
    sampler.open(*fresh)
    assert draw(sampler, torch.tensor([[1.0, 0.5, 0.0]] * 8)) == [0] * 8


def test_temperature_shapes_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    for temperature in (0.5, 1.0, 2.0):
        counts = many(make(5, {"temperature": temperature, "seed_low": 5}), logits, 20_000)
        assert chi_square(counts, torch.softmax(logits / temperature, 0).numpy()) < 3.0


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    sampler = make(3, {"temperature": 1e-38}, {"temperature": 1e-38, "top_p": 0.5})
    assert draw(sampler, torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])) == [1, 1]


def test_large_vocabulary_distribution() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal(1_000).astype(np.float32)) * 3
    counts = many(make(1_000, {"seed_low": 9}), logits, 8_000)
    assert chi_square(counts, torch.softmax(logits.double(), 0).numpy()) < 1.3


def truncated(probabilities: list[float], keep: set[int]) -> np.ndarray:
    p = np.array([v if i in keep else 0.0 for i, v in enumerate(probabilities)])
    return p / p.sum()


P5 = [0.1, 0.4, 0.25, 0.2, 0.05]
KEPT = [
    ({"top_k": 1}, {1}),
    ({"top_k": 3}, {1, 2, 3}),
    ({"top_k": 5}, {0, 1, 2, 3, 4}),
    ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ({"top_p": 1e-9}, {1}),
    ({"top_p": 0.39}, {1}),
    ({"top_p": 0.4}, {1}),
    ({"top_p": 0.41}, {1, 2}),
    ({"top_p": 0.65}, {1, 2}),
    ({"top_p": 0.85}, {1, 2, 3}),
    ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.999999}, {0, 1, 2, 3, 4}),
    ({"min_p": 1.0}, {1}),
    ({"min_p": 0.45}, {1, 2, 3}),
    ({"min_p": 0.2}, {0, 1, 2, 3}),
    ({"top_k": 3, "top_p": 0.5}, {1, 2}),
    ({"top_k": 2, "top_p": 0.6}, {1}),
    ({"min_p": 0.45, "top_p": 0.8}, {1, 2, 3}),
    ({"min_p": 0.45, "top_k": 2, "top_p": 0.9}, {1, 2}),
]


@pytest.mark.parametrize(("options", "keep"), KEPT, ids=str)
def test_truncation_keeps_exactly_these_tokens(options: dict[str, Any], keep: set[int]) -> None:
    counts = many(make(5, {**options, "seed_low": 3}), torch.log(torch.tensor(P5)), 4_000)
    assert set(np.flatnonzero(counts).tolist()) == keep
    assert chi_square(counts, truncated(P5, keep)) < 4.0


def test_truncation_comes_after_temperature() -> None:
    # At temperature 0.5 the probabilities are squared: 0.16 of 0.275 is 0.58.
    counts = many(make(5, {"temperature": 0.5, "top_p": 0.58}), torch.log(torch.tensor(P5)), 500)
    assert set(np.flatnonzero(counts).tolist()) == {1}


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    flat = torch.zeros(6)
    assert set(np.flatnonzero(many(make(6, {"top_k": 2}), flat, 300)).tolist()) == {0, 1}
    assert set(np.flatnonzero(many(make(6, {"top_p": 0.5}), flat, 300)).tolist()) == {0, 1, 2}
    assert set(np.flatnonzero(many(make(6, {"top_k": 4, "top_p": 0.5}), flat, 300)).tolist()) == {0, 1}


def test_nucleus_of_a_large_vocabulary_matches_a_full_sort() -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy((rng.standard_normal(800) * 2).astype(np.float32))
    p = torch.softmax(logits.double(), 0).numpy()
    order = np.argsort(-p, kind="stable")
    inside = order[: int(np.searchsorted(np.cumsum(p[order]), 0.7)) + 1]
    counts = many(make(800, {"top_p": 0.7}), logits, 8_000)
    assert set(np.flatnonzero(counts).tolist()) <= set(inside.tolist())
    assert chi_square(counts, truncated(p.tolist(), set(inside.tolist()))) < 1.5


ROWS: list[dict[str, Any]] = [
    {"seed_low": 1}, {"seed_low": 2, "top_p": 0.8}, {"temperature": 0.0}, {"seed_low": 3, "top_k": 7},
    {"seed_low": 4, "min_p": 0.05, "temperature": 0.7},
    {"seed_low": 5, "repetition": 1.3, "prompt": [1, 2, 3]},
    {"seed_low": 6, "frequency": 0.4, "top_p": 0.95}, {"seed_low": -7, "bias": [(5, 3.0)]},
    {"temperature": 0.0, "presence": 0.5}, {"seed_low": 8, "seed_high": 1, "top_k": 50, "top_p": 0.5,
    "min_p": 0.01},
]  # fmt: skip


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(8)
    steps = torch.from_numpy(rng.standard_normal((12, len(ROWS), 900)).astype(np.float32) * 2)
    together = make(900, *ROWS, requests=len(ROWS))
    shuffled = make(900, *ROWS, requests=len(ROWS))
    alone = [make(900, *ROWS, requests=len(ROWS)) for _ in ROWS]
    for position, logits in enumerate(steps):
        whole = draw(together, logits, position)
        order = rng.permutation(len(ROWS)).astype(np.int32)
        again = shuffled.sample(logits, order, order, np.full(len(ROWS), position, np.int32)).tolist()
        assert [whole[i] for i in order] == again
        for slot, sampler in enumerate(alone):
            own = np.array([slot], np.int32)
            assert sampler.sample(logits, own, own, own * 0 + position).tolist() == [whole[slot]]


def test_a_request_resumed_from_its_history_continues_alike() -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.standard_normal((10, 50)).astype(np.float32) * 2)
    row = {"seed_low": 6, "frequency": 0.8, "repetition": 1.2, "prompt": [3, 4]}
    straight = make(50, row)
    tokens = [draw(straight, logits[p : p + 1], p)[0] for p in range(10)]
    resumed = make(50, {**row, "output": tokens[:5]})
    assert [draw(resumed, logits[p : p + 1], p)[0] for p in range(5, 10)] == tokens[5:]


def test_seeds_and_positions_change_the_draw() -> None:
    flat = torch.zeros(1, 1000)
    first = [draw(make(1000, {"seed_low": s, "seed_high": h}), flat)[0] for s in range(4) for h in range(3)]
    assert len(set(first)) > 8
    sampler = make(1000, {})
    assert len({draw(sampler, flat, p)[0] for p in range(12)}) > 8


def test_top_logprobs_put_the_chosen_first_and_break_ties_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    sampler = make(6, sampled=5)
    ids, values = sampler.top_logprobs(
        logits, arange(2), arange(2), torch.tensor([4, 2]), np.array([5, 2], np.int32)
    )
    assert ids[0].tolist() == [4, 1, 2, 0, 3, 4]
    assert ids[1, :3].tolist() == [2, 0, 1]
    expected = torch.log_softmax(logits.double(), 1)
    assert torch.allclose(values.double(), expected.gather(1, ids), atol=1e-6)


def test_top_logprobs_of_many_rows_and_of_none() -> None:
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    index = np.arange(149, -1, -1, dtype=np.int32)
    ids, _ = make(40).top_logprobs(
        logits, index, index * 0, torch.zeros(150, dtype=torch.int64), index * 0 + 3
    )
    assert torch.equal(ids[:, 1:], torch.topk(logits.flip(0), 3).indices)
    ids, values = make(40).top_logprobs(
        logits, arange(2), arange(2), torch.tensor([7, 8]), np.zeros(2, np.int32)
    )
    assert ids.tolist() == [[7], [8]]
    assert values.shape == (2, 1)


def test_a_slot_that_opens_for_further_ids_draws_them_and_disturbs_nobody() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=generator)
    logits[:, 40:46] += 4.0
    logits[:, 46:] += 9.0
    options: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"seed_low": 5}, {"seed_low": 6, "top_p": 0.9, "top_k": 8},
        {"temperature": 0.0, "presence": 1.0, "output": [45]},
        {"temperature": 0.0, "bias": [(44, 50.0), (47, 90.0)]},
        {"seed_low": 7, "min_p": 0.01},
    ]  # fmt: skip
    wide = [{**row, "sampled_ids": 46} for row in options]
    narrow = draw(make(50, *options, sampled=40), logits)
    further = draw(make(50, *wide, sampled=40), logits)
    assert max(narrow) < 40 <= max(further) < 46
    assert further[4] == 44
    assert further == draw(make(50, *options, sampled=46), logits)
    mixed = [
        row if index % 2 else other for index, (row, other) in enumerate(zip(options, wide, strict=True))
    ]
    assert draw(make(50, *mixed, sampled=40), logits) == [
        token if index % 2 else other
        for index, (token, other) in enumerate(zip(narrow, further, strict=True))
    ]


def test_masks_and_log_probabilities_reach_further_ids() -> None:
    logits = torch.arange(200.0).reshape(4, 50) / 10
    sampler = make(50, *[{"temperature": 0.0, "sampled_ids": ids} for ids in (0, 46, 0, 46)], sampled=40)
    words = np.zeros((2, 2), dtype=np.uint32)
    words[:, 0], words[0, 1] = 1 << 5, 1 << 12
    masks = TokenMasks(np.array([1, 2], dtype=np.int32), words.view(np.int32))
    tokens = sampler.sample(logits, arange(4), arange(4), arange(4), masks)
    assert tokens.tolist() == [39, 44, 5, 45]
    assert not sampler.takes_best(arange(2))
    assert sampler.takes_best(arange(1))
    ids, values = sampler.top_logprobs(logits, arange(4), arange(4), tokens, np.full(4, 2, np.int32))
    assert ids[:, 1:].tolist() == [[39, 38], [45, 44], [39, 38], [45, 44]]
    assert torch.allclose(values, torch.log_softmax(logits, 1).gather(1, ids), atol=1e-5)
    sampler.open(*open_rows({"temperature": 0.0, "slot": 1}))
    assert draw(sampler, logits[:2]) == [39, 39]


def test_best_ids_order_negative_and_infinite_logits() -> None:
    row = torch.tensor([[-5.0, -math.inf, -0.5, math.inf, -5.0]])
    assert best_ids(row, 5).tolist() == [[3, 2, 0, 4, 1]]


@pytest.mark.parametrize(
    "arrays",
    [
        open_rows({"slot": 99}),
        open_rows({"sampled_ids": 21}),
        open_rows({"sampled_ids": -1}),
        open_rows({"bias": [(77, 1.0)]}),
        open_rows({"presence": 1.0, "output": [77]}),
        (open_rows({"bias": [(1, 1.0)]})[0], BiasColumns.none(), np.empty(0, np.int32)),
        (open_rows({})[0], BiasColumns.none(), arange(3)),
    ],
    ids=["slot", "further ids", "fewer ids", "bias id", "history id", "bias count", "history count"],
)
def test_contradictory_opens_are_refused(arrays: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    with pytest.raises(InternalFault) as caught:
        make(20).open(*arrays)
    assert caught.value.code is ErrorCode.PLAN_MALFORMED


def test_logits_of_another_shape_or_type_are_refused() -> None:
    sampler = make(4, {})
    for logits in (torch.zeros(1, 5), torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(4)):
        with pytest.raises(InternalFault) as caught:
            sampler.sample(logits, arange(1), arange(1), arange(1))
        assert caught.value.code is ErrorCode.PLAN_MALFORMED
    with pytest.raises(InternalFault):
        Sampler(2, 4, 5, CPU)


def masked(samples: list[int], allowed: list[list[int]], vocab: int) -> TokenMasks:
    bits = np.zeros((len(samples), -(-vocab // 32) * 32), dtype=np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, tokens] = 1
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return TokenMasks(np.array(samples, dtype=np.int32), words)


OPTION_ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 0.0, "bias": [(5, 100.0)]}, {"temperature": 1.0}, {"top_k": 2},
    {"top_p": 0.3},
    {"min_p": 0.5}, {"repetition": 1.7, "prompt": [5, 6], "output": [7]},
    {"presence": -2.0, "output": [5, 5]},
]  # fmt: skip


def test_a_mask_bounds_its_own_row_whatever_its_options(compiled_functions: bool) -> None:
    vocab, count = 77, len(OPTION_ROWS)
    logits = torch.randn((2 * count, vocab), generator=torch.Generator().manual_seed(3)) * 4
    logits[:, 5] += 30.0  # what an unmasked row takes
    kept = logits.clone()
    rows = [{**row, "seed_low": index} for index, row in enumerate(OPTION_ROWS)]
    sampler = make(vocab, *rows, *rows, sampled=70, requests=2 * count)
    slots = np.arange(2 * count, dtype=np.int32)
    allowed = [[3 * row + 1, 60, 76] for row in range(count)]
    masks = masked(list(range(count)), allowed, vocab)
    for position in range(20):
        tokens = sampler.sample(logits, slots, slots, np.full(2 * count, position, np.int32), masks).tolist()
        for row in range(count):
            assert tokens[row] in allowed[row][:2], "a mask does not reach beyond the sampled vocabulary"
        alone = make(vocab, *rows, sampled=70, requests=count)
        free = alone.sample(
            logits[count:], slots[:count], slots[:count], np.full(count, position, np.int32)
        ).tolist()
        if position == 0:  # later, penalties know what was drawn before
            assert tokens[count:] == free
    assert torch.equal(logits, kept)


def test_a_mask_of_one_token_leaves_no_choice(compiled_functions: bool) -> None:
    vocab = 40
    sampler = make(vocab, *({"temperature": 2.0, "seed_low": k} for k in range(8)))
    slots = np.arange(8, dtype=np.int32)
    masks = masked(list(range(8)), [[k + 20] for k in range(8)], vocab)
    logits = torch.full((8, vocab), -50.0)
    logits[:, 0] = 50.0
    assert sampler.sample(logits, slots, slots, slots, masks).tolist() == list(range(20, 28))
