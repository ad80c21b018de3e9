"""Forms of answers as clients of other servers ask for them, decoded strictly; `wire.py` holds the rest of a
request, with OpenAI's `response_format`. Specification: interface "HTTP".
"""

from __future__ import annotations

from typing import Any

import msgspec

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.neutral import ABSENT, Unsupported
from loraplex.core.request import AnswerForm


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of these. json: a schema, or its text. grammar: Lark's words, or GBNF's."""

    choice: list[str] | None = None
    regex: str | None = None
    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    grammar: str | None = None
    disable_additional_properties: Unsupported = ABSENT
    disable_any_whitespace: Unsupported = ABSENT
    disable_fallback: Unsupported = ABSENT
    structural_tag: Unsupported = ABSENT
    whitespace_pattern: Unsupported = ABSENT


def answer_form(structured: StructuredOutputs | None, guided: StructuredOutputs) -> AnswerForm | None:
    """The one form that a request asks for, if any. guided: what its fields `guided_*` say.

    Raises `invalid_request` for two of them.
    """
    given = [*_forms(structured, "structured_outputs."), *_forms(guided, "guided_")]
    if len(given) > 1:
        names = " and ".join(form.param for form in given)
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"{names} are given; an answer has one form", param=given[1].param
        )
    return given[0] if given else None


def _forms(asked: StructuredOutputs | None, prefix: str) -> list[AnswerForm]:
    if asked is None:
        return []
    found = [
        AnswerForm(param=prefix + "choice", choice=asked.choice) if asked.choice is not None else None,
        AnswerForm(param=prefix + "regex", regex=asked.regex) if asked.regex is not None else None,
        AnswerForm(param=prefix + "json", json=_schema(asked.json, prefix))
        if asked.json is not None
        else None,
        AnswerForm(param=prefix + "json_object", json={"type": "object"}) if asked.json_object else None,
        AnswerForm(param=prefix + "grammar", grammar=asked.grammar) if asked.grammar is not None else None,
    ]
    return [form for form in found if form is not None]


def _schema(given: dict[str, Any] | bool | str | None, prefix: str) -> dict[str, Any] | bool | None:
    if not isinstance(given, str):
        return given
    try:
        schema: dict[str, Any] | bool = msgspec.json.decode(given, type=dict[str, Any] | bool)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, f"{prefix}json is no JSON schema: {error}", param=prefix + "json"
        ) from error
    return schema
