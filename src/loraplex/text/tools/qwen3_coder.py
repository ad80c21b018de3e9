"""Qwen3-Coder: between `<tool_call>` and `</tool_call>` a `<function=name>` with a `<parameter=key>` for each
argument.

A value that can only be text, or null, stands there as it is; every other one is written in JSON. Neither
holds the line that ends a value, `</parameter>`: JSON has no line breaks inside its strings, and text ends
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.grammars import plain
from loraplex.text.tools.call_grammar import definitions
from loraplex.text.tools.call_parser import CallMarks, CallParser, begun
from loraplex.text.tools.hermes import BEGIN, END, Hermes
from loraplex.text.tools.tool_format import signatures
from loraplex.text.tools.tool_types import BLANKS, Tool

FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
VALUE_END: Final = "\n</parameter>"
_MAX_NAME_CHARS: Final = 256
_TEXT_KEYS: Final = frozenset({"type", "enum", "const"})
_NOT_HELD: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "minProperties", "maxProperties")
"""Keywords of all arguments together, to which values that are written one by one cannot be held."""
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)


@dataclass(frozen=True, slots=True)
class _TextValue:
    """An argument that is text. choices: all that it may be, None for any text. nullable: `null` is null."""

    choices: tuple[str, ...] | None
    nullable: bool


def _text_value(schema: Any) -> _TextValue | None:
    """How an argument under a schema is text; None where it is written in JSON."""
    if not isinstance(schema, Mapping):
        return None
    bare = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    parts = bare["anyOf"] if set(bare) == {"anyOf"} else [bare]
    found = [_plain_text(part) for part in parts] if isinstance(parts, list) else [None]
    known = [part for part in found if part is not None]
    if len(known) < len(found) or all(part.choices == () for part in known):
        return None
    free = any(part.choices is None for part in known)
    texts = tuple(text for part in known for text in part.choices or ())
    return _TextValue(None if free else texts, any(part.nullable for part in known))


def _plain_text(schema: Any) -> _TextValue | None:
    """Of one alternative: a string without further bounds, some strings, or null."""
    bare = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    if not bare.keys() <= _TEXT_KEYS:
        return None
    kinds = bare.get("type", ["string", "null"])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    values = bare["enum"] if "enum" in bare else [bare["const"]] if "const" in bare else None
    if values is None:
        if "type" not in bare or not kinds <= {"string", "null"}:
            return None
        return _TextValue(None if "string" in kinds else (), "null" in kinds)
    texts = tuple(value for value in values if isinstance(value, str) and "string" in kinds)
    nulls = [value for value in values if value is None and "null" in kinds]
    if len(texts) + len(nulls) < len(values) or any(VALUE_END in text or text == "null" for text in texts):
        return None
    return _TextValue(texts, bool(nulls))


class _XmlScanner:
    """Reads `name>`, parameters and `</function>`; the arguments come out as JSON."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.began = self.done = self.failed = False
        self._tools = {tool.name: tool for tool in tools}
        self._properties: Mapping[str, Any] = {}
        self._buffer = ""
        self._name: str | None = None
        self._out = ""
        self._read = self._read_name
        self._value: _TextValue | None = None
        self._keys: set[str] = set()
        self._streamed = False

    def feed(self, text: str) -> int:
        """See `Scanner.feed`."""
        self._buffer += text
        while not self.done and not self.failed and self._read():
            pass
        return len(text) - len(self._buffer) if self.done else len(text)

    def take(self) -> tuple[str | None, str]:
        """See `Scanner.take`."""
        if not self.began:
            return None, ""
        name, self._name = self._name, None
        out, self._out = self._out, ""
        return name, out

    def _upto(self, mark: str) -> str | None:
        """What stands before a mark, both taken; None while it is not there."""
        at = self._buffer.find(mark)
        if at < 0:
            return None
        found, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        return found

    def _word(self) -> str | None:
        """A name up to `>`; fails where none comes."""
        word = self._upto(">")
        if word is None:
            self.failed = len(self._buffer) > _MAX_NAME_CHARS
        elif not word or "\n" in word:
            self.failed = True
        return None if self.failed else word

    def _read_name(self) -> bool:
        name = self._word()
        if name is None:
            return False
        tool = self._tools.get(name)
        self._properties = {} if tool is None else tool.parameters.get("properties", {})
        self.began, self._name, self._out = True, name, "{"
        self._read = self._read_tag
        return True

    def _read_tag(self) -> bool:
        """A parameter's beginning, or the function's end."""
        self._buffer = self._buffer.lstrip(BLANKS)
        if self._buffer.startswith(FUNCTION_END):
            self._buffer = self._buffer[len(FUNCTION_END) :]
            self._out += "}"
            self.done = True
        elif self._buffer.startswith(PARAMETER):
            self._buffer = self._buffer[len(PARAMETER) :]
            self._read = self._read_key
            return True
        else:
            self.failed = not any(tag.startswith(self._buffer) for tag in (FUNCTION_END, PARAMETER))
        return False

    def _read_key(self) -> bool:
        key = self._word()
        if key is None:
            return False
        self.failed = key in self._keys
        self._value = _text_value(plain(self._properties.get(key)))
        self._out += f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: "
        self._keys.add(key)
        self._read = self._read_break
        return True

    def _read_break(self) -> bool:
        """The line break before a value, which is none of it."""
        if self._buffer.startswith("\n"):
            plain_text = self._value == _TextValue(None, nullable=False)
            self._buffer = self._buffer[1:]
            self._out += '"' if plain_text else ""
            self._read = self._read_text if plain_text else self._read_whole
            return True
        self.failed = bool(self._buffer)
        return False

    def _read_text(self) -> bool:
        """Text, given out as it comes."""
        value = self._upto(VALUE_END)
        if value is None:
            kept = begun(self._buffer, VALUE_END)
            value, self._buffer = (
                self._buffer[: len(self._buffer) - kept],
                self._buffer[len(self._buffer) - kept :],
            )
            self._out += _inside(value)
            return False
        self._out += _inside(value) + '"'
        self._read = self._read_tag
        return True

    def _read_whole(self) -> bool:
        """A value that is known only when it is whole."""
        value = self._upto(VALUE_END)
        if value is None:
            return False
        text = self._value
        if text is None:
            self._out += value.strip() if _is_json(value) else json.dumps(value, ensure_ascii=False)
        else:
            null = text.nullable and value == "null"
            self._out += "null" if null else json.dumps(value, ensure_ascii=False)
        self._read = self._read_tag
        return True


