"""Null means the default, for every field of every body that callers send; only what is required has none."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.server.rig import BASE, Front, run

from loraplex.core.neutral import NEUTRAL, Unread, Unsupported, refuse_unsupported
from loraplex.server import responses_wire, structured_wire, wire
from loraplex.text import conversation

QUERIES = {"ListAdapters"}
"""Decoded from a query, which has no null."""


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every wire type by its name."""
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": kind
        for module in (wire, conversation, responses_wire, structured_wire)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }


def required(kind: Any) -> Any:
    """The least value of a type that its decoder takes."""
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        tag = (
            {kind.__struct_config__.tag_field: kind.__struct_config__.tag}
            if kind.__struct_config__.tag
            else {}
        )
        return tag | {field.encode_name: required(field.type) for field in fields if field.required}
    for part in (kind, *get_args(kind)):
        for value in ("text", "function", "user", "input_text", "x", [], {}, 1):
            try:
                msgspec.convert(value, part)
            except (msgspec.ValidationError, TypeError):
                continue
            return value
    raise AssertionError(f"no value for {kind}")


@pytest.mark.parametrize("name", sorted(structs()))
def test_a_field_is_required_or_takes_null(name: str) -> None:
    kind = structs()[name]
    if kind.__name__ in QUERIES:
        return
    least = required(kind)
    for field in msgspec.structs.fields(kind):
        body = msgspec.json.encode(least | {field.encode_name: None})
        if field.required:
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(body, type=kind)
            continue
        value = msgspec.json.decode(body, type=kind)
        refuse_unsupported(value)
        default = msgspec.json.decode(msgspec.json.encode(least), type=kind)
        if field.type not in (Unsupported, Unread):
            assert getattr(value, field.name) == getattr(default, field.name), field.name


def test_the_table_of_values_names_fields_that_there_are() -> None:
    known = {
        field.name
        for kind in structs().values()
        for field in msgspec.structs.fields(kind)
        if field.type is Unsupported
    }
    assert set(NEUTRAL) <= known


def test_bodies_full_of_nulls_are_answered(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for ask, kind, limit in (
            (front.complete, wire.CompletionRequest, "max_tokens"),
            (front.chat, wire.ChatRequest, "max_tokens"),
            (front.respond, responses_wire.ResponsesRequest, "max_output_tokens"),
        ):
            nulls = {f.name: None for f in msgspec.structs.fields(kind) if not f.required}
            response = await ask(**{**nulls, "model": BASE, limit: 3})
            assert response.status_code == 200, response.text
            for name, values in NEUTRAL.items():
                if name in nulls:
                    for value in values:
                        same = await ask(**{name: value})
                        assert same.status_code == 200, (name, same.text)

    run(tmp_path, test)
