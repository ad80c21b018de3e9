"""What is said of tools between a request, the forms that models write, and an answer.

Owns the records; knows neither HTTP nor any form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

Message = Mapping[str, Any]
"""One turn as chat templates read it: role, content, and where there are any tool_calls, tool_call_id and
name.

The arguments of a call in `tool_calls` are an object, not the text of one.
"""
BLANKS: Final = " \t\r\n"
"""White space of JSON."""


class ToolChoice(StrEnum):
    """What an answer is to be. NAMED: one call of a function that the request names."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call. parameters: JSON schema of its arguments, which are an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def as_template(self) -> dict[str, Any]:
        """In the form that chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a call gets. index: which call of the answer. id, name: with its first delta only. arguments: JSON
    text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str

    def followed_by(self, later: CallDelta) -> CallDelta:
        """Both deltas of one call as one."""
        return CallDelta(self.index, self.id, self.name, self.arguments + later.arguments)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. arguments: JSON text, cut off where the answer was."""

    id: str
    name: str
    arguments: str


def joined(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    """The calls that deltas add up to."""
    heads = {delta.index: delta for delta in deltas if delta.name is not None}
    return [
        ToolCall(
            head.id or "",
            head.name or "",
            "".join(delta.arguments for delta in deltas if delta.index == index),
        )
        for index, head in heads.items()
    ]
