"""Every field of a body is read by what carries it out, is refused, or says in its type that it has no
effect.

The types are watched while requests of every kind are answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest
from tests.server.rig import Front, run
from tests.text.tools.tool_cases import HERMES_TEMPLATE

from loraplex.core.neutral import NO_EFFECT, Unsupported
from loraplex.server.openapi import BODIES
from loraplex.server.wire import GenerationFields
from loraplex.text.chat_template import ChatTemplate

Field = tuple[str, str]
"""A type's name and a field's."""

SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "clock"}}
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]
ITEM_SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "integer"}}
STREAMED = {"stream": True, "stream_options": {}, "include": ["message.output_text.logprobs"]}
NAMED = {"type": "function", "name": "clock"}
FLAT = {**NAMED, "strict": True}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
]


def structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """A type of a body and the types inside it."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
        for field in msgspec.structs.fields(hint):
            yield from structs_in(field.type)
    for part in get_args(hint):
        yield from structs_in(part)


def needs_a_reader(hint: Any) -> bool:
    """Not what is refused, what is marked, and what can be one value alone."""
    if hint is Unsupported or (get_origin(hint) is Annotated and NO_EFFECT in get_args(hint)):
        return False
    return not (get_origin(hint) is Literal and len(get_args(hint)) == 1)


def fields_of(kinds: set[type[msgspec.Struct]]) -> set[Field]:
    return {
        (kind.__name__, field.name)
        for kind in kinds
        for field in msgspec.structs.fields(kind)
        if needs_a_reader(field.type)
    }


def watch(patch: pytest.MonkeyPatch, kinds: set[type[msgspec.Struct]]) -> set[Field]:
    """What is read of these types from now on."""
    read: set[Field] = set()

    def get(self: msgspec.Struct, name: str) -> Any:
        read.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    for kind in kinds:
        patch.setattr(kind, "__getattribute__", get, raising=False)
    return read


async def ask_for_everything(front: Front) -> None:
    assert front.codec is not None
    front.supervisor.info["max_model_len"] = 6000
    front.codec._template = ChatTemplate(HERMES_TEMPLATE, {})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    adapter = {"lora_name": "b", "lora_path": front.source("b")}
    one = "/v1/adapters/a"
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/completions", {"prompt": "hello"}),
        ("POST", "/v1/completions", {"prompt": "hello", "response_format": SCHEMA, **options}),
        ("POST", "/v1/completions", {"prompt": "hello", "structured_outputs": {"regex": "a"}}),
        ("POST", "/v1/chat/completions", {"messages": TALK, "tools": [TOOL], "logprobs": True}),
        ("POST", "/v1/chat/completions", {"messages": TALK, "tools": [TOOL], "tool_choice": TOOL}),
        ("POST", "/v1/responses", {"input": "hello", "text": {"format": ITEM_SCHEMA}, **STREAMED}),
        ("POST", "/v1/responses", {"input": ITEMS, "tools": [FLAT], "tool_choice": NAMED}),
        ("POST", "/tokenize", {"prompt": "hello"}),
        ("POST", "/tokenize", {"messages": TALK}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("PUT", one, {"source": front.source("a")}),
        ("POST", "/v1/load_lora_adapter", adapter),
        ("POST", "/v1/load_lora_adapter", {**adapter, "load_inplace": True}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "b"}),
        ("PUT", "/v1/limits", {"pool_share": 0.5}),
    ]
    assert {(method, path.replace(one, "/v1/adapters/{alias}")) for method, path, _ in asked} == set(BODIES)
    for method, path, body in asked:
        response = await front.http.request(method, path, json=body)
        assert response.is_success, (path, body, response.text)


def test_no_field_of_a_body_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind for body in BODIES.values() for kind in structs_in(body)}
    with monkeypatch.context() as patch:
        read = watch(patch, kinds)
        run(tmp_path, ask_for_everything)
    assert fields_of(kinds) - read == set()


def test_a_field_that_nobody_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planted(GenerationFields, frozen=True, kw_only=True):
        mood: str | None = None
        label: Annotated[str | None, NO_EFFECT] = None

    kinds = set(structs_in(list[Planted]))
    with monkeypatch.context() as patch:
        read = watch(patch, kinds)
        request = msgspec.json.decode(b'{"temperature": 1, "mood": "good"}', type=Planted)
        assert request.temperature == 1
    unread = {name for kind, name in fields_of(kinds) - read if kind == "Planted"}
    assert {"mood", "top_p"} <= unread
    assert not unread & {"label", "temperature", "user", "store"}
