"""Everyday sentences in pirate style, by fixed rules."""

from __future__ import annotations

import re
from random import Random
from typing import Final

from demo.cases import Draft, Recipe, Task

_RULES: Final = {
    "hello": "ahoy",
    "friend": "matey",
    "my": "me",
    "you": "ye",
    "your": "yer",
    "yes": "aye",
    "is": "be",
    "are": "be",
    "am": "be",
    "the": "th'",
    "of": "o'",
    "to": "t'",
    "and": "an'",
    "money": "doubloons",
    "boss": "cap'n",
    "car": "ship",
    "house": "cabin",
    "beer": "grog",
    "food": "grub",
    "stop": "avast",
    "old": "barnacle-covered",
}
_PEOPLE: Final = (
    "my friend",
    "my boss",
    "your sister",
    "the teacher",
    "our neighbour",
    "the old doctor",
    "my brother",
    "the baker",
)
_THINGS: Final = (
    "the money",
    "your car",
    "the old house",
    "my book",
    "the map of the city",
    "the food",
    "a glass of beer",
    "the red bicycle",
)
_DOING: Final = (
    "looking for",
    "selling",
    "painting",
    "hiding",
    "talking about",
    "waiting for",
    "dreaming of",
    "cleaning",
    "carrying",
)
_PLACES: Final = (
    "in the kitchen",
    "at the station",
    "near the old bridge",
    "in your garden",
    "at the market",
    "behind the house",
)
_OPENINGS: Final = ("Hello, ", "Yes, ", "", "", "")


def pirate(sentence: str) -> str:
    """Word by word: the rules above, and -ing becomes -in'. "Arr!" comes last."""

    def one(match: re.Match[str]) -> str:
        word = match[0]
        new = _RULES.get(word.lower(), word)
        if new == word and len(word) > 4 and word.endswith("ing"):
            new = word[:-1] + "'"
        return new[0].upper() + new[1:] if word[0].isupper() else new

    return re.sub(r"[A-Za-z]+", one, sentence) + " Arr!"


def draw(rng: Random) -> Draft:
    """A sentence from a small grammar."""
    who, thing, doing, place = (
        rng.choice(_PEOPLE),
        rng.choice(_THINGS),
        rng.choice(_DOING),
        rng.choice(_PLACES),
    )
    text = rng.choice(
        (
            f"{who} is {doing} {thing} {place}.",
            f"are you {doing} {thing}?",
            f"I am {doing} {thing} {place}.",
            f"stop {doing} {thing}, {who} is {place}!",
            f"where are {who} and {rng.choice(_PEOPLE)} {doing} {thing}?",
            f"you are {place} and {who} is {doing} {thing}.",
        )
    )
    opening = rng.choice(_OPENINGS)
    sentence = opening + text if opening else text[0].upper() + text[1:]
    return Draft(sentence, sentence, pirate(sentence))


TASK = Task(
    name="pirate",
    title="Everyday sentences in pirate style",
    data="Sentences from a small grammar, translated word by word by fixed rules; held-out sentences never occur in training.",
    instruction="Rewrite the sentence the way a pirate would say it. Answer with the sentence only.",
    checker="exact",
    max_tokens=48,
    recipe=Recipe(rank=32, alpha=32, targets=("q_proj", "v_proj"), steps=140, batch=8),
    draw=draw,
)
