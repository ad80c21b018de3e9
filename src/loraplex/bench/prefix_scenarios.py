"""What `loraplex bench prefix` measures: conversations, one system prompt for many, an activated specialist,
and prompts that share nothing.

Owns what is asked, and which of its tokens could be reused. Never measures: `bench/turns.py` does. Prompts
are random token ids, answers are greedy and end at no end-of-sequence token. Specification: benchmarks
(prefixes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.bench.turns import Conversation, Turn

LORA: Final = "lora"
ALORA: Final = "alora"
INVOCATION_TOKENS: Final = 2
"""The last ids of the vocabulary; no prompt draws them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. first, own, answer: tokens of a conversation's first turn, of each later one
    and of each answer. system: tokens that all clients share. contexts: tokens before the pipeline's base
    answers with `draft` tokens, then a specialist with `verdict`. fresh: (prompts, their tokens) that share
    nothing.
    """

    clients: int
    turns: int
    first: int
    own: int
    answer: int
    system: int
    question: int
    reply: int
    contexts: tuple[int, ...]
    draft: int
    verdict: int
    fresh: tuple[int, int]

    @property
    def longest(self) -> int:
        """Positions of the longest request."""
        talk = self.first + (self.turns - 1) * self.own + self.turns * self.answer
        pipeline = max(self.contexts) + self.draft + INVOCATION_TOKENS + self.verdict
        return max(talk, self.system + self.question + self.reply, pipeline, self.fresh[1] + 1)


CPU_SIZES: Final = Sizes(
    clients=64, turns=8, first=64, own=28, answer=4, system=2000, question=16, reply=4,
    contexts=(1024, 2048, 4096, 7900), draft=256, verdict=16, fresh=(8, 512),
)  # fmt: skip
"""Conversations are short: without a cache, longer ones take most of an hour."""
CUDA_SIZES: Final = Sizes(
    clients=64, turns=8, first=600, own=100, answer=100, system=2000, question=64, reply=64,
    contexts=(1024, 4096, 16384, 65536), draft=256, verdict=16, fresh=(16, 2048),
)  # fmt: skip


class Prompts:
    """Random token ids of one repeat; every engine is asked the same."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab, self._rng = vocab, np.random.default_rng(seed)

    def draw(self, count: int) -> list[int]:
        """Token ids that invoke nothing."""
        return [int(token) for token in self._rng.integers(0, self._vocab - INVOCATION_TOKENS, count)]

    @property
    def invocation(self) -> list[int]:
        """What activates the specialist."""
        return list(range(self._vocab - INVOCATION_TOKENS, self._vocab))


def conversations(prompts: Prompts, sizes: Sizes, aliases: Sequence[str]) -> list[list[Turn]]:
    """Every client talks to an adapter of its own."""
    return [
        [
            Turn(prompts.draw(sizes.own if turn else sizes.first), alias, sizes.answer)
            for turn in range(sizes.turns)
        ]
        for alias in aliases[: sizes.clients]
    ]


def possible_in_conversations(measured: Conversation, answer: int) -> int:
    """Prompt tokens that a client said or was answered in the turn before."""
    sizes = {(times.client, times.turn): times.prompt for times in measured.turns}
    return sum(sizes[client, turn - 1] + answer for client, turn in sizes if turn)


def system_prompt(
    prompts: Prompts, system: Sequence[int], sizes: Sizes, alias: str | None
) -> list[list[Turn]]:
    """Every client asks its own question behind one system prompt."""
    return [
        [Turn([*system, *prompts.draw(sizes.question)], alias, sizes.reply)] for _ in range(sizes.clients)
    ]


def pipeline(prompts: Prompts, context: int, sizes: Sizes, alias: str) -> list[Turn]:
    """The base drafts over a context of its own; the specialist `alias` judges context and draft."""
    return [
        Turn(prompts.draw(context), None, sizes.draft),
        Turn(prompts.invocation, alias, sizes.verdict),
    ]


def fresh(prompts: Prompts, sizes: Sizes) -> list[list[Turn]]:
    """Prompts that share nothing, with an answer of one token."""
    count, length = sizes.fresh
    return [[Turn(prompts.draw(length), None, 1)] for _ in range(count)]
