"""Grammars of constrained output, through llguidance: JSON schemas become grammars, grammars become token
masks.

Clients make grammar text of a schema and have it checked (`schema_grammar`), which needs no tokenizer. The
engine's side (`GuidanceGrammars`, the `Grammars` port) compiles it in a thread that lets go of the
interpreter meanwhile, keeps what it compiled, and gives each request a copy of its own. Everything is
bounded: a grammar that outgrows its bounds ends its request, typed.

Specification: rulings "Sampling", rulings "Dependencies" (llguidance).
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.packed import I32
from loraplex.core.plan import mask_width
from loraplex.core.ports import Constraint
from loraplex.engine.constraints import NoGrammars

WHITESPACE: Final = r"( |\n {0,32}|\n\t{0,16})?"
"""Between JSON tokens: nothing, a space, or a new line with its indentation. Without an end to it, a model
that likes blanks never writes anything else.
"""
_OPTIONS: Final = {"whitespace_pattern": WHITESPACE, "coerce_one_of": False, "lenient": False}
_KEPT: Final = 64
"""Compiled grammars that are kept for the next request with the same schema."""
_MESSAGE_CHARS: Final = 200
_NO_TOKENIZER: Final = "no tokenizer"
"""How the library begins to say that it could not look token ids up."""


def _limits() -> LLParserLimits:
    """Fuel of the parser: what a mask may cost a step is a few milliseconds at the very worst."""
    return LLParserLimits(initial_lexer_fuel=400_000, step_lexer_fuel=60_000, verbose_errors=False)


def _refuse(reason: str) -> CallerError:
    line = re.sub(r"\s+", " ", reason.partition("<state>")[0]).strip()[:_MESSAGE_CHARS]
    return CallerError(
        ErrorCode.SCHEMA_UNSUPPORTED,
        f"the schema cannot be enforced exactly: {line}; simplify it",
        param="response_format",
    )


def schema_grammar(schema: dict[str, Any] | bool) -> str:
    """Grammar text for a decoded JSON schema. Raises `schema_unsupported` for what cannot be enforced; may
    take long.
    """
    if schema is False:
        raise _refuse("it permits nothing")
    schema = {} if schema is True else schema
    text = msgspec.json.encode(schema).decode()
    if len(text) > limits.MAX_SCHEMA_BYTES:
        raise _refuse(f"it has {len(text)} bytes, the limit is {limits.MAX_SCHEMA_BYTES}")
    check_keywords(schema)
    check_multiples(schema)
    text = msgspec.json.encode(plain(schema)).decode()
    try:
        grammar = str(LLMatcher.grammar_from_json_schema(text, overrides=cast("Any", _OPTIONS)))
    except ValueError as error:  # what its JSON reader refuses: values that are nested too deeply
        raise _refuse(str(error)) from error
    return checked_grammar(grammar)


def checked_grammar(grammar: str) -> str:
    """Grammar text that can be enforced as it is, or `schema_unsupported`. Token ids in it are not checked
    here.
    """
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    messages = [message for message in messages if not message.startswith(_NO_TOKENIZER)]
    if wrong or messages:
        raise _refuse("; ".join(messages))
    return grammar


def embedded_schema(schema: dict[str, Any]) -> str:
    """A checked schema as a grammar takes it in: its JSON text, read as `schema_grammar` reads it."""
    return msgspec.json.encode({**plain(schema), "x-guidance": _OPTIONS}).decode()


_ONE: Final = frozenset({"items", "additionalItems", "additionalProperties"})
_MANY: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_ENFORCED: Final = frozenset(
    {
        "type",
        "enum",
        "const",
        "$ref",
        "required",
        "minProperties",
        "maxProperties",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
    }
)
_SAYS_NOTHING: Final = frozenset(
    {
        "discriminator",
        "example",
        "contentMediaType",
        "contentEncoding",
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    }
)
"""Annotations of the standard, which constrain nothing."""
_OF_OTHERS: Final = frozenset({"discriminator", "example", "contentMediaType", "contentEncoding"})
"""Annotations that the library does not know as such."""
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats that are enforced; others are annotations, as the standard has them."""
_JOINING: Final = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
"""Keywords through which one value may have to satisfy several schemas."""


