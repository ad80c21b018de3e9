"""Constrained output: a request whose tokens must follow a grammar gets a mask with each row that samples.

The grammar's state moves with commits only, so that nothing has to be undone when a plan is discarded, fails
or is rolled back, and a preempted request goes on where it was. The next mask needs the token before it:
`RunningTable` holds such a request back until that token is committed, and nobody else.

Specification: rulings "Sampling" (rows that need a host mask).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.packed import I32
from loraplex.core.ports import Constraint
from loraplex.engine import endings
from loraplex.engine.request_state import RequestRecord
from loraplex.engine.state import EngineState
from loraplex.schedule.select import Selection


class NoGrammars:
    """`core.ports.Grammars` of an engine that can hold no answer to one. reason: why not."""

    def __init__(self, reason: str = "the engine was given no grammars") -> None:
        self._reason = reason

    def open(self, grammar: str) -> Constraint | None:
        """Refused."""
        raise CallerError(
            ErrorCode.UNSUPPORTED_OPTION,
            f"response_format cannot be carried out: {self._reason}; leave it out",
            param="response_format",
        )

    def masks(self, constraints: Sequence[Constraint]) -> tuple[I32, Sequence[str]]:
        """Never asked: there is no constraint."""
        raise InternalFault(ErrorCode.INTERNAL, "masks were asked for where no grammar can be opened")

    def close(self) -> None:
        """Nothing is held."""


def begin(state: EngineState, record: RequestRecord) -> bool:
    """Whether the request may be admitted as far as its grammar goes; one that is refused ends here."""
    if record.grammar is None or record.constraint is not None:
        return True
    try:
        record.constraint = state.grammars.open(record.grammar)
    except LoraplexError as error:
        endings.end(state, record, error=error)
    return record.constraint is not None


def masks_for(state: EngineState, selection: Selection) -> tuple[Selection, I32 | None]:
    """Masks of the selection's masked samples, and the selection without requests whose grammar has no way
    on.
    """
    masked = np.flatnonzero(state.table.masked[selection.slots] & selection.samples)
    if not masked.size:
        return selection, None
    records = [state.by_slot[int(selection.slots[index])] for index in masked.tolist()]
    masks, reasons = state.grammars.masks([record.constraint for record in records if record.constraint])
    stuck = np.array([bool(reason) for reason in reasons], dtype=np.bool_)
    if not stuck.any():
        return selection, masks
    for record, reason in zip(records, reasons, strict=True):
        if reason:
            endings.end(state, record, error=CallerError(ErrorCode.SCHEMA_UNSUPPORTED, reason))
    keep = np.ones(selection.slots.size, dtype=np.bool_)
    keep[masked[stuck]] = False
    return selection.keep(keep), masks[~stuck]


def accept(state: EngineState, record: RequestRecord, token: int) -> bool:
    """A token of the request is committed; whether its output is complete. A grammar that gives up ends the
    request.
    """
    if record.constraint is None:
        return False
    try:
        return record.constraint.accept(token)
    except LoraplexError as error:
        endings.end(state, record, error=error)
        return False
