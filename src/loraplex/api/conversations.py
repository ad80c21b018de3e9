"""What a Python caller may say in `LLM.chat`: messages and tools, read by the server's own rules.

What cannot be JSON is no message: values are written out and decoded as a body of /v1/chat/completions is.
Specification: interface "Python".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.conversation import (
    ChatMessage,
    FunctionTool,
    ToolChoiceField,
    check_messages,
    read_choice,
    read_tools,
    template_messages,
)
from loraplex.text.tools.tool_types import Message, Tool, ToolChoice
from loraplex.text.tools.tool_use import ToolUse, use_of

_AT: Final = re.compile(r" - at `\$([^`]*)`")
_MESSAGES: Final[Any] = list[ChatMessage]
_TOOLS: Final[Any] = list[FunctionTool] | None
_CHOICE: Final[Any] = ToolChoiceField | None


@dataclass(frozen=True, slots=True)
class Offer:
    """What an answer may call, before the model is known. parallel: more than once."""

    tools: Sequence[Tool]
    choice: ToolChoice
    named: str | None
    parallel: bool

    def use(self, template: ChatTemplate, form: str | None) -> ToolUse | None:
        """The same for a model with a template. form: of its card, in place of the template's."""
        if not self.tools and self.named is None and self.choice is not ToolChoice.REQUIRED:
            return None
        return use_of(template, self.tools, self.choice, self.named, parallel=self.parallel, form=form)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the chat template, and what the answer may call."""

    messages: Sequence[Message]
    offer: Offer


def read_offer(tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> Offer:
    """Tools in the form of a request body. Raises `invalid_request` and `schema_unsupported`."""
    choice, named = read_choice(_decoded("tool_choice", tool_choice, _CHOICE))
    parallel = _decoded("parallel_tool_calls", parallel_tool_calls, bool)
    return Offer(read_tools(_decoded("tools", tools, _TOOLS)), choice, named, parallel)


def read_conversations(messages: Any, offer: Offer) -> list[Conversation]:
    """One conversation or several, each a list of messages. Raises `invalid_request`."""
    many = messages if _is_list(messages) and messages and all(map(_is_list, messages)) else [messages]
    return [Conversation(_read(conversation), offer) for conversation in many]


def _read(conversation: Any) -> list[dict[str, Any]]:
    decoded: list[ChatMessage] = _decoded("messages", conversation, _MESSAGES)
    if not decoded:
        raise CallerError(ErrorCode.INVALID_REQUEST, "messages is empty; give at least one", param="messages")
    check_messages(decoded)
    return template_messages(decoded)


def _decoded(name: str, value: Any, kind: Any) -> Any:
    """A value as the server would read it from a body."""
    try:
        return msgspec.json.decode(json.dumps(value, allow_nan=False), type=kind)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        param = name + (found[1] if found else "")
        reason = _AT.sub("", str(error))
        raise CallerError(ErrorCode.INVALID_REQUEST, f"{param} is refused: {reason}", param=param) from error
    except (TypeError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"{name} cannot be written as JSON: {error}"[:300], param=name
        ) from error


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))
