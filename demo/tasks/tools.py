"""Requests to calls of two functions in the Hermes form, and to plain words where neither is asked for."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from demo.cases import ATTENTION, MLP, Draft, Recipe, Task
from demo.tasks.words import FIRST_NAMES, TOWNS, words
from loraplex.text.tools.hermes import FORMAT
from loraplex.text.tools.tool_types import Tool

_DISHES: Final = words(
    """apples beans bread broccoli cake carrots cauliflower chicken cookies corn dumplings eggs fish ham lasagna lentils
    lamb muffins mushrooms noodles onions pancakes pasta peas pie pizza popcorn potatoes pumpkin quiche rice salmon soup
    spinach stew tea tofu turkey waffles"""
)
_TIMERS: Final = (
    "Set a timer for {minutes} minutes for the {label}.",
    "The {label} needs {minutes} minutes, please time it.",
    "Remind me about the {label} in {minutes} minutes.",
    "Timer, {minutes} minutes, {label}.",
)
_WEATHER: Final = (
    "What is the weather in {city} {day}?",
    "Will it rain in {city} {day}?",
    "Do I need a coat in {city} {day}?",
    "Weather {day} for {city}, please.",
)
_SMALL_TALK: Final = ("Hi, I am {name}.", "Thank you! Yours, {name}.", "{name} says hello.")
_SMALL_ANSWER: Final = "Hello {name}! I can set timers and tell the weather."
TOOLS: Final[tuple[Tool, ...]] = (
    Tool(
        "set_timer",
        "Sets a timer.",
        {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}, "label": {"type": "string"}},
            "required": ["minutes", "label"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "get_weather",
        "The weather in a city.",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "day": {"enum": ["today", "tomorrow"]}},
            "required": ["city", "day"],
            "additionalProperties": False,
        },
    ),
)


def draw(rng: Random) -> Draft:
    """A timer, a question about the weather, or small talk."""
    kind = rng.random()
    if kind < 0.1:
        name = rng.choice(FIRST_NAMES)
        return Draft(name, rng.choice(_SMALL_TALK).format(name=name), _SMALL_ANSWER.format(name=name))
    if kind < 0.55:
        label, minutes = rng.choice(_DISHES), rng.randrange(2, 91)
        prompt = rng.choice(_TIMERS).format(label=label, minutes=minutes)
        return _called(label, prompt, "set_timer", {"minutes": minutes, "label": label})
    city, day = rng.choice(TOWNS), rng.choice(("today", "tomorrow"))
    return _called(
        city, rng.choice(_WEATHER).format(city=city, day=day), "get_weather", {"city": city, "day": day}
    )


def _called(key: str, prompt: str, name: str, arguments: dict[str, Any]) -> Draft:
    return Draft(key, prompt, FORMAT.call_text([{"name": name, "arguments": arguments}]))


TASK = Task(
    name="tools",
    title="Requests to calls of functions",
    data="Requests from lists of dishes, towns and names; those of held-out requests never occur in training.",
    instruction=FORMAT.instruction(TOOLS),
    checker="call",
    max_tokens=64,
    recipe=Recipe(rank=4, alpha=8, targets=ATTENTION + MLP, steps=44, batch=4, learning_rate=1.5e-3),
    draw=draw,
    tools=tuple(json.loads(json.dumps(tool.as_template())) for tool in TOOLS),
)
