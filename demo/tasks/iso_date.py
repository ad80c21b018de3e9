"""Dates in five languages to ISO 8601."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random
from typing import Final

from demo.cases import Draft, Recipe, Task
from demo.tasks.words import words

_MONTHS: Final = {
    "en": words("January February March April May June July August September October November December"),
    "de": words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember"),
    "fr": words("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
    "es": words("enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre"),
    "it": words(
        "gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre"
    ),
}
_DAYS: Final = {
    "en": words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "de": words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag"),
    "fr": words("lundi mardi mercredi jeudi vendredi samedi dimanche"),
    "es": words("lunes martes miércoles jueves viernes sábado domingo"),
    "it": words("lunedì martedì mercoledì giovedì venerdì sabato domenica"),
}
_FORMS: Final = {
    "en": (
        "{month} {d}, {y}",
        "{d} {month} {y}",
        "the {ord} of {month}, {y}",
        "{day}, {month} {d}, {y}",
        "{short} {ord}, {y}",
    ),
    "de": ("{d}. {month} {y}", "{day}, der {d}. {month} {y}", "{d:02}.{m:02}.{y}"),
    "fr": ("{d} {month} {y}", "le {day} {d} {month} {y}", "le {d} {month} {y}"),
    "es": ("{d} de {month} de {y}", "{day}, {d} de {month} de {y}", "el {d} de {month} de {y}"),
    "it": ("{d} {month} {y}", "{day} {d} {month} {y}", "il {d} {month} {y}"),
}
_FIRST: Final = date(1950, 1, 1)
_SPAN_DAYS: Final = (date(2050, 1, 1) - _FIRST).days


def ordinal(number: int) -> str:
    """1 -> 1st, 12 -> 12th."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def draw(rng: Random) -> Draft:
    """A day from 1950 to 2049, written out in one of five languages."""
    day = _FIRST + timedelta(days=rng.randrange(_SPAN_DAYS))
    language = rng.choice(("en", "en", "de", "fr", "es", "it"))
    month = _MONTHS[language][day.month - 1]
    prompt = rng.choice(_FORMS[language]).format(
        d=day.day,
        m=day.month,
        y=day.year,
        ord=ordinal(day.day),
        month=month,
        short=month[:3],
        day=_DAYS[language][day.weekday()],
    )
    return Draft(day.isoformat(), prompt, day.isoformat())


TASK = Task(
    name="iso-date",
    title="Dates in English, German, French, Spanish and Italian to ISO 8601",
    data="Days from 1950 to 2049 written out by a generator; held-out days never occur in training.",
    instruction="Convert the date to ISO 8601 (YYYY-MM-DD). Answer with the date only.",
    checker="exact",
    max_tokens=16,
    recipe=Recipe(rank=8, alpha=16, targets=("q_proj", "v_proj"), steps=240),
    draw=draw,
)
