"""What a simulated client lets its answer be made of: the fields that bound tokens, and what they mean.

Says of one token at a time whether it may come; knows nothing of the engine's masks.

Specification: rulings "Tests" (checkers outside the code under test).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Fields of `core.messages.EngineSampling`, under their names."""

    min_tokens: int = 0
    late_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def let(self, token: int, before: Sequence[int]) -> bool:
        """Whether `token` may follow the answer `before`."""
        if len(before) < self.min_tokens and token in self.late_token_ids:
            return False
        if self.allowed_token_ids and token not in self.allowed_token_ids:
            return False
        answer = (*before, token)
        return not any(answer[-len(word) :] == word for word in self.bad_words)

    def fields(self) -> dict[str, Any]:
        """As a request has them."""
        return {name: getattr(self, name) for name in self.__slots__}


def draw_bounds(rng: Random, free: Sequence[int], vocab_size: int) -> TokenBounds:
    """Bounds that meet `free`, the answer without them; some token may always come."""
    at = rng.randrange(len(free))
    kind = rng.choice(["late", "allowed", "word", "word and late"])
    if kind == "allowed":
        return TokenBounds(allowed_token_ids=tuple(sorted(rng.sample(range(vocab_size), 5))))
    word = tuple(free[at : at + rng.randint(1, 3)])
    return TokenBounds(
        min_tokens=rng.randint(1, len(free)) if "late" in kind else 0,
        late_token_ids=(free[rng.randrange(len(free))], free[-1]),
        bad_words=(word,) if "word" in kind else (),
    )
