"""What the grammars of calls are made of: the schema of a call, and rules in llguidance's form of Lark.

A call is one JSON object under one schema for all tools, so that tokens which span its parts stay allowed;
every tool's own schema lies in it under a name of ours. Specification: rulings "Sampling".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from loraplex.text.grammars import with_parts
from loraplex.text.tools.tool_types import Tool


class Vocabulary(Protocol):
    """What of a tokenizer matters to a grammar. plain_added: ids of added tokens that are part of a text like
    any other.
    """

    @property
    def plain_added(self) -> Sequence[int]:
        """In ascending order."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text; None where there is none."""
        ...


RULES: Final = "%llguidance {}\nTEXT: /(.|\\n)*/\nws: /[ \\t\\r\\n]{1,8}/\n"
"""Free text, and white space between calls."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer must be. tools: those that it may call, at least one.

    required: it is a call or calls. single: of calls there is one at most. answer: JSON schema text, as the
    grammar embeds it, of an answer without calls; None where that is free text.
    """

    tools: Sequence[Tool]
    required: bool
    single: bool
    answer: str | None = None


def call_schema(tools: Sequence[Tool], arguments_key: str) -> dict[str, Any]:
    """The schema of one call, without the tools' own: `definitions` goes beside it."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: {"$ref": f"#/$defs/{index}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """`$defs` of the tools' schemas, with references to their own parts."""
    return {
        "$defs": {str(index): _moved(tool.parameters, f"#/$defs/{index}") for index, tool in enumerate(tools)}
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema that now lies at `place`: its references to its own parts lead there."""
    if not isinstance(schema, dict):
        return schema
    moved = with_parts(schema, lambda part: _moved(part, place))
    moved.pop("$id", None)
    reference = moved.get("$ref")
    if reference == "#" or (isinstance(reference, str) and reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def mark(text: str, vocabulary: Vocabulary) -> str:
    """A rule's part for a mark: the token of that text where there is one, or its characters."""
    spelled, index = json.dumps(text), vocabulary.token_id(text)
    return spelled if index is None else f"(<[{index}]> | {spelled})"


def opening(text: str, vocabulary: Vocabulary, *, at_once: bool) -> str:
    """The rule `opened`: a mark, behind free text unless `at_once`. From the mark on nothing else
    may follow.
    """
    if at_once:
        return f"opened: {mark(text, vocabulary)}\n"
    index = vocabulary.token_id(text)
    token = "" if index is None else f" | TEXT <[{index}]>"
    return f"spelled[lazy]: TEXT {json.dumps(text)}\nopened: spelled{token}\n"


def plain_tokens(vocabulary: Vocabulary, marks: Collection[str]) -> str | None:
    """A rule's part for added tokens that may stand in free text, which the library tells from their
    characters.
    """
    known = {vocabulary.token_id(text) for text in marks}
    ids = [index for index in vocabulary.plain_added if index not in known]
    return f"<[{','.join(map(str, ids))}]>" if ids else None


def said(vocabulary: Vocabulary, marks: Collection[str]) -> tuple[str, str]:
    """A rule `said` for text up to such a token, and how it stands before other text; nothing where there are
    none.
    """
    tokens = plain_tokens(vocabulary, marks)
    return ("", "") if tokens is None else (f"said: TEXT {tokens}\n", "said* ")
