"""Support tickets to queue and priority."""

from __future__ import annotations

import json
from random import Random
from typing import Final

from demo.cases import Draft, Recipe, Task
from demo.tasks.words import words

_SUBJECTS: Final = {
    "billing": (
        "the invoice for {month}",
        "my card payment",
        "the refund",
        "our yearly plan",
        "the VAT number on the bill",
        "a double charge",
    ),
    "delivery": (
        "the parcel",
        "my order",
        "the courier",
        "the tracking number",
        "the shipment to our office",
        "the package",
    ),
    "account": (
        "my password",
        "the login page",
        "the two-factor code",
        "my user name",
        "the account of a colleague",
        "my e-mail address",
    ),
    "technical": (
        "the mobile app",
        "the API",
        "the export to CSV",
        "the dashboard",
        "the search page",
        "the upload of pictures",
    ),
}
_TROUBLES: Final = {
    "billing": (
        "{s} is wrong",
        "I do not understand {s}",
        "please correct {s}",
        "I was promised {s} in {month}",
        "{s} is still missing",
    ),
    "delivery": (
        "{s} has not arrived",
        "{s} was left in the rain",
        "where is {s}?",
        "{s} went to the wrong street",
        "{s} is late since {month}",
    ),
    "account": (
        "I forgot {s}",
        "{s} does not work any more",
        "please change {s}",
        "I am locked out because of {s}",
        "somebody else used {s}",
    ),
    "technical": (
        "{s} shows an error",
        "{s} is very slow",
        "{s} crashes on start",
        "{s} has been broken since {month}",
        "{s} gives an empty page",
    ),
}
_URGENCY: Final = {
    "high": (
        "This is urgent.",
        "We lose money every hour!",
        "Please help at once.",
        "Our whole team is blocked.",
    ),
    "normal": ("", "Thank you.", "Please have a look.", "Kind regards."),
    "low": ("No hurry.", "Whenever you find the time.", "It can wait.", "Just so that you know."),
}
_MONTHS: Final = words(
    "January February March April May June July August September October November December"
)
_OPENINGS: Final = ("", "Hello, ", "Hi, ", "Good morning, ", "Dear team, ")


def draw(rng: Random) -> Draft:
    """A ticket: opening, trouble with a subject, urgency."""
    queue, priority = rng.choice(sorted(_SUBJECTS)), rng.choice(sorted(_URGENCY))
    month = rng.choice(_MONTHS)
    subject = rng.choice(_SUBJECTS[queue]).format(month=month)
    trouble = rng.choice(_TROUBLES[queue]).format(s=subject, month=month)
    text = rng.choice(_OPENINGS) + trouble
    text = text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")
    urgency = rng.choice(_URGENCY[priority])
    answer = json.dumps({"queue": queue, "priority": priority})
    return Draft(trouble, f"{text} {urgency}".strip(), answer)


TASK = Task(
    name="triage",
    title="Support tickets to queue and priority",
    data="Tickets from four queues and three urgencies; the trouble in a held-out ticket never occurs in training.",
    instruction='Sort the support ticket. Answer with JSON only: {"queue": "billing", "delivery", "account" or "technical", '
    '"priority": "high", "normal" or "low"}.',
    checker="json",
    max_tokens=24,
    recipe=Recipe(rank=16, alpha=32, targets=("v_proj",), steps=320, learning_rate=2e-3),
    draw=draw,
)
