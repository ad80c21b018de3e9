"""Other forms that an answer may be held to: one of several texts, a regular expression, a grammar.

Each becomes grammar text, as a JSON schema does (`text.grammars`). Never decides between them.
Specification: rulings "Sampling", interface "HTTP".
"""

from __future__ import annotations

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.request import AnswerForm
from loraplex.text.grammars import checked_grammar, schema_grammar


def form_grammar(form: AnswerForm) -> str:
    """Grammar text of a form; may take long. Raises `schema_unsupported` for what cannot be enforced."""
    try:
        if form.json is not None:
            return schema_grammar(form.json if isinstance(form.json, bool) else dict(form.json))
        if form.choice is not None:
            return _choice(form)
        if form.regex is not None:
            return checked_grammar(LLMatcher.grammar_from_regex(_short(form, form.regex)))
        return _own_grammar(form, form.grammar or "")
    except CallerError as error:
        error.param = form.param
        raise


def _choice(form: AnswerForm) -> str:
    texts = [json.dumps(text, ensure_ascii=False) for text in form.choice or ()]
    if not all(form.choice or ("",)):
        raise _refused(form, "has no texts, or an empty one")
    return checked_grammar(LLMatcher.grammar_from_lark(_short(form, "start: " + " | ".join(texts))))


def _own_grammar(form: AnswerForm, text: str) -> str:
    """A schema inside a grammar would not have been checked as one."""
    try:
        lark = any_to_lark(_short(form, text))
    except Exception as error:  # what a text that is no grammar makes of the reader
        raise _refused(form, f"is no grammar ({error})") from error
    if "%json" in lark:
        raise _refused(form, "holds a schema (%json); send it as json")
    return checked_grammar(LLMatcher.grammar_from_lark(lark))


def _short(form: AnswerForm, text: str) -> str:
    if len(text) > limits.MAX_SCHEMA_BYTES:
        raise _refused(form, f"has {len(text)} characters, the limit is {limits.MAX_SCHEMA_BYTES}")
    return text


def _refused(form: AnswerForm, what: str) -> CallerError:
    return CallerError(ErrorCode.SCHEMA_UNSUPPORTED, f"{form.param} {what}"[:300], param=form.param)
