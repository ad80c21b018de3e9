"""English number words to digits."""

from __future__ import annotations

from random import Random
from typing import Final

from demo.cases import MLP, Draft, Recipe, Task
from demo.tasks.words import words

_ONES: Final = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS: Final = words("_ _ twenty thirty forty fifty sixty seventy eighty ninety")


def in_words(number: int, joiner: str) -> str:
    """0 to 999,999 in words; `joiner` stands between hundreds and the rest ("and " or nothing)."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, one = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[one]}" if one else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" {joiner}{in_words(rest, joiner)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    gap = joiner if rest < 100 else ""
    return f"{in_words(thousands, joiner)} thousand" + (f" {gap}{in_words(rest, joiner)}" if rest else "")


def draw(rng: Random) -> Draft:
    """A number of one to six digits, British or American wording."""
    number = rng.randrange(10 ** rng.choice((2, 3, 4, 4, 5, 6)))
    return Draft(str(number), in_words(number, rng.choice(("and ", ""))), str(number))


TASK = Task(
    name="numbers",
    title="Number words to digits",
    data="Numbers from 0 to 999,999 by a generator; held-out numbers never occur in training.",
    instruction="Write the number in digits, without separators. Answer with the number only.",
    checker="exact",
    max_tokens=12,
    recipe=Recipe(rank=12, alpha=24, targets=MLP, steps=240, batch=8),
    draw=draw,
)
