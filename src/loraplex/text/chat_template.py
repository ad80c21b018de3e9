"""Chat templates: a model's Jinja source, run in a sandbox, turns messages into prompt text.

The environment offers what the field's templates rely on (`raise_exception`, `strftime_now`, `tojson`, loop controls,
`{% generation %}` blocks) and nothing else; a template cannot reach Python objects or change its input.

Specification: rulings "Text".
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from loraplex.core.errors import CallerError, ErrorCode


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; when serving it is its body."""

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


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes HTML characters, which would reach the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


class ChatTemplate:
    """One compiled template. special: texts of the special tokens, by role (`bos_token`, ...)."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises `config_invalid` when the source is not a template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"the model's chat template does not parse: {error}"
            ) from error
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Prompt text that ends where the assistant's answer begins; `invalid_request` when the template refuses."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                f"the model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
