"""Chat templates: a model's Jinja source, run in a sandbox, turns messages into prompt text.

The environment offers what the field's templates rely on (`raise_exception`, `strftime_now`, `tojson`, loop
controls, `{% generation %}` blocks) and nothing else; a template cannot reach Python objects or change its
input.

Specification: rulings "Text".
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.bounded_template import BoundedEnvironment, allowance
from loraplex.text.tools.choosing import FORMATS, format_of, knows_tools
from loraplex.text.tools.tool_format import ToolFormat
from loraplex.text.tools.tool_types import Message

_OURS: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
Environment = jinja2.sandbox.ImmutableSandboxedEnvironment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; when serving it is its
    body.
    """

    tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the messages."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would reach the model.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(kind: type[Environment]) -> Environment:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    if isinstance(environment, BoundedEnvironment):
        environment.bound_filters()
    return environment


class ChatTemplate:
    """One compiled template. special: texts of the special tokens, by role (`bos_token`, ...).

    stranger: it came with an adapter, so that what a render takes is bounded. tool_format: by name, where a
    card says it.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str],
        *,
        stranger: bool = False,
        tool_format: str | None = None,
    ) -> None:
        """Raises `config_invalid` when the source is not a template, `adapter_unsupported` for an
        adapter's.
        """
        self.source = source
        self._named_format = tool_format
        self._whose = "the adapter's" if stranger else "the model's"
        try:
            kind = BoundedEnvironment if stranger else jinja2.sandbox.ImmutableSandboxedEnvironment
            self._template = _environment(kind).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            code = ErrorCode.ADAPTER_UNSUPPORTED if stranger else ErrorCode.CONFIG_INVALID
            raise CallerError(code, f"{self._whose} chat template does not parse: {error}") from error
        self._special = dict(special)
        self._bounds: Callable[[], AbstractContextManager[None]] = allowance if stranger else nullcontext
        # A template that has a way with the role names it; another would refuse it, or print a word that it
        # was never taught.
        self._knows_developer = "developer" in source

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """The form in which the model writes calls of tools; None for one that is not known here."""
        if self._named_format is not None:
            return FORMATS[self._named_format]
        return format_of(
            self.source, lambda messages, tools, opens: self.render(messages, tools, None if opens else "")
        )

    @property
    def knows_tools(self) -> bool:
        """Whether it writes tools, calls and results itself."""
        return knows_tools(self.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        suffix: str | None = None,
        *,
        continues: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text that ends where the assistant's answer begins; `invalid_request` when the template
        refuses.

        tools: as templates read them. suffix: opens the answer in place of the template's own opening. A
        developer's message is a system message to a template that does not know the role. continues: the text
        ends within the last message, which the answer goes on with. variables: further ones of the template's
        own.
        """
        for name in variables or ():
            if name in _OURS:
                raise _refused_variable(name)
        try:
            with self._bounds():
                text = self._template.render(
                    messages=[self._known(message) for message in messages],
                    add_generation_prompt=suffix is None and not continues,
                    tools=list(tools) or None,
                    documents=None,
                    **{**self._special, **(variables or {})},
                )
                if continues:
                    return _up_to_end(text, str(messages[-1].get("content") or "") if messages else "")
                return text + (suffix or "")
        except (jinja2.TemplateError, RecursionError) as error:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                f"{self._whose} chat template refuses these messages: {error}",
                param="messages",
            ) from error

    def _known(self, message: Message) -> dict[str, Any]:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)


def _refused_variable(name: str) -> CallerError:
    return CallerError(
        ErrorCode.INVALID_REQUEST,
        f"chat_template_kwargs sets {name}, which the request's own fields say; leave it out",
        param="chat_template_kwargs",
    )


def _up_to_end(text: str, last: str) -> str:
    """A rendered conversation up to the end of its last message's content."""
    said = last.strip()
    at = text.rfind(said) if said else -1
    if at < 0:
        raise CallerError(
            ErrorCode.INVALID_REQUEST,
            "continue_final_message needs a last message whose content the chat template writes as it is",
            param="continue_final_message",
        )
    end = at + len(said)
    blank = last[len(last.rstrip()) :]
    return text[: end + len(blank)] if text.startswith(blank, end) else text[:end]
