"""Regular expressions that strangers wrote, matched in time that is bounded by their length.

Python's own matcher backtracks, so a pattern in a configuration could occupy a loader for hours. Here the
pattern is parsed by Python's parser, so it means the same, and run by following sets of positions: no choice
is tried twice, and the work is at most nodes x length^2. All patterns of a configuration share one budget of
steps. What needs backtracking to be right (references to groups, atomic groups) or changes case is refused.
"""

from __future__ import annotations

import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from loraplex.artifact.refuse import bad_config
from loraplex.core.limits import MAX_PATTERN_STEPS

MAX_PATTERN_CHARS: Final = 16_384
_ONE_CHARACTER: Final = frozenset({op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN})
_REFUSED_FLAGS: Final = re.IGNORECASE | re.LOCALE
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.]+")
Positions = frozenset[int]
Node = tuple[Any, Any]


class PatternError(ValueError):
    """The pattern is not a regular expression, or uses what is not read here; the message says which."""


@dataclass(slots=True)
class StepBudget:
    """Steps that matching may still take; a step follows one position over one node of a pattern."""

    left: int = MAX_PATTERN_STEPS

    def spend(self, steps: int) -> None:
        """Raise `adapter_config_invalid` when the budget is used up."""
        self.left -= steps
        if self.left < 0:
            raise bad_config(
                "",
                f"the patterns of the configuration take more than {MAX_PATTERN_STEPS} steps to match; name "
                "the "
                "modules instead",
            )


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. fixed: length of every match where each node is one character, else None."""

    text: str
    nodes: tuple[Node, ...]
    fixed: int | None

    def fullmatch(self, name: str, work: StepBudget) -> bool:
        """Whether the whole of `name` matches."""
        return self.reaches_end(name, (0,), work)

    def reaches_end(self, name: str, starts: Sequence[int], work: StepBudget) -> bool:
        """Whether a match that begins at one of `starts` ends where `name` ends."""
        if self.fixed is not None:
            start = len(name) - self.fixed
            if start not in starts:
                return False
            starts = (start,)
        return len(name) in _sequence(self.nodes, name, frozenset(starts), work)


def is_plain(text: str) -> bool:
    """Whether a pattern is words and dots alone, as the names are that PEFT writes."""
    return _PLAIN.fullmatch(text) is not None


def compile_pattern(text: str) -> Pattern:
    """Parse `text` as Python would; raises `PatternError`."""
    if len(text) > MAX_PATTERN_CHARS:
        raise PatternError(f"it has {len(text)} characters, at most {MAX_PATTERN_CHARS} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # "[[a]" warns of a future meaning; ours is today's
            tree = parser.parse(text)
        if tree.state.flags & _REFUSED_FLAGS:
            raise PatternError("it ignores case, which is not read here")
        nodes = tuple(tree)
        _check(nodes)
    except (re.error, OverflowError, ValueError) as error:
        raise PatternError(str(error)) from None
    except RecursionError:
        raise PatternError("it nests too deep") from None
    fixed = len(nodes) if all(code in _ONE_CHARACTER for code, _ in nodes) else None
    return Pattern(text, nodes, fixed)


def _check(nodes: Iterable[Node]) -> None:
    """Every operation is one that is read here."""
    for code, argument in nodes:
        for child in _children(code, argument):
            _check(child)


def _children(code: Any, argument: Any) -> list[Any]:
    if code in _ONE_CHARACTER or code is op.AT:
        return []
    if code is op.BRANCH:
        return list(argument[1])
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        return [argument[2]]
    if code is op.SUBPATTERN:
        if argument[1] & _REFUSED_FLAGS:
            raise PatternError("it ignores case, which is not read here")
        return [argument[3]]
    if code in (op.ASSERT, op.ASSERT_NOT):
        return [argument[1]]
    raise PatternError(f"it uses {str(code).lower()}, which is not read here")


def _sequence(nodes: Iterable[Node], name: str, starts: Positions, work: StepBudget) -> Positions:
    for code, argument in nodes:
        if not starts:
            break
        starts = _step(code, argument, name, starts, work)
    return starts


def _step(code: Any, argument: Any, name: str, starts: Positions, work: StepBudget) -> Positions:
    work.spend(len(starts) * (len(argument) if code is op.IN else 1))
    if code is op.BRANCH:
        work.spend(len(argument[1]))
        return frozenset().union(*(_sequence(branch, name, starts, work) for branch in argument[1]))
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        return _repeat(argument, name, starts, work)
    if code is op.SUBPATTERN:
        return _sequence(argument[3], name, starts, work)
    if code is op.AT:
        return frozenset(i for i in starts if _anchor(argument, name, i))
    if code in (op.ASSERT, op.ASSERT_NOT):
        wanted = code is op.ASSERT
        return frozenset(i for i in starts if _looks(argument, name, i, work) is wanted)
    return frozenset(i + 1 for i in starts if i < len(name) and _character(code, argument, name[i]))


def _repeat(argument: Any, name: str, starts: Positions, work: StepBudget) -> Positions:
    """Positions after `low` to `high` rounds; sets stop changing after len(name) + 1 rounds at the latest."""
    low, high, body = argument
    at = starts
    rounds = 0
    while rounds < low:
        after = _sequence(body, name, at, work)
        rounds += 1
        if after == at:
            break
        at = after
    reached = at
    while at and (high is op.MAXREPEAT or rounds < high):
        at = _sequence(body, name, at, work) - reached
        reached |= at
        rounds += 1
    return reached


def _anchor(kind: Any, name: str, at: int) -> bool:
    if kind in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        return at == 0
    if kind in (op.AT_END, op.AT_END_STRING):
        return at == len(name)
    before = at > 0 and _word(name[at - 1])
    after = at < len(name) and _word(name[at])
    return (before != after) is (kind is op.AT_BOUNDARY)


def _looks(argument: Any, name: str, at: int, work: StepBudget) -> bool:
    """Whether a look-ahead or look-behind matches at `at`."""
    direction, body = argument
    if direction > 0:
        return bool(_sequence(body, name, frozenset({at}), work))
    return at in _sequence(body, name, frozenset(range(at + 1)), work)


def _character(code: Any, argument: Any, char: str) -> bool:
    if code is op.ANY:
        return char != "\n"
    if code is op.LITERAL:
        return ord(char) == argument
    if code is op.NOT_LITERAL:
        return ord(char) != argument
    return _in_class(argument, char)


def _in_class(items: Iterable[Node], char: str) -> bool:
    negate = False
    hit = False
    for code, argument in items:
        if code is op.NEGATE:
            negate = True
        elif code is op.LITERAL:
            hit = hit or ord(char) == argument
        elif code is op.RANGE:
            hit = hit or argument[0] <= ord(char) <= argument[1]
        else:
            hit = hit or _CATEGORIES[str(argument)](char)
    return hit is not negate


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: Final[dict[str, Callable[[str], bool]]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_WORD": _word,
    "CATEGORY_NOT_WORD": lambda char: not _word(char),
}
