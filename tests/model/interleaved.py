"""Random interleavings of requests through `LLM`, whose adapters are of eight methods and whose prompts share
prefixes; each is answered with the prefix cache on and off, and PEFT judges every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.gpu.level_b import Deviations
from tests.model.drive import logits_of
from tests.model.methods import INVOCATION, tuned
from tests.model.tiny import reference
from tests.prompts import prompt

from loraplex import LLM, SamplingParams
from loraplex.api import RequestOutput

NAMES = ("lora", "rslora", "dora", "lora-bias", "bitfit", "ia3", "head", "alora")
TIE = 1e-4
CLOSE = 1e-4
TOP = 5
PAGE_TOKENS = 4


@dataclass(frozen=True)
class Asked:
    """One request. turns: how many others' answers grow before the next request comes."""

    tokens: list[int]
    adapter: str | None
    count: int
    turns: int


def interleaving(seed: int, requests: int) -> list[Asked]:
    """Prompts over two contexts, cut at several places; requests of the activated adapter invoke it, and some
    others hold the same tokens.
    """
    rng = Random(seed)
    contexts = [prompt(24, 200 + index) for index in range(2)]
    out = []
    for index in range(requests):
        adapter = NAMES[index % len(NAMES)] if index < len(NAMES) else rng.choice([None, *NAMES])
        tokens = [*rng.choice(contexts)[: rng.choice([9, 16, 24])], *prompt(rng.randrange(4), index)]
        if adapter == "alora" or rng.random() < 0.3:
            tokens += [*INVOCATION, *prompt(rng.randrange(5), 50 + index)]
        out.append(Asked(tokens, adapter, rng.randint(2, 9), rng.randrange(4)))
    return out


def answers(
    root: Path, asked: Sequence[Asked], seed: int, *, cached: bool, **options: Any
) -> list[RequestOutput]:
    """What `LLM` says, requests coming while others are answered."""
    rng, last, growing = Random(seed), {}, {}
    folders = {name: root / name for name in NAMES}
    with LLM(root / "base", folders, page_tokens=PAGE_TOKENS, prefix_cache=cached, **options) as llm:

        def grow(index: int) -> None:
            output = next(growing[index], None)
            if output is None:
                del growing[index]
            else:
                last[index] = output

        for index, one in enumerate(asked):
            params = SamplingParams(max_tokens=one.count, temperature=0.0, logprobs=TOP, ignore_eos=True)
            growing[index] = llm.stream(one.tokens, one.adapter, params)
            grow(index)
            for _ in range(one.turns):
                if growing:
                    grow(rng.choice(sorted(growing)))
        while growing:
            grow(rng.choice(sorted(growing)))
    outputs = [last[index] for index in range(len(asked))]
    assert [len(output.token_ids) for output in outputs] == [one.count for one in asked]
    assert any(output.cached_tokens for output in outputs) is cached
    return outputs


def scores_after(one: Asked, output: RequestOutput, family: str, spread: float) -> torch.Tensor:
    """PEFT's log probabilities before each generated token, [tokens, vocabulary], over what came
    before it.
    """
    judge = reference(family) if one.adapter is None else tuned(one.adapter, family, spread)
    scores = torch.log_softmax(logits_of(judge, [*one.tokens, *output.token_ids]), dim=-1)
    return scores[len(one.tokens) - 1 : -1]


def check_float(root: Path, family: str, spread: float, seed: int, requests: int, **options: Any) -> None:
    """In float32, with the cache on and off: every token is PEFT's choice or within `TIE` of it, with PEFT's
    log probabilities; and where both runs part, PEFT's best two are within `TIE`.
    """
    asked = interleaving(seed, requests)
    on, off = (
        answers(root, asked, seed, cached=cached, dtype="float32", **options) for cached in (True, False)
    )
    for one, *outputs in zip(asked, on, off, strict=True):
        for output in outputs:
            for row, token, entries in zip(
                scores_after(one, output, family, spread),
                output.token_ids,
                output.logprobs or [],
                strict=True,
            ):
                assert float(row.max() - row[token]) <= TIE, one
                assert max(abs(value - float(row[entry])) for entry, value in entries.items()) <= CLOSE, one
        both = zip(*(output.token_ids for output in outputs), strict=True)
        parted = next((at for at, (first, second) in enumerate(both) if first != second), None)
        if parted is not None:
            best = scores_after(one, outputs[0], family, spread)[parted].topk(2).values
            assert float(best[0] - best[1]) <= TIE, one


def deviations(
    root: Path, family: str, spread: float, seed: int, requests: int, *, cached: bool, **options: Any
) -> Deviations:
    """Of one run from PEFT in float32, at every generated token."""
    asked, side = interleaving(seed, requests), Deviations()
    for one, output in zip(asked, answers(root, asked, seed, cached=cached, **options), strict=True):
        for row, token, entries in zip(
            scores_after(one, output, family, spread), output.token_ids, output.logprobs or [], strict=True
        ):
            best = row.topk(TOP)
            expected = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            side.note(expected, entries, token)
    return side
