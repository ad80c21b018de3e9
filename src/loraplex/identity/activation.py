"""From where on an activated adapter acts: the first token of the last exact occurrence of its invocation.

A function of token ids alone: a text that reads alike but has other ids invokes nothing. Never decides what
becomes of a prompt without an invocation.

Specification: 0x08E, 0x08G.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loraplex.identity.digests import invalid


def last_invocation(tokens: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Position in `tokens` at which the last exact occurrence of `invocation` begins; None where there is
    none.
    """
    if not invocation:
        raise invalid("an invocation of no tokens was given, expected at least one")
    last = len(tokens) - len(invocation)
    if last < 0:
        return None
    ids = np.asarray(tokens, dtype=np.int64)
    starts = np.flatnonzero(ids[: last + 1] == invocation[0])
    for offset, token in enumerate(invocation[1:], 1):
        starts = starts[ids[starts + offset] == token]
    return int(starts[-1]) if starts.size else None
