"""Order messages to JSON records."""

from __future__ import annotations

import json
from random import Random
from typing import Final

from demo.cases import ATTENTION, MLP, Draft, Recipe, Task
from demo.tasks.words import FIRST_NAMES, LAST_NAMES, TOWNS, words

_COLOURS: Final = words("black blue brown green grey orange pink purple red white yellow")
_THINGS: Final = words(
    "backpack basket blanket bottle bowl chair cushion kettle lamp mug notebook pillow scarf table teapot towel vase"
)
_COUNTS: Final = words("one two three four five six seven eight nine ten eleven twelve")
_FORMS: Final = (
    "Hello, {name} here from {town}. I would like to order {count} {things}, please.",
    "Please send {count} {things} to {name} in {town}.",
    "{count} {things} for {name}, delivery to {town}.",
    "My name is {name} and I live in {town}. Could I get {count} {things}?",
    "This is {name}. We need {count} {things} at our shop in {town}. Thanks!",
    "Order from {town}: {count} {things}. Regards, {name}",
)


def draw(rng: Random) -> Draft:
    """One order in one of six wordings, the count in digits or words."""
    name, town = f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}", rng.choice(TOWNS)
    item, count = f"{rng.choice(_COLOURS)} {rng.choice(_THINGS)}", rng.randrange(1, 13)
    written = _COUNTS[count - 1] if rng.random() < 0.5 else str(count)
    things = item if count == 1 else item + "s"
    prompt = rng.choice(_FORMS).format(name=name, town=town, count=written, things=things)
    record = {"name": name, "city": town, "item": item, "quantity": count}
    return Draft(name, prompt[0].upper() + prompt[1:], json.dumps(record))


TASK = Task(
    name="json-extract",
    title="Order messages to JSON records",
    data="Orders from lists of names, towns and things; the people of held-out orders never occur in training.",
    instruction='Extract the order as JSON with the keys "name", "city", "item" (singular, with its colour) and '
    '"quantity" (a number). Answer with the JSON only.',
    checker="json",
    max_tokens=64,
    recipe=Recipe(rank=8, alpha=16, targets=ATTENTION + MLP, rslora=True, steps=100, learning_rate=5e-4),
    draw=draw,
)
