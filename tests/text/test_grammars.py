"""Schemas to grammars to masks: what is enforced, what is refused by name, and what bounds the cost."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from tests.text.tiny_text import byte_tokenizer, metaspace_tokenizer, write_folder

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.ports import Constraint
from loraplex.engine.constraints import NoGrammars
from loraplex.text import grammars
from loraplex.text.grammars import GuidanceGrammars, check_multiples, load_grammars, schema_grammar

VOCAB, EOS = 300, 1
PERSON: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-c]{1,3}$"}},
}


@pytest.fixture
def made(tmp_path: Path) -> GuidanceGrammars:
    found = load_grammars(write_folder(tmp_path, byte_tokenizer()), VOCAB, [EOS, 2])
    assert isinstance(found, GuidanceGrammars)
    return found


def opened(made: GuidanceGrammars, grammar: str, own_ends: tuple[int, ...] = ()) -> Constraint:
    """The constraint, once it is compiled."""
    constraint = made.open(grammar, own_ends)
    while constraint is None:
        made._compiled[grammar].result()
        constraint = made.open(grammar, own_ends)
    return constraint


def walk(
    made: GuidanceGrammars, schema: dict[str, Any] | bool, seed: int, most: int = 400
) -> tuple[str, bool]:
    """Text of a random walk through the masks, and whether the grammar said that it is complete."""
    rng, constraint, text = np.random.default_rng(seed), opened(made, schema_grammar(schema)), b""
    tokenizer = byte_tokenizer()
    for _ in range(most):
        masks, reasons = made.masks([constraint])
        assert reasons == [""]
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        assert allowed.max() < tokenizer.get_vocab_size()
        # The ends of things come more often than chance would have it, or strings never end.
        ends = [
            t for t in allowed.tolist() if t == EOS or (tokenizer.id_to_token(t) or "") in ('"', "}", "]")
        ]
        token = int(rng.choice(ends if ends and rng.random() < 0.3 else allowed))
        complete = constraint.accept(token)
        if token not in (EOS, 2):
            text += tokenizer_bytes(tokenizer.id_to_token(token))
        if complete:
            return text.decode("utf-8", "replace"), True
    return text.decode("utf-8", "replace"), False


def tokenizer_bytes(piece: str) -> bytes:
    from loraplex.text.codec import _BYTE_OF

    return bytes(_BYTE_OF[character] for character in piece)


@pytest.mark.parametrize("seed", range(8))
def test_what_the_masks_let_through_is_what_the_schema_says(made: GuidanceGrammars, seed: int) -> None:
    text, complete = walk(made, PERSON, seed)
    assert complete, text
    value = json.loads(text)
    assert set(value) <= {"name", "age", "kind", "tags"}
    assert isinstance(value["name"], str)
    assert 1 <= len(value["name"]) <= 6
    assert 0 <= value["age"] <= 120
    assert value["kind"] in ("a", "b", None)
    assert all(set(tag) <= set("abc") and 1 <= len(tag) <= 3 for tag in value.get("tags", []))


def test_an_end_token_of_an_adapter_stands_where_the_models_own_may(made: GuidanceGrammars) -> None:
    """Whatever it is elsewhere: one that is text to others ends nothing halfway."""
    tokenizer, grammar = byte_tokenizer(), schema_grammar({"type": "integer"})
    seven, eight = tokenizer.token_to_id("7"), tokenizer.token_to_id("8")
    for own in (eight, VOCAB - 1):
        base, adapted = opened(made, grammar), opened(made, grammar, (own,))
        for constraint in (base, adapted):
            assert not constraint.accept(seven)
        masks, reasons = made.masks([base, adapted])
        assert list(reasons) == ["", ""]
        allowed = [
            set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))) for mask in masks
        ]
        assert allowed[1] == allowed[0] | {own}
        assert adapted.accept(own)
        start, _ = made.masks([opened(made, grammar, (own,))])
        assert not start[0, own >> 5] >> (own & 31) & 1


def test_an_object_ends_with_its_brace_and_a_number_with_the_end_token(made: GuidanceGrammars) -> None:
    tokenizer = byte_tokenizer()
    constraint = opened(made, schema_grammar({"type": "object"}))
    ids = tokenizer.encode('{"a": [1, {"b": null}]}', add_special_tokens=False).ids
    assert [constraint.accept(token) for token in ids] == [False] * (len(ids) - 1) + [True]
    number = opened(made, schema_grammar({"type": "integer"}))
    assert not number.accept(tokenizer.token_to_id("7"))
    masks, _ = made.masks([number])
    assert masks[0, 0] >> EOS & 1
    assert masks[0, 0] >> 2 & 1, "every end-of-sequence token ends it"
    assert number.accept(EOS)


def test_blanks_end(made: GuidanceGrammars) -> None:
    constraint = opened(made, schema_grammar({"type": "object"}))
    tokenizer = byte_tokenizer()
    constraint.accept(tokenizer.token_to_id("{"))
    space, line, tab = (tokenizer.token_to_id(character) for character in ("Ġ", "Ċ", "ĉ"))
    taken = []
    for _ in range(200):
        masks, _ = made.masks([constraint])
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        more = [token for token in (line, space, tab) if bits[token]]
        if not more:
            break
        taken.append(more[0])
        constraint.accept(more[0])
    assert taken == [line] + [space] * 32


def nested(levels: int) -> Any:
    """Lists in lists: a value, not a schema, so that its depth is the JSON reader's to refuse."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