def _inside(text: str) -> str:
    """Text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class Qwen3Coder(Hermes):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, in lines."""

    name = "qwen3_coder"
    marks = CallMarks(BEGIN, head=FUNCTION, end=END)

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        """A parser of tags, which reads values by the tools' schemas."""
        return CallParser(self.marks, self.new_id, lambda: _XmlScanner(tools))

    def call_rules(self, tools: Sequence[Tool], embed: Callable[[dict[str, Any]], str]) -> str:
        """A function with its parameters in the order of its schema, of which optional ones may be
        left out.
        """
        rules = [
            f"call: {' | '.join(f'call{index}' for index in range(len(tools)))}\n",
            f"text[lazy]: TEXT {json.dumps(VALUE_END)}\n",
        ]
        for index, tool in enumerate(tools):
            _check(tool)
            moved = definitions([tool])["$defs"]["0"]
            required = moved.get("required", ())
            known = moved.get("properties", {})
            properties = {**known, **{key: {} for key in required if key not in known}}
            named = [key for key in properties if key in required or properties[key] is not False]
            parts = [f"value{index}_{at}{'' if key in required else '?'}" for at, key in enumerate(named)]
            rules.append(
                f"call{index}: {json.dumps(f'{FUNCTION}{tool.name}>')} ws? {' '.join(parts)} "
                f"{json.dumps(FUNCTION_END)}\n"
            )
            for at, key in enumerate(named):
                body = _value_rule(properties[key], moved, embed)
                rules.append(f"value{index}_{at}: {json.dumps(f'{PARAMETER}{key}>' + chr(10))} {body} ws?\n")
        return "".join(rules)

    def call_text(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """A tagged function a call."""
        return "\n".join(f"{BEGIN}\n{_written(call)}\n{END}" for call in calls)

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Signatures and the form of a call."""
        return (
            f"These functions can be called, one JSON object each:\n<tools>\n{signatures(tools)}\n</tools>\n"
            f"A call is written so, with each argument in lines of its own:\n"
            f"{BEGIN}\n{FUNCTION}function>\n{PARAMETER}argument>\nvalue{VALUE_END}\n{FUNCTION_END}\n{END}\n"
            "Any other answer is plain text."
        )


def _check(tool: Tool) -> None:
    """Raise `schema_unsupported` for arguments that cannot be written one by one."""
    wrong = [key for key in _NOT_HELD if key in tool.parameters]
    keys = [*tool.parameters.get("properties", {}), *tool.parameters.get("required", ())]
    wrong += [key for key in keys if not key or len(key) > _MAX_NAME_CHARS or ">" in key or "\n" in key]
    if wrong:
        raise CallerError(
            ErrorCode.SCHEMA_UNSUPPORTED,
            f"the form {Qwen3Coder.name}, which writes arguments one by one, cannot hold those of "
            f"{tool.name} to {wrong[0]!r:.80}; leave it out",
            param="tools",
        )


def _value_rule(schema: Any, root: Mapping[str, Any], embed: Callable[[dict[str, Any]], str]) -> str:
    """A rule's part for a value up to its end."""
    end, text = json.dumps(VALUE_END), _text_value(plain(schema))
    if text is None:
        whole = dict(schema) if isinstance(schema, Mapping) else {}
        if "$ref" in json.dumps(whole):
            whole["$defs"] = {"0": dict(root)}
        return f"%json {embed(whole)} {end}"
    if text.choices is None:
        return "text"
    choices = [*text.choices, *(["null"] if text.nullable else [])]
    return f"({' | '.join(map(json.dumps, choices))}) {end}"


def _written(call: Mapping[str, Any]) -> str:
    lines = [f"{FUNCTION}{call['name']}>"]
    for key, value in call["arguments"].items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{PARAMETER}{key}>\n{text}{VALUE_END}")
    return "\n".join([*lines, FUNCTION_END])


FORMAT: Final = Qwen3Coder()
