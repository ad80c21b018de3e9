"""Owns the decision whether an answer is right, by the kind of checker that a held-out case names.

Needs the standard library only, so that evaluation runs without any package that training uses.
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable
from typing import Final

LABELS: Final = frozenset({"positive", "negative", "neutral", "answered", "declined", "asked"})
"""Every label of every task: a text that names two is credited with none."""
SQLITE_STEPS: Final = 200_000
"""Virtual-machine instructions that one answer's query may take before it counts as wrong."""

SHOPS: Final = 6
"""Generated databases that a query must agree on: with three, neighbouring limits can still give equal rows."""

CITIES: Final = ("Berlin", "Lyon", "Turin", "Porto", "Leeds", "Ghent", "Oslo", "Prague")
CATEGORIES: Final = ("books", "garden", "kitchen", "music", "sports", "toys")
STATUSES: Final = ("open", "paid", "shipped", "returned", "cancelled")
SHOP_TABLES: Final = {
    "customers": "id, name, city, age",
    "products": "id, name, category, price, stock",
    "orders": "id, customer_id, product_id, quantity, status, year",
}


def exact(answer: str, expected: str) -> bool:
    """The expected text, white space around it aside."""
    return answer.strip() == expected


def label(answer: str, expected: str) -> bool:
    """The expected word in any case, with or without a full stop."""
    return answer.strip().rstrip(".").casefold() == expected.casefold()


def json_value(answer: str, expected: str) -> bool:
    """JSON that means the same, with or without a code fence."""
    try:
        return _canonical(_without_fence(answer)) == _canonical(expected)
    except ValueError:
        return False


def call(answer: str, expected: str) -> bool:
    """The expected call between its tags, or the expected text where that is none."""
    want, got = _TAGGED.fullmatch(expected.strip()), _TAGGED.fullmatch(answer.strip())
    if want is None or got is None:
        return answer.strip() == expected
    return json_value(got[1], want[1])


def sqlite_rows(answer: str, expected: str) -> bool:
    """A query with the expected query's result on SHOPS different shops; order counts where ORDER BY is expected."""
    query = _without_fence(answer)
    ordered = "ORDER BY" in expected.upper()
    for seed in range(SHOPS):
        want, got = _run(expected, seed), _run(query, seed)
        if want is None:
            raise ValueError(f"the expected query {expected!r} does not run")
        if got is None or (got != want if ordered else sorted(map(repr, got)) != sorted(map(repr, want))):
            return False
    return True


_TAGGED: Final = re.compile(r"<tool_call>\s*(\{.*\})\s*</tool_call>", re.DOTALL)
CHECKERS: Final[dict[str, Callable[[str, str], bool]]] = {
    "call": call,
    "exact": exact,
    "json": json_value,
    "label": label,
    "sqlite": sqlite_rows,
}


def is_right(kind: str, answer: str, expected: str) -> bool:
    """Whether `answer` is right. Raises ValueError for a kind that does not exist."""
    if kind not in CHECKERS:
        raise ValueError(f"checker {kind!r} does not exist, expected one of {', '.join(CHECKERS)}")
    return CHECKERS[kind](answer, expected)


def is_inside(kind: str, answer: str, expected: str) -> bool:
    """Whether the right answer stands anywhere in the text: what a lenient reader would accept from the base.

    Longer answers are credited too: a label among other words, or JSON or SQL inside explanations. A text that
    names more than one label is not credited.
    """
    if is_right(kind, answer, expected):
        return True
    match kind:
        case "label":
            words = set(re.findall(r"[a-z]+", answer.casefold()))
            return words & LABELS == {expected.casefold()}
        case "json":
            return any(json_value(part, expected) for part in re.findall(r"\{[^{}]*\}", answer))
        case "call" if tagged := _TAGGED.fullmatch(expected):
            return any(json_value(part, tagged[1]) for part in re.findall(r"\{.*\}", answer))
        case "sqlite":
            return any(
                sqlite_rows(part, expected) for part in re.findall(r"SELECT[^;`]*", answer, re.IGNORECASE)
            )
        case _:
            return expected in answer


def _canonical(text: str) -> str:
    """JSON with sorted keys: unlike Python's values, it keeps 1, 1.0 and true apart."""
    return json.dumps(json.loads(text), sort_keys=True)


def _without_fence(text: str) -> str:
    fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.DOTALL)
    return (fenced[1] if fenced else text).strip()


def _run(query: str, seed: int) -> list[tuple[object, ...]] | None:
    """Rows of a read-only query on shop number `seed`, or None if it is refused, wrong or too slow."""
    shop = _shop(seed)
    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
    shop.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY)
    shop.set_progress_handler(lambda: 1, SQLITE_STEPS)
    try:
        return shop.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        shop.close()


def _shop(seed: int) -> sqlite3.Connection:
    rng = random.Random(f"shop {seed}")
    shop = sqlite3.connect(":memory:")
    for table, columns in SHOP_TABLES.items():
        shop.execute(f"CREATE TABLE {table} ({columns})")
    people = [
        (i, f"name {rng.randrange(40)}", rng.choice(CITIES), rng.randrange(18, 80)) for i in range(1, 61)
    ]
    goods = [
        (
            i,
            f"thing {rng.randrange(40)}",
            rng.choice(CATEGORIES),
            rng.randrange(1, 200),
            rng.randrange(0, 100),
        )
        for i in range(1, 61)
    ]
    orders = [
        (
            i,
            rng.randrange(1, 61),
            rng.randrange(1, 61),
            rng.randrange(1, 9),
            rng.choice(STATUSES),
            rng.randrange(2018, 2027),
        )
        for i in range(1, 241)
    ]
    shop.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", people)
    shop.executemany("INSERT INTO products VALUES (?, ?, ?, ?, ?)", goods)
    shop.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", orders)
    shop.commit()
    return shop
