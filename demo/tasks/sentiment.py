"""Words to positive or negative, labelled by the VADER lexicon."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Final

from demo.cases import ATTENTION, Draft, Recipe, Task
from demo.tasks.words import words

_LEFT_OUT: Final = words(
    "assf assh bast bitch cock cunt damn dick fag fuc fuk nig piss prick rap shit slut wank whor"
)
"""First letters of the lexicon's slurs and obscenities: a demo need not print them."""


@cache
def _lexicon() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(positive, negative) words of at least four letters whose mean rating is 1 or more away from neutral."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    ratings = SentimentIntensityAnalyzer().lexicon
    known = sorted(
        w for w in ratings if w.isascii() and w.isalpha() and len(w) > 3 and not w.startswith(_LEFT_OUT)
    )
    return tuple(w for w in known if ratings[w] >= 1), tuple(w for w in known if ratings[w] <= -1)


def draw(rng: Random) -> Draft:
    """A word, positive and negative ones equally often."""
    positive = rng.random() < 0.5
    word = rng.choice(_lexicon()[0 if positive else 1])
    # Inflections share a stem: keyed by it, "hating" is held out when "hated" is.
    return Draft(word[:4], word, "positive" if positive else "negative")


TASK = Task(
    name="sentiment",
    title="Sentiment of a word",
    data="The VADER lexicon (package vaderSentiment); a held-out word shares its first four letters with no training word.",
    instruction="Is the word positive or negative? Answer with one word: positive or negative.",
    checker="label",
    max_tokens=4,
    recipe=Recipe(rank=4, alpha=8, targets=ATTENTION, steps=160, batch=32),
    draw=draw,
)
