"""Words of a schema that constrain nothing are annotations; the rest of the schema holds as without them."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.text.grammars import schema_grammar

UNION = [
    {
        "type": "object",
        "properties": {"kind": {"const": word}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    for word in ("a", "b")
]
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"oneOf": UNION, "discriminator": {"propertyName": "kind"}}, {"oneOf": UNION}),
    ({"type": "string", "example": "x", "contentMediaType": "text/plain"}, {"type": "string"}),
    ({"type": "string", "format": "uuid4"}, {"type": "string", "format": "uuid"}),
    ({"type": "string", "format": "no-such-format"}, {"type": "string"}),
    ({"items": {"type": "integer", "format": "int64", "example": 3}}, {"items": {"type": "integer"}}),
    (
        {"type": "object", "properties": {"example": {"type": "string", "format": "password"}}},
        {"type": "object", "properties": {"example": {"type": "string"}}},
    ),
]


@pytest.mark.parametrize(("annotated", "bare"), PAIRS)
def test_an_annotation_changes_nothing(annotated: dict[str, Any], bare: dict[str, Any]) -> None:
    assert schema_grammar(annotated) == schema_grammar(bare)
    assert schema_grammar({"type": "string", "format": "uuid"}) != schema_grammar({"type": "string"})
