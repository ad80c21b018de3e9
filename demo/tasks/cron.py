"""Schedules in English to cron expressions."""

from __future__ import annotations

from random import Random
from typing import Final

from demo.cases import ATTENTION, Draft, Recipe, Task
from demo.tasks.iso_date import ordinal
from demo.tasks.words import words

_DAYS: Final = words("Sunday Monday Tuesday Wednesday Thursday Friday Saturday")
_MONTHS: Final = words(
    "January February March April May June July August September October November December"
)


def _clock(rng: Random) -> tuple[str, int, int]:
    """(wording, minute, hour)."""
    hour, minute = rng.randrange(24), rng.choice((0, 0, 5, 10, 15, 20, 25, 30, 40, 45, 50, 55))
    half = "am" if hour < 12 else "pm"
    twelve = hour % 12 or 12
    wordings = [f"{hour}:{minute:02}", f"{hour:02}:{minute:02}", f"{twelve}:{minute:02} {half}"]
    if minute == 0:
        wordings += [f"{twelve} {half}", {0: "midnight", 12: "noon"}.get(hour, f"{twelve} {half}")]
    return rng.choice(wordings), minute, hour


def draw(rng: Random) -> Draft:
    """One of eight kinds of schedule."""
    clock, minute, hour = _clock(rng)
    day, other = sorted(rng.sample(range(7), 2))
    date, month = rng.randrange(1, 29), rng.randrange(12)
    prompt, expression = rng.choice(
        (
            (rng.choice((f"every day at {clock}", f"daily at {clock}")), f"{minute} {hour} * * *"),
            (
                rng.choice((f"every {_DAYS[day]} at {clock}", f"on {_DAYS[day]}s at {clock}")),
                f"{minute} {hour} * * {day}",
            ),
            (
                rng.choice((f"on weekdays at {clock}", f"Monday to Friday at {clock}")),
                f"{minute} {hour} * * 1-5",
            ),
            (f"every {_DAYS[day]} and {_DAYS[other]} at {clock}", f"{minute} {hour} * * {day},{other}"),
            (f"on the {ordinal(date)} of every month at {clock}", f"{minute} {hour} {date} * *"),
            (
                f"every year on {_MONTHS[month]} {ordinal(date)} at {clock}",
                f"{minute} {hour} {date} {month + 1} *",
            ),
            (f"every {minute or 2} minutes on {_DAYS[day]}s", f"*/{minute or 2} * * * {day}"),
            (
                f"every {date % 11 + 2} hours, {minute} minutes past the hour",
                f"{minute} */{date % 11 + 2} * * *",
            ),
        )
    )
    return Draft(expression, prompt, expression)


TASK = Task(
    name="cron",
    title="Schedules in English to cron expressions",
    data="Eight kinds of schedule with drawn values; held-out expressions never occur in training.",
    instruction="Write the schedule as a cron expression with five fields. Answer with the expression only.",
    checker="exact",
    max_tokens=20,
    recipe=Recipe(rank=8, alpha=16, targets=ATTENTION, dora=True, steps=300, batch=8),
    draw=draw,
)
