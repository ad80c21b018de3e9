"""Llama 3: an answer that is a JSON object is a call, and so is one behind the token `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loraplex.text.tools.call_grammar import RULES, Asked, Vocabulary, call_schema, definitions
from loraplex.text.tools.call_parser import CallMarks
from loraplex.text.tools.objects import object_rules
from loraplex.text.tools.tool_format import ToolFormat, call_object, signatures
from loraplex.text.tools.tool_types import Tool

BEGIN: Final = "<|python_tag|>"
BETWEEN: Final = "/ ?; ?/"


class Llama3(ToolFormat):
    """`{"name": ..., "parameters": {...}}`, several with `;` between them."""

    name = "llama3"
    marks = CallMarks(BEGIN, leading=True, between=";", arguments_keys=("parameters", "arguments"))
    holds_answers = False

    def grammar(self, asked: Asked, embed: Callable[[dict[str, Any]], str], vocabulary: Vocabulary) -> str:
        """Text that does not begin as an object, or calls."""
        schema = {**call_schema(asked.tools, "parameters"), **definitions(asked.tools)}
        return f"{RULES}{object_rules(asked, BETWEEN, BEGIN, vocabulary)}call: %json {embed(schema)}\n"

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Objects with their separator."""
        return "; ".join(call_object(call, "parameters") for call in calls)

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Signatures and the form of a call."""
        return (
            f"These functions can be called, one JSON object each:\n{signatures(tools)}\n"
            'To call one, answer with nothing but a JSON object: {"name": "function", "parameters": {}}'
        )


FORMAT: Final = Llama3()