REFUSED: list[tuple[dict[str, Any] | bool, str]] = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {}, "then": {}}, "if"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}, "oneOf"),
    ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
    ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
    ({"enum": []}, "empty"),
    ({"type": "thing"}, "thing"),
    ({"$ref": "http://127.0.0.1:1/schema"}, "127.0.0.1"),
    ({"$ref": "file:///etc/hostname"}, "hostname"),
    ({"type": "string", "nullable": True}, "$.nullable"),
    ({"type": "object", "properties": {"a": {"foo": 1}}}, "$.properties.a.foo"),
    ({"anyOf": [{"x-guidance": {"lenient": True}}]}, "$.anyOf[0].x-guidance"),
    ({"x-guidance": {"lenient": True}, "type": "object"}, "$.x-guidance"),
    ({"type": "array", "items": "string"}, "$.items"),
    ({"properties": []}, "$.properties"),
    ({"allOf": {"type": "string"}}, "$.allOf"),
    ({"enum": ["x" * limits.MAX_SCHEMA_BYTES]}, "bytes"),
    (False, "nothing"),
    ({"const": nested(300)}, "recursion"),
    ({"type": "integer", "multipleOf": 100_003}, "multipleOf"),
    ({"type": "number", "multipleOf": 1000.03}, "multipleOf"),
    ({"type": "integer", "multipleOf": int("7" * 4000)}, "multipleOf"),
    ({"allOf": [{"multipleOf": p} for p in (997, 991)]}, "multipleOf"),
    ({"multipleOf": 997, "anyOf": [{"multipleOf": 991}]}, "multipleOf"),
    ({"multipleOf": 997, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 991}}}, "multipleOf"),
    ({"allOf": [{"multipleOf": 1e308}, {"multipleOf": 5e-324}]}, "multipleOf"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any] | bool, named: str) -> None:
    with pytest.raises(CallerError) as refused:
        schema_grammar(schema)
    assert refused.value.code is ErrorCode.SCHEMA_UNSUPPORTED
    assert refused.value.param == "response_format"
    assert named in refused.value.message
    assert "\n" not in refused.value.message


MULTIPLES: list[tuple[dict[str, Any] | bool, str]] = [
    (True, "null"),
    ({"type": "integer", "multipleOf": 7}, "7"),
    ({"type": "integer", "multipleOf": 3_000_000}, "3000000"),
    ({"type": "number", "multipleOf": 0.01}, "0.25"),
    ({"allOf": [{"type": "integer"}, {"multipleOf": 12}, {"multipleOf": 20}]}, "120"),
    ({"properties": {p: {"type": "integer", "multipleOf": int(p)} for p in ("9973", "9967")}}, "{}"),
]


@pytest.mark.parametrize(("schema", "answer"), MULTIPLES, ids=[answer for _, answer in MULTIPLES])
def test_what_is_bounded_is_still_enforced(
    made: GuidanceGrammars, schema: dict[str, Any] | bool, answer: str
) -> None:
    constraint, vocabulary = opened(made, schema_grammar(schema)), byte_tokenizer().get_vocab()
    for letter in answer:
        constraint.accept(vocabulary[letter])
    masks, _ = made.masks([constraint])
    assert np.unpackbits(masks.view(np.uint8), bitorder="little")[EOS]


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(limits.MAX_SCHEMA_DEPTH):
        schema = {"type": "array", "items": schema}
    schema_grammar(schema)
    with pytest.raises(CallerError, match="deeper"):
        schema_grammar({"type": "array", "items": schema})


