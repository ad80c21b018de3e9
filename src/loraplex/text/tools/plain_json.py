"""Plain JSON, for models that were not trained on another form: an answer that is a JSON object is a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loraplex.text.tools.call_grammar import RULES, Asked, Vocabulary, call_schema, definitions
from loraplex.text.tools.call_parser import CallMarks
from loraplex.text.tools.objects import object_rules
from loraplex.text.tools.tool_format import ToolFormat, call_object, signatures
from loraplex.text.tools.tool_types import Tool

BETWEEN: Final = r"/ ?\n ?/"


class PlainJson(ToolFormat):
    """`{"name": ..., "arguments": {...}}`, one a line."""

    name = "json"
    marks = CallMarks("", leading=True)
    holds_answers = False

    def grammar(self, asked: Asked, embed: Callable[[dict[str, Any]], str], vocabulary: Vocabulary) -> str:
        """Text that does not begin as an object, or calls."""
        schema = {**call_schema(asked.tools, "arguments"), **definitions(asked.tools)}
        return f"{RULES}{object_rules(asked, BETWEEN, '', vocabulary)}call: %json {embed(schema)}\n"

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """One object a line."""
        return "\n".join(map(call_object, calls))

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Signatures and the form of a call."""
        return (
            f"These functions can be called, one JSON object each:\n{signatures(tools)}\n"
            "To call one, answer with nothing but a JSON object that has the function's name and its "
            "arguments: "
            '{"name": "function", "arguments": {}}. Several calls take a line each.'
        )

    def result_text(self, content: str) -> str:
        """A sentence in front of what came back."""
        return f"The function returned:\n{content}"


FORMAT: Final = PlainJson()
