"""Under which function each KV row of a request was made: a history of intervals, each with its execution
digest.

An execution says what acts over a run of positions as far as KV rows can tell: the base, or the base with one
adapter. An adapter whose parts all lie outside the cache-ancestor closure executes as the base
(`identity/compatibility.py`). An activated adapter executes as the base before its invocation and as itself
from the first invocation token on. Which slot, page or request holds a row is never part of it.

Specification: 0x08E, 0x08H; rulings "Identity", "KV compatibility".
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import msgspec

from loraplex.identity.canonical import check_digest, digest
from loraplex.identity.digests import invalid

MAX_INTERVALS: Final = 2
"""A request begins under one execution and changes it at most once, where an activated adapter is invoked."""


class Interval(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From position `start` on, rows were made under `execution` (a digest), up to the next interval or the
    end.
    """

    start: int
    execution: str


History = tuple[Interval, ...]


def base_execution(base: str) -> str:
    """E of positions at which no adapter changes a KV row (0x08H)."""
    return digest({"execution": "base", "base_sha256": check_digest("base", base)})


def adapter_execution(semantic: str) -> str:
    """E of positions at which an adapter acts that can change KV rows."""
    return digest({"execution": "adapter", "adapter_semantic_sha256": check_digest("semantic", semantic)})


def history_of(base: str, execution: str | None, invoked_at: int | None = None) -> History:
    """The history of a request.

    base: the base ABI. execution: the adapter's, None for the base alone. invoked_at: position of the first
    invocation token of an activated adapter, None for an adapter that is always on.
    """
    if invoked_at is not None and (execution is None or invoked_at < 0):
        raise invalid(f"an invocation at position {invoked_at} needs an adapter and a position from 0")
    if execution is None:
        return (Interval(0, base_execution(base)),)
    acting = Interval(invoked_at or 0, check_digest("execution", execution))
    if not acting.start or acting.execution == base_execution(base):
        return (Interval(0, acting.execution),)
    return (Interval(0, base_execution(base)), acting)


def check_history(history: History) -> None:
    """Raise `identity_invalid` unless intervals begin at 0, grow, and change the execution each time."""
    if not 1 <= len(history) <= MAX_INTERVALS:
        raise invalid(f"a history of {len(history)} intervals was given, 1 to {MAX_INTERVALS} are possible")
    if history[0].start != 0:
        raise invalid(f"a history begins at position {history[0].start}, expected 0")
    for before, after in pairwise(history):
        if after.start <= before.start or after.execution == before.execution:
            raise invalid(f"the interval at {after.start} does not change what {before.start} began")
    for interval in history:
        check_digest("execution", interval.execution)
