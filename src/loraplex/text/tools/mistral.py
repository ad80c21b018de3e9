"""Mistral: the token `[TOOL_CALLS]`, then a JSON list of calls that ends the answer."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loraplex.text.tools.call_grammar import RULES, Asked, Vocabulary, call_schema, definitions, opening, said
from loraplex.text.tools.call_parser import CallMarks
from loraplex.text.tools.tool_format import ToolFormat, signatures
from loraplex.text.tools.tool_types import Message, Tool

BEGIN: Final = "[TOOL_CALLS]"
_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_ID_BYTES: Final = 5


class Mistral(ToolFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`."""

    name = "mistral"
    marks = CallMarks(BEGIN, head="[", between=",", end="]")

    def grammar(self, asked: Asked, embed: Callable[[dict[str, Any]], str], vocabulary: Vocabulary) -> str:
        """Text, and where the mark appears a list of calls behind it."""
        schema: dict[str, Any] = {
            "type": "array",
            "items": call_schema(asked.tools, "arguments"),
            "minItems": 1,
        }
        if asked.single:
            schema["maxItems"] = 1
        if asked.required:
            start = "start: calls\n"
        elif asked.answer is not None:
            start = f"start: answer | calls\nanswer: %json {asked.answer}\n"
        else:
            rule, before = said(vocabulary, self.marks.texts)
            start = f"start: {before}TEXT | {before}calls\n{rule}"
        at_once = asked.required or asked.answer is not None
        return (
            f"{RULES}{start}{opening(BEGIN, vocabulary, at_once=at_once)}"
            f"calls: opened ws? list\nlist: %json {embed({**schema, **definitions(asked.tools)})}\n"
        )

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """All calls as one list."""
        listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        return f"{BEGIN} {json.dumps(listed, ensure_ascii=False)}"

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Signatures and the form of a call."""
        return (
            f"These functions can be called, one JSON object each:\n{signatures(tools)}\n"
            f'To call some of them, answer with {BEGIN} and a JSON list: {BEGIN} [{{"name": "function", '
            f'"arguments": {{}}}}]'
        )

    def new_id(self) -> str:
        """Nine letters and digits: the form's templates take no other."""
        return secrets.token_hex(_ID_BYTES)[:9]

    def history(self, messages: Sequence[Message]) -> list[Message]:
        """Ids of other forms become ones that the templates take, the same one for the same id."""
        return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: Message) -> Message:
    short = dict(message)
    if "tool_call_id" in short:
        short["tool_call_id"] = _short(short["tool_call_id"])
    if "tool_calls" in short:
        short["tool_calls"] = [{**call, "id": _short(call.get("id", ""))} for call in short["tool_calls"]]
    return short


def _short(call_id: str) -> str:
    return call_id if _ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


FORMAT: Final = Mistral()