def check_keywords(schema: object, path: str = "$", depth: int = 0) -> None:
    """Raise `schema_unsupported` for a keyword that is neither enforced nor one of the standard's
    annotations.

    The library ignores keywords that it does not know, as the standard allows; whoever wrote one means
    something by it.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refuse(f"{path} holds {type(schema).__name__}, not a schema")
    if depth > limits.MAX_SCHEMA_DEPTH:
        raise _refuse(f"it is nested deeper than {limits.MAX_SCHEMA_DEPTH} levels")
    for keyword, value in schema.items():
        inside, parts = f"{path}.{keyword}", _parts(keyword, value)
        if parts is None and keyword not in _ENFORCED and keyword not in _SAYS_NOTHING:
            raise _refuse(f"{inside} is not a keyword that is enforced")
        for name, part in parts or ():
            check_keywords(part, inside + name, depth + 1)


def _parts(keyword: str, value: object) -> list[tuple[str, object]] | None:
    """(place, schema) of every schema directly under a keyword; None where the keyword holds none."""
    if keyword in _NAMED and isinstance(value, dict):
        return [(f".{name}", part) for name, part in value.items()]
    if (keyword in _MANY or keyword == "items") and isinstance(value, list):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if keyword in _ONE and isinstance(value, (dict, bool)):
        return [("", value)]
    return None


def with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A checked schema with `change` made to every schema directly under it."""
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            changed[keyword] = {name: change(part) for name, part in value.items()}
        elif _parts(keyword, value) is not None:
            changed[keyword] = [change(part) for part in value] if isinstance(value, list) else change(value)
    return changed


def plain(schema: Any) -> Any:
    """A checked schema in words that the library has: other formats are annotations, and `uuid4` is
    `uuid`.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {word: value for word, value in schema.items() if word not in _OF_OTHERS}
    form = kept.get("format")
    if form == "uuid4":
        kept["format"] = "uuid"
    elif isinstance(form, str) and form not in _FORMATS:
        del kept["format"]
    return with_parts(kept, plain)


def check_multiples(schema: object) -> None:
    """Raise `schema_unsupported` for a `multipleOf` whose automaton would not end being built.

    Its states are as many as the number has units, and those of numbers that hold together as many as their
    least common multiple has: the library's fuel does not count them, and building them holds up everybody's
    grammars and the memory of the engine. Takes all numbers of a schema as one group where anything in it
    joins schemas.
    """
    found: list[Decimal] = []
    joined = _collect_multiples(schema, found)
    units = [abs(number).normalize().as_tuple() for number in found if number.is_finite() and number]
    finest = min((int(unit.exponent) for unit in units), default=0) if joined else None
    whole = [
        int("".join(map(str, unit.digits))) * (1 if finest is None else 10 ** (int(unit.exponent) - finest))
        for unit in units
    ]
    largest = 0
    for number in whole:
        largest = math.lcm(largest or 1, number) if joined else max(largest, number)
        if largest > limits.MAX_SCHEMA_MULTIPLE:
            break  # the multiple of thousands of long numbers would take minutes
    if largest > limits.MAX_SCHEMA_MULTIPLE:
        raise _refuse(
            f"its multipleOf {'numbers together have' if len(whole) > 1 else 'has'} more than "
            f"{limits.MAX_SCHEMA_MULTIPLE} units"
        )


def _collect_multiples(schema: object, found: list[Decimal]) -> bool:
    """Add every `multipleOf` number inside a checked schema to `found`; whether something in it joins
    schemas.
    """
    if not isinstance(schema, dict):
        return False
    joined = not _JOINING.isdisjoint(schema)
    for keyword, value in schema.items():
        if keyword == "multipleOf" and isinstance(value, (int, float)):
            found.append(Decimal(repr(value)) if not isinstance(value, bool) else Decimal(1))
        for _, part in _parts(keyword, value) or ():
            joined |= _collect_multiples(part, found)
    return joined


class GuidedConstraint:
    """`core.ports.Constraint`: one request's way through a grammar. end: an end token that the grammar knows;
    own_ends count as it.
    """

    def __init__(self, matcher: LLMatcher, end: int, own_ends: Sequence[int]) -> None:
        self.matcher = matcher
        self._end, self._own_ends = end, own_ends

    def accept(self, token: int) -> bool:
        """Move on; whether nothing may follow. Raises `schema_unsupported` when the grammar outgrew its
        bounds.
        """
        known = self._end if token in self._own_ends else token
        if not self.matcher.consume_token(known):
            raise _refuse(f"it became too complex ({self.matcher.get_error()})")
        return bool(self.matcher.is_stopped())

    def add_ends(self, mask: I32) -> None:
        """Let the request's own ends stand in a mask where the grammar may end, and nowhere else."""
        words = mask.view(np.uint32)
        may_end = bool(words[self._end >> 5] >> np.uint32(self._end & 31) & 1)
        for token in self._own_ends:
            words[token >> 5] &= ~np.uint32(1 << (token & 31))
            words[token >> 5] |= np.uint32(may_end << (token & 31))


