"""Hermes and Qwen: each call is a JSON object between `<tool_call>` and `</tool_call>`, with text
around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loraplex.text.tools.call_grammar import (
    RULES,
    Asked,
    Vocabulary,
    call_schema,
    definitions,
    mark,
    opening,
    said,
)
from loraplex.text.tools.call_parser import CallMarks
from loraplex.text.tools.tool_format import ToolFormat, call_object, signatures
from loraplex.text.tools.tool_types import Tool

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    name = "hermes"
    marks = CallMarks(BEGIN, end=END)

    def grammar(self, asked: Asked, embed: Callable[[dict[str, Any]], str], vocabulary: Vocabulary) -> str:
        """Text until a call begins; the call; then text again, or nothing where there is to be one call."""
        at_once = asked.required or asked.answer is not None
        calls = "tool" if asked.single else "tool (ws? tool)*"
        if asked.answer is not None and not asked.required:
            start = f"start: answer | {calls}\nanswer: %json {asked.answer}\n"
        elif asked.required:
            start = f"start: {calls}\n"
        else:
            rule, before = said(vocabulary, self.marks.texts)
            if asked.single:
                start = f"start: {before}TEXT | {before}tool\n{rule}"
            else:
                start = f"start: {'(said | tool)' if rule else 'tool'}* TEXT\n{rule}"
        return (
            f"{RULES}{start}{opening(BEGIN, vocabulary, at_once=at_once)}"
            f"tool: opened ws? call ws? {mark(END, vocabulary)}\n{self.call_rules(asked.tools, embed)}"
        )

    def call_rules(self, tools: Sequence[Tool], embed: Callable[[dict[str, Any]], str]) -> str:
        """The rule `call`, what stands between the marks, and those that it is made of."""
        schema = {**call_schema(tools, "arguments"), **definitions(tools)}
        return f"call: %json {embed(schema)}\n"

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """One tagged object a call."""
        return "\n".join(f"{BEGIN}\n{call_object(call)}\n{END}" for call in calls)

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Signatures and the form of a call."""
        return (
            f"These functions can be called, one JSON object each:\n<tools>\n{signatures(tools)}\n</tools>\n"
            f"A call is a JSON object with the function's name and its arguments, written so:\n"
            f'{BEGIN}\n{{"name": "function", "arguments": {{}}}}\n{END}\n'
            "Any other answer is plain text."
        )


FORMAT: Final = Hermes()
