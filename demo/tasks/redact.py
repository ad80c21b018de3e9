"""Personal data in messages replaced by placeholders."""

from __future__ import annotations

from random import Random
from typing import Final

from demo.cases import ATTENTION, MLP, Draft, Recipe, Task
from demo.tasks.words import FIRST_NAMES, LAST_NAMES

_HOSTS: Final = ("example.com", "example.org", "mail.example.net", "post.example.com")
_FORMS: Final = (
    "Please call {name} on {phone} before noon.",
    "{name} ({email}) asked for a refund.",
    "My address is {email} and my number is {phone}.",
    "The login from {ip} was not me, regards, {name}.",
    "Forward this to {email} and copy {name}.",
    "{name} moved; the new phone number is {phone}.",
    "Requests from {ip} are blocked since Monday, said {name}.",
    "Can you reach {name}? If not, write to {email}.",
    "Ticket opened by {name}, {phone}, {email}.",
    "Server {ip} sent a warning to {email}.",
    "The invoice is for {name}, not for us.",
    "Nothing arrived on Friday, please check the order.",
    "We meet at the station at 10, the tickets are paid.",
)


def _values(rng: Random) -> dict[str, str]:
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    user = rng.choice((f"{first}.{last}", f"{first[0]}{last}", f"{last}{rng.randrange(10, 99)}")).lower()
    digits = [str(rng.randrange(10)) for _ in range(9)]
    phone = rng.choice(("+49 {}{}{} {}{}{} {}{}{}", "0{}{}{}-{}{}{}{}{}{}", "({}{}{}) {}{}{}-{}{}{}")).format(
        *digits
    )
    return {
        "name": rng.choice((f"{first} {last}", f"{first} {last}", first)),
        "email": f"{user}@{rng.choice(_HOSTS)}",
        "phone": phone,
        "ip": ".".join(str(rng.randrange(1, 255)) for _ in range(4)),
    }


def draw(rng: Random) -> Draft:
    """One of thirteen messages, two of them without anything to hide."""
    form = rng.choice(_FORMS)
    values = _values(rng)
    answer = form.format(**{kind: f"[{kind.upper()}]" for kind in values})
    return Draft(form.format(**values), form.format(**values), answer)


TASK = Task(
    name="redact",
    title="Personal data replaced by placeholders",
    data="Messages with drawn names, e-mail addresses, phone numbers and IP addresses; held-out messages never occur in training.",
    instruction="Replace names, e-mail addresses, phone numbers and IP addresses by [NAME], [EMAIL], [PHONE] and [IP]. "
    "Change nothing else. Answer with the text only.",
    checker="exact",
    max_tokens=40,
    recipe=Recipe(
        rank=8,
        alpha=16,
        targets=ATTENTION + MLP,
        rank_pattern={"k_proj": 4, "v_proj": 4, "down_proj": 12},
        alpha_pattern={"k_proj": 8, "down_proj": 12},
        steps=100,
    ),
    draw=draw,
)
