"""Which form a model writes calls in, found from its chat template.

A template that knows tools is made to write a call, and the form that can read it is the model's. One that
knows none leaves the choice: plain JSON. Never guesses: a call that no form reads is no form's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loraplex.core.errors import CallerError
from loraplex.text.tools import hermes, llama3, mistral, mistral_args, plain_json, qwen3_coder
from loraplex.text.tools.tool_format import ToolFormat
from loraplex.text.tools.tool_types import Message, Tool, joined

FORMATS: Final[Mapping[str, ToolFormat]] = {
    module.FORMAT.name: module.FORMAT
    for module in (hermes, llama3, mistral, mistral_args, qwen3_coder, plain_json)
}
"""By name. Of two that could read a call, the first is a model's."""
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools and whether the answer begins: the template's text."""

_TOOLS: Final = re.compile(r"\btools\b")
_TOOL: Final = Tool(
    "probe", "", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)
_ARGUMENTS: Final = {"city": "Paris"}
_ASKED: Final[Message] = {"role": "user", "content": "Call probe."}
_CALLED: Final[Message] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdef123", "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}}
    ],
}


def knows_tools(source: str) -> bool:
    """Whether a template writes the tools of a request itself."""
    return _TOOLS.search(source) is not None


def format_of(source: str, render: Render) -> ToolFormat | None:
    """The form of the model with a template; None where it has one that is not known here."""
    if not knows_tools(source):
        return plain_json.FORMAT
    answer = _written(render)
    return next((form for form in FORMATS.values() if _reads(form, answer)), None)


def _written(render: Render) -> str:
    """What the template says that the model writes to make the probe's call; empty where it refuses."""
    tools = [_TOOL.as_template()]
    try:
        whole = render([_ASKED, _CALLED], tools, False)
        asked = render([_ASKED], tools, True)
    except CallerError:
        return ""
    # Some templates open an answer otherwise than they repeat one, by what they say of reasoning.
    same = next(
        (at for at, pair in enumerate(zip(whole, asked, strict=False)) if pair[0] != pair[1]), len(asked)
    )
    return whole[same:]


def _reads(form: ToolFormat, answer: str) -> bool:
    parser = form.parser((_TOOL,))
    parts = [*parser.push(answer), *parser.finish()]
    calls = joined([part for part in parts if not isinstance(part, str)])
    if len(calls) != 1 or calls[0].name != "probe":
        return False
    try:
        return bool(json.loads(calls[0].arguments) == _ARGUMENTS)
    except ValueError:
        return False
