"""Tools in a conversation whose chat template knows none: they become text of messages that it does know.

The tools stand in the system message, calls in the assistant's text, and what functions returned in a user's
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.text.tools.tool_format import ToolFormat
from loraplex.text.tools.tool_types import Message, Tool

_SYSTEM = ("system", "developer")


def written_out(messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat) -> list[Message]:
    """The conversation in roles that every template has. Results in a row make one message."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = form.result_text(message["content"])
            if out and "results" in out[-1]:
                out[-1]["content"] += "\n" + text
            else:
                out.append({"role": "user", "content": text, "results": True})
        elif message.get("tool_calls"):
            out.append(_as_text(message, form))
        else:
            out.append(dict(message))
    if tools:
        _instruct(out, form.instruction(tools))
    return [{key: value for key, value in message.items() if key != "results"} for message in out]


def _as_text(message: Message, form: ToolFormat) -> dict[str, Any]:
    calls = form.call_text([call["function"] for call in message["tool_calls"]])
    said = message["content"]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{said}\n{calls}" if said else calls}


def _instruct(messages: list[dict[str, Any]], text: str) -> None:
    if messages and messages[0]["role"] in _SYSTEM:
        said = messages[0]["content"]
        messages[0]["content"] = f"{said}\n\n{text}" if said else text
    else:
        messages.insert(0, {"role": "system", "content": text})
