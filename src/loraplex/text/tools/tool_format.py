"""What every form of calls offers: marks for the parser, a grammar, and words for a template that knows no
tools.

A form is one file with one subclass. Never chooses among forms.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from loraplex.text.tools.call_grammar import Asked, Vocabulary
from loraplex.text.tools.call_parser import CallMarks, CallParser
from loraplex.text.tools.tool_types import Message, Tool


class ToolFormat(ABC):
    """One form. name: what `--tool-format` calls it. marks: where its calls begin and end.

    holds_answers: whether an answer under a schema can be told from a call.
    """

    name: ClassVar[str]
    marks: ClassVar[CallMarks]
    holds_answers: ClassVar[bool] = True

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        """A parser of one answer. tools: what it may call."""
        return CallParser(self.marks, self.new_id)

    @abstractmethod
    def grammar(self, asked: Asked, embed: Callable[[dict[str, Any]], str], vocabulary: Vocabulary) -> str:
        """Lark text. embed: writes a schema as a grammar takes it in."""

    @abstractmethod
    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """What a model writes to make `calls`, each with `name` and `arguments`."""

    @abstractmethod
    def instruction(self, tools: Sequence[Tool]) -> str:
        """What a system message says of tools where the template does not."""

    def result_text(self, content: str) -> str:
        """What a function returned, as a user's message where the template knows no other."""
        return f"<tool_response>\n{content}\n</tool_response>"

    def new_id(self) -> str:
        """An id for a call."""
        return "call_" + secrets.token_hex(12)

    def history(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the form's templates take them."""
        return list(messages)


def signatures(tools: Sequence[Tool]) -> str:
    """Tools for a system message, one JSON object a line."""
    return "\n".join(json.dumps(tool.as_template()["function"], ensure_ascii=False) for tool in tools)


def call_object(call: Mapping[str, Any], arguments_key: str = "arguments") -> str:
    """A call as JSON."""
    return json.dumps({"name": call["name"], arguments_key: call["arguments"]}, ensure_ascii=False)
