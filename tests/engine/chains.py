"""Grammars without text: chains of token ids, for tests of constrained output in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.engine.rig import VOCAB

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.packed import I32
from loraplex.core.plan import mask_width
from loraplex.core.ports import Constraint
from loraplex.sim.tokens import expected_tokens, next_allowed

WIDTH = mask_width(VOCAB)


def words(tokens: Sequence[int]) -> I32:
    bits = np.zeros(WIDTH * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


@dataclass
class Chain:
    """After a token t only 5 t + 1, 5 t + 2 and 5 t + 3 may come, around the vocabulary; `left` of them make
    it whole.
    """

    left: int
    last: int = 0
    stuck: bool = False

    def allowed(self) -> list[int]:
        return [] if self.stuck else [(5 * self.last + k) % VOCAB for k in (1, 2, 3)]

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            raise CallerError(ErrorCode.SCHEMA_UNSUPPORTED, f"{token} is not one of {self.allowed()}")
        self.last, self.left = token, self.left - 1
        return self.left == 0


@dataclass
class Chains:
    """Grammars of a number: so many tokens. late: how often a grammar is still being compiled."""

    late: int = 0
    stuck: bool = False
    opened: list[Chain] = field(default_factory=list)

    def open(self, grammar: str, own_ends: Sequence[int] = ()) -> Constraint | None:
        if self.late:
            self.late -= 1
            return None
        if not grammar.isdigit():
            raise CallerError(ErrorCode.SCHEMA_UNSUPPORTED, "not a number")
        self.opened.append(Chain(int(grammar), stuck=self.stuck))
        return self.opened[-1]

    def masks(self, constraints: Sequence[Constraint]) -> tuple[I32, Sequence[str]]:
        chains = [chain for chain in constraints if isinstance(chain, Chain)]
        rows = [words(chain.allowed()) for chain in chains]
        return np.stack(rows), ["" if chain.allowed() else "no way on" for chain in chains]


def chained(prompt: Sequence[int], count: int) -> list[int]:
    """What the device draws when every token is held to the chain."""
    tokens, chain, out = list(prompt), Chain(count), []
    for _ in range(count):
        drawn = expected_tokens(np.array(tokens, dtype=np.int32), 0, 1, VOCAB)[0]
        token = next_allowed(drawn, words(chain.allowed()))
        chain.accept(token)
        tokens.append(token)
        out.append(token)
    return out