def test_a_schema_without_any_answer_is_found_at_its_first_mask(made: GuidanceGrammars) -> None:
    constraint = opened(made, schema_grammar({"$ref": "#"}))
    _, reasons = made.masks([constraint])
    assert reasons[0].startswith("the schema cannot be enforced exactly: no answer exists")


def test_a_grammar_that_outgrows_its_bounds_ends_typed(
    made: GuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_limits", lambda: LLParserLimits(step_lexer_fuel=300))
    letters = [{"type": "string", "pattern": f".*{c}.*{c}.*{c}.*"} for c in "abcdefghijklmnop"]
    constraint = opened(made, schema_grammar({"type": "array", "items": {"anyOf": letters}}))
    tokenizer = byte_tokenizer()
    reason = ""
    for piece in '["abcdefghijklmnopabcdefghijklmnop':
        _, reasons = made.masks([constraint])
        if reasons[0]:
            reason = reasons[0]
            break
        constraint.accept(tokenizer.token_to_id(piece))
    assert "too complex" in reason
    assert "\n" not in reason


def test_the_first_mask_is_taken_before_anybody_waits_for_it(
    made: GuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    fill = grammars.fill_next_token_bitmask

    def seen(matcher: Any, masks: Any) -> None:
        threads.append(threading.current_thread().name)
        fill(matcher, masks)

    monkeypatch.setattr(grammars, "fill_next_token_bitmask", seen)
    costly = {"type": "string", "pattern": "^((((a{50}){50}){50}){50})$"}
    constraint = opened(made, schema_grammar(costly))
    assert [name.startswith("grammars") for name in threads] == [True]
    made.masks([constraint])
    assert [name.startswith("grammars") for name in threads] == [True, False]


def test_requests_have_their_own_place_in_a_shared_grammar(
    made: GuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_KEPT", 2)
    text = schema_grammar({"type": "object"})
    assert made.open(text) is None
    one, two = opened(made, text), opened(made, text)
    one.accept(byte_tokenizer().token_to_id("{"))
    masks, reasons = made.masks([one, two])
    assert reasons == ["", ""]
    assert not np.array_equal(masks[0], masks[1])
    assert np.array_equal(made.masks([two])[0][0], masks[1])
    for size in range(1, 4):
        opened(made, schema_grammar({"type": "string", "maxLength": size}))
    assert len(made._compiled) == 2


def test_models_that_can_hold_no_answer_say_why(tmp_path: Path) -> None:
    none = load_grammars(tmp_path, VOCAB, [EOS])
    folder = write_folder(tmp_path, byte_tokenizer())
    endless = load_grammars(folder, VOCAB, [])
    small = load_grammars(folder, 5, [EOS])
    for found, why in ((none, "no tokenizer"), (endless, "no end-of-sequence token"), (small, "llguidance")):
        assert isinstance(found, NoGrammars)
        with pytest.raises(CallerError, match=why) as refused:
            found.open("x")
        assert refused.value.code is ErrorCode.UNSUPPORTED_OPTION


def test_a_sentencepiece_like_tokenizer_is_read_too(tmp_path: Path) -> None:
    found = load_grammars(write_folder(tmp_path, metaspace_tokenizer()), VOCAB, [2])
    assert isinstance(found, GuidanceGrammars)
    masks, reasons = found.masks([opened(found, schema_grammar({"type": "object"}))])
    assert reasons == [""]
    assert masks.any()


def test_the_multiple_of_many_long_numbers_is_refused_before_it_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest: list[int] = []
    real = math.lcm

    def counting(*numbers: int) -> int:
        longest.append(max(numbers).bit_length())
        return real(*numbers)

    monkeypatch.setattr(math, "lcm", counting)
    numbers = [{"multipleOf": (10**17 + 2 * index + 1) * 10.0**100} for index in range(500)]
    with pytest.raises(CallerError) as raised:
        check_multiples({"anyOf": numbers})
    assert raised.value.code is ErrorCode.SCHEMA_UNSUPPORTED
    assert max(longest) < 1024