def _why_stuck(matcher: LLMatcher, mask: I32) -> str:
    """Why an output cannot go on; empty where it can.

    The library lets an output end where nothing can follow, even one that is not complete: that is no answer.
    """
    dead_end = "NoExtension" in (matcher.get_error() or matcher.stop_reason())
    if not mask.any() or (dead_end and not matcher.is_accepting()):
        return _refuse("no answer exists that the model's tokens can spell").message
    if matcher.is_error():
        return _refuse(f"it became too complex ({matcher.get_error()})").message
    return ""


class GuidanceGrammars:
    """`core.ports.Grammars` over a model's tokenizer."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, end: int) -> None:
        """vocab_size: columns of the logits, which masks span. end: one of the tokenizer's end tokens."""
        self._tokenizer, self._end = tokenizer, end
        self._width = mask_width(vocab_size)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._executor = LLExecutor()

    def open(self, grammar: str, own_ends: Sequence[int] = ()) -> Constraint | None:
        """A constraint at its beginning; None while its grammar is being compiled."""
        known = self._compiled.get(grammar)
        if known is None:
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            return None
        self._compiled.move_to_end(grammar)
        if not known.done():
            return None
        matcher = known.result()
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)[1].cancel()
        if matcher.is_error():
            raise _refuse(matcher.get_error())
        return GuidedConstraint(matcher.deep_copy(), self._end, own_ends)

    def _compile(self, grammar: str) -> LLMatcher:
        """The grammar at its beginning, in the thread of its own.

        The first mask is taken here: the library makes most of an automaton when it is first asked for a
        mask, which may take most of a second, and keeps it for every copy; in a step everybody would wait for
        it.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            fill_next_token_bitmask(matcher.deep_copy(), np.zeros((1, self._width), dtype=np.int32))
        return matcher

    def masks(self, constraints: Sequence[Constraint]) -> tuple[I32, Sequence[str]]:
        """One mask a constraint, computed side by side without the interpreter."""
        masks = np.zeros((len(constraints), self._width), dtype=np.int32)
        held = [self._guided(constraint) for constraint in constraints]
        if len(held) == 1:
            fill_next_token_bitmask(held[0].matcher, masks)
        else:
            rows = [(constraint.matcher, index) for index, constraint in enumerate(held)]
            fill_next_token_bitmask_par(self._executor, rows, masks)
        for constraint, mask in zip(held, masks, strict=True):
            constraint.add_ends(mask)
        return masks, [_why_stuck(own.matcher, mask) for own, mask in zip(held, masks, strict=True)]

    @staticmethod
    def _guided(constraint: Constraint) -> GuidedConstraint:
        if not isinstance(constraint, GuidedConstraint):
            raise InternalFault(ErrorCode.INTERNAL, "a constraint came back that was not made here")
        return constraint

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def load_grammars(
    folder: Path, vocab_size: int, eos_token_ids: Iterable[int]
) -> GuidanceGrammars | NoGrammars:
    """The grammars of the model in `folder`; ones that refuse with the reason where there can be none."""
    path, ends = folder / "tokenizer.json", sorted(eos_token_ids)
    if not path.is_file():
        return NoGrammars("the model has no tokenizer")
    if not ends:
        return NoGrammars("the model names no end-of-sequence token")
    try:
        tokenizer = LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=ends)
    except Exception as error:  # noqa: BLE001 - whatever it is, the base is served without grammars
        return NoGrammars(f"llguidance cannot read the tokenizer: {error}")
    return GuidanceGrammars(tokenizer, vocab_size, ends[0])
