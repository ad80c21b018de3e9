"""Newer Mistral models: `[TOOL_CALLS]`, the function's name, `[ARGS]` and its arguments; the same again for
each further call.

Between name and `[ARGS]` some of them write `[CALL_ID]` and an id, which is read over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from loraplex.text.tools.call_grammar import RULES, Asked, Vocabulary, definitions, mark, opening, said
from loraplex.text.tools.call_parser import CallMarks, CallParser
from loraplex.text.tools.mistral import BEGIN, Mistral
from loraplex.text.tools.tool_format import signatures
from loraplex.text.tools.tool_types import Tool

ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
_HEAD: Final = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]{1,64}\s*)?\[ARGS\]\s*")
_MAX_HEAD_CHARS: Final = 200
_RUN: Final = re.compile(r'[^"{}\[\]\\]*')


class _ArgsScanner:
    """Reads `name[ARGS]{...}`. The name is known where its object begins."""

    def __init__(self) -> None:
        self.began = self.done = self.failed = False
        self._head = ""
        self._name: str | None = None
        self._arguments = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """See `Scanner.feed`."""
        at = 0 if self.began else self._read_head(text)
        while at < len(text) and self.began and not self.done:
            at = self._step(text, at)
        return at

    def take(self) -> tuple[str | None, str]:
        """See `Scanner.take`."""
        name, self._name = self._name, None
        arguments, self._arguments = self._arguments, ""
        return name, arguments

    def _read_head(self, text: str) -> int:
        at = text.find("{")
        taken = len(text) if at < 0 else at
        self._head += text[:taken]
        if at < 0:
            self.failed = len(self._head) > _MAX_HEAD_CHARS
            return taken
        found = _HEAD.fullmatch(self._head)
        self.began, self.failed = found is not None, found is None
        self._name = None if found is None else found[1]
        return taken

    def _step(self, text: str, at: int) -> int:
        """Take a run of characters, or one that matters."""
        run = _RUN.match(text, at)
        end = max(at + 1, at if run is None else run.end())
        part = text[at:end]
        self._arguments += part
        if self._escaped:  # the first character of a run is the escaped one
            self._escaped = False
            return end
        if part == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._escaped = part == "\\"
        elif part in ("{", "["):
            self._depth += 1
        elif part in ("}", "]"):
            self._depth -= 1
            self.done = not self._depth
        return end


class MistralArgs(Mistral):
    """`[TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}`."""

    name = "mistral_args"
    marks = CallMarks(BEGIN, between=BEGIN, inside=(ARGS, CALL_ID))

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        """A parser of names and arguments."""
        return CallParser(self.marks, self.new_id, _ArgsScanner)

    def grammar(self, asked: Asked, embed: Callable[[dict[str, Any]], str], vocabulary: Vocabulary) -> str:
        """Text, and where the mark appears calls to the end of the answer."""
        if asked.required:
            start = "start: calls\n"
        elif asked.answer is not None:
            start = f"start: answer | calls\nanswer: %json {asked.answer}\n"
        else:
            rule, before = said(vocabulary, self.marks.texts)
            start = f"start: {before}TEXT | {before}calls\n{rule}"
        at_once = asked.required or asked.answer is not None
        more = "" if asked.single else f" ({mark(BEGIN, vocabulary)} call)*"
        rules = [
            f"{RULES}{start}{opening(BEGIN, vocabulary, at_once=at_once)}",
            f"calls: opened call{more}\n",
            f"call: {' | '.join(f'call{index}' for index in range(len(asked.tools)))}\n",
            f"head: ({mark(CALL_ID, vocabulary)} ID)? {mark(ARGS, vocabulary)} ws?\nID: /[A-Za-z0-9]{{9}}/\n",
        ]
        for index, tool in enumerate(asked.tools):
            schema = {"$ref": "#/$defs/0", **definitions([tool])}
            rules.append(f"call{index}: {json.dumps(tool.name)} head arguments{index}\n")
            rules.append(f"arguments{index}: %json {embed(schema)}\n")
        return "".join(rules)

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Each call behind its own mark."""
        return "".join(
            f"{BEGIN}{call['name']}{ARGS}{json.dumps(call['arguments'], ensure_ascii=False)}"
            for call in calls
        )

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Signatures and the form of a call."""
        return (
            f"These functions can be called, one JSON object each:\n{signatures(tools)}\n"
            f"To call one, answer with {BEGIN}, its name, {ARGS} and a JSON object: {BEGIN}function{ARGS}{{}}"
        )


FORMAT: Final = MistralArgs()
