"""Constrained output: a request whose tokens a grammar or its own parameters bound gets a mask with each row
that samples.

The grammar's state moves with commits only, so that nothing has to be undone when a plan is discarded, fails
or is rolled back, and a preempted request goes on where it was. The next mask needs the token before it:
`RunningTable` holds such a request back until that token is committed, and nobody else. What the parameters
forbid (`engine.token_rules`) is a mask too, of which most are known before; a token comes through where
everything lets it.

Specification: rulings "Sampling" (rows that need a host mask).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.packed import I32, empty
from loraplex.core.plan import mask_width
from loraplex.core.ports import Constraint
from loraplex.engine import endings
from loraplex.engine.request_state import RequestRecord
from loraplex.engine.state import EngineState
from loraplex.engine.token_rules import TokenRules
from loraplex.schedule.select import Selection


class NoGrammars:
    """`core.ports.Grammars` of an engine that can hold no answer to one. reason: why not."""

    def __init__(self, reason: str = "the engine was given no grammars") -> None:
        self._reason = reason

    def open(self, grammar: str, own_ends: Sequence[int] = ()) -> Constraint | None:
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
        record.constraint = state.grammars.open(record.grammar, record.own_ends)
    except LoraplexError as error:
        endings.end(state, record, error=error)
    return record.constraint is not None


def masks_for(state: EngineState, selection: Selection) -> tuple[Selection, I32 | None]:
    """Masks of the selection's masked samples, and the selection without requests that have no way on."""
    masked = np.flatnonzero(state.table.masking(selection.slots) & selection.samples)
    if not masked.size:
        return selection, None
    records = [state.by_slot[int(selection.slots[index])] for index in masked.tolist()]
    masks, errors = _masks(state, records)
    stuck = np.array([error is not None for error in errors], dtype=np.bool_)
    if not stuck.any():
        return selection, masks
    for record, error in zip(records, errors, strict=True):
        if error is not None:
            endings.end(state, record, error=error)
    keep = np.ones(selection.slots.size, dtype=np.bool_)
    keep[masked[stuck]] = False
    return selection.keep(keep), masks[~stuck]


def _masks(state: EngineState, records: Sequence[RequestRecord]) -> tuple[I32, list[CallerError | None]]:
    """What grammar and rules together let each record's next token be, and why nothing, where that is so."""
    held = [record.constraint for record in records if record.constraint is not None]
    found, reasons = state.grammars.masks(held) if held else (empty(2), ())
    rows = iter(zip(found, reasons, strict=True))
    masks = np.empty((len(records), mask_width(state.limits.vocab_size)), dtype=np.int32)
    errors: list[CallerError | None] = []
    for mask, record in zip(masks, records, strict=True):
        mask[:], reason = next(rows) if record.constraint is not None else (-1, "")
        error = CallerError(ErrorCode.SCHEMA_UNSUPPORTED, reason) if reason else None
        if record.rules is not None and error is None:
            np.bitwise_and(mask, _rule_words(state, record, record.rules), out=mask)
            error = None if mask.any() else _nothing_left()
        errors.append(error)
    return masks, errors


def _rule_words(state: EngineState, record: RequestRecord, rules: TokenRules) -> I32:
    table, slot = state.table, record.slot
    return rules.words(int(table.outputs_planned[slot]), table.last_outputs(slot, rules.longest))


def _nothing_left() -> CallerError:
    return CallerError(
        ErrorCode.INVALID_SAMPLING,
        "no token is left that the answer could go on with: its form, allowed_token_ids, bad_words and "
        "min_tokens together forbid every one; loosen one of them",
    )


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
