"""Grammars of calls: what a model may write in each form, and from where on nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.text.tiny_text import byte_tokenizer
from tests.text.tools.tool_cases import CLOCK, TOOLS, WEATHER, said_and_called
from tokenizers import AddedToken, Tokenizer

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text.tools.choosing import FORMATS
from loraplex.text.tools.tool_types import Tool, ToolChoice
from loraplex.text.tools.tool_use import ToolUse, tool_of

END = "<|end|>"
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


def tokenizer_with(*marks: str, special: bool) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=special) for mark in marks])
    return tokenizer


@dataclass(frozen=True)
class Known:
    """A tokenizer as grammars see it."""

    tokenizer: Tokenizer

    @property
    def plain_added(self) -> list[int]:
        """Ids of added tokens that are not special."""
        added = self.tokenizer.get_added_tokens_decoder()
        return sorted(index for index, token in added.items() if not token.special)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text."""
        index: int | None = self.tokenizer.token_to_id(text)
        return index


MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
TOKENIZERS = {
    "spelled": byte_tokenizer(),
    "special": tokenizer_with(*MARKS, special=True),
    "added": tokenizer_with(*MARKS, special=False),
}


def use(
    form: str, choice: ToolChoice = ToolChoice.AUTO, named: str | None = None, *, parallel: bool = True
) -> ToolUse:
    return ToolUse(TOOLS, choice, FORMATS[form], named, parallel)


def writes(tokenizer: Tokenizer, grammar: str, text: str) -> bool | str:
    """Whether `text` is a whole answer; what of it may be written where it is none."""
    guide = LLTokenizer(tokenizer.to_str(), n_vocab=320, eos_token=[tokenizer.token_to_id(END)])
    matcher = LLMatcher(guide, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for at, token in enumerate(ids):
        if not matcher.consume_token(token):
            return str(tokenizer.decode(ids[:at], skip_special_tokens=False))
    return bool(matcher.is_accepting())


def bits(matcher: LLMatcher) -> np.ndarray:
    """One for each token that may come next."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


OSLO = '{"city": "Oslo", "days": 3}'
CALLS = {
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>',
        '<tool_call>{"name":"clock","arguments":{}}</tool_call>',
        "\n",
    ),
    "llama3": (
        f'{{"name": "get_weather", "parameters": {OSLO}}}',
        '{"name": "clock", "parameters": {}}',
        "; ",
    ),
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}}}]',
        '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
        "",
    ),
    "mistral_args": (
        f"[TOOL_CALLS]get_weather[ARGS]{OSLO}",
        "[TOOL_CALLS]clock[CALL_ID]abcdef123[ARGS]{}",
        "",
    ),
    "qwen3_coder": (
        (
            '<tool_call>\n<function=get_weather>\n<parameter=city>\n"Oslo"\n</parameter>\n<parameter=days>\n3\n'
            "</parameter>\n</function>\n</tool_call>"
        ),
        "<tool_call><function=clock></function></tool_call>",
        "\n",
    ),
    "json": (f'{{"name": "get_weather", "arguments": {OSLO}}}', '{"name": "clock", "arguments": {}}', "\n"),
}
KINDS = pytest.mark.parametrize("kind", sorted(TOKENIZERS))
EACH = pytest.mark.parametrize("form", sorted(FORMATS))


def two(form: str) -> str:
    first, second, between = CALLS[form]
    if form == "mistral":
        return first[:-1] + ", " + second.removeprefix("[TOOL_CALLS][")
    return first + between + second


@KINDS
@EACH
def test_auto_takes_text_or_calls_that_are_right(form: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    grammar = use(form).grammar(Known(tokenizer))
    first, second, _ = CALLS[form]
    for good in ("", "Hello, 1 < 2!", "a\n\nb", first, second, two(form)):
        assert writes(tokenizer, grammar, good) is True, good
    for wrong in (
        first.replace("Oslo", "x" * 21),
        first.replace("3", "8"),
        first.replace("get_weather", "rm"),
    ):
        assert writes(tokenizer, grammar, wrong) is not True, wrong
    assert writes(tokenizer, grammar, first[:-1]) is not True


@KINDS
@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral_args", "qwen3_coder"])
def test_text_may_stand_before_a_call_and_a_mark_in_it_begins_one(form: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    grammar = use(form).grammar(Known(tokenizer))
    first = CALLS[form][0]
    assert writes(tokenizer, grammar, "Let me look. " + first) is True
    begun = "so " + FORMATS[form].marks.begin
    assert writes(tokenizer, grammar, begun + " forget it").strip() == begun  # type: ignore[union-attr]


@KINDS
@EACH
def test_required_is_a_call_at_once_and_a_named_one_is_that_one(form: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    first, second, _ = CALLS[form]
    required = use(form, ToolChoice.REQUIRED).grammar(Known(tokenizer))
    assert [writes(tokenizer, required, text) for text in (first, second, two(form))] == [True] * 3
    assert writes(tokenizer, required, "") is False
    assert writes(tokenizer, required, "Hello") == ""
    named = use(form, ToolChoice.NAMED, "clock").grammar(Known(tokenizer))
    assert writes(tokenizer, named, second) is True
    assert writes(tokenizer, named, first) is not True
    assert writes(tokenizer, named, two(form)) is not True


@KINDS
@EACH
@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.REQUIRED])
def test_without_parallel_calls_one_call_ends_the_answer(form: str, kind: str, choice: ToolChoice) -> None:
    tokenizer = TOKENIZERS[kind]
    grammar = use(form, choice, parallel=False).grammar(Known(tokenizer))
    assert writes(tokenizer, grammar, CALLS[form][0]) is True
    assert writes(tokenizer, grammar, two(form)) is not True
    assert (writes(tokenizer, grammar, "Hello") is True) is (choice is ToolChoice.AUTO)


@KINDS
def test_a_token_that_opens_llamas_calls_may_stand_before_them(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    grammar = use("llama3").grammar(Known(tokenizer))
    assert writes(tokenizer, grammar, "<|python_tag|>" + CALLS["llama3"][0]) is True
    is_token = kind != "spelled"
    assert (writes(tokenizer, grammar, "<|python_tag|>none") is True) is not is_token


@EACH
@pytest.mark.parametrize("parallel", [True, False])
def test_added_tokens_that_are_not_special_may_stand_in_text(form: str, parallel: bool) -> None:
    """Models write what they think between such tokens before they call."""
    tokenizer = tokenizer_with("<think>", "</think>", *MARKS, special=False)
    grammar = use(form, parallel=parallel).grammar(Known(tokenizer))
    thought = "<think>so {it} is</think>"
    assert writes(tokenizer, grammar, thought + "Hello") is True
    opened = {"llama3": "<|python_tag|>"}.get(form, "")
    if form != "json":
        first = CALLS[form][0]
        assert writes(tokenizer, grammar, thought + opened + first) is True
        assert writes(tokenizer, grammar, thought + opened + first.replace("3", "8")) is not True


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral_args", "qwen3_coder"])
def test_an_answer_under_a_schema_stands_beside_calls(form: str) -> None:
    tokenizer = TOKENIZERS["special"]
    grammar = use(form).grammar(Known(tokenizer), ANSWER)
    assert writes(tokenizer, grammar, '{"answer": 4}') is True
    assert writes(tokenizer, grammar, CALLS[form][0]) is True
    assert writes(tokenizer, grammar, "Hello") == ""


@pytest.mark.parametrize("form", ["llama3", "json"])
def test_an_answer_under_a_schema_that_could_be_a_call_is_refused(form: str) -> None:
    with pytest.raises(CallerError) as refused:
        use(form).grammar(Known(byte_tokenizer()), ANSWER)
    assert (refused.value.code, refused.value.param) == (ErrorCode.UNSUPPORTED_OPTION, "response_format")


@EACH
def test_what_the_grammar_lets_through_reads_as_calls_of_the_tools(form: str) -> None:
    """Random walks through the masks of a required call."""
    tokenizer = TOKENIZERS["special"]
    guide = LLTokenizer(tokenizer.to_str(), n_vocab=320, eos_token=[1])
    grammar = use(form, ToolChoice.REQUIRED, parallel=False).grammar(Known(tokenizer))
    for seed in range(6):
        rng, matcher = np.random.default_rng(seed), LLMatcher(guide, grammar, log_level=0)
        ids: list[int] = []
        while not matcher.is_stopped():
            allowed = np.flatnonzero(bits(matcher))
            ids.append(int(rng.choice(allowed)))
            assert matcher.consume_token(ids[-1])
            assert len(ids) < 2000
        answer = tokenizer.decode([i for i in ids if i != 1], skip_special_tokens=False)
        parser = use(form).parser()
        said, ((name, arguments),) = said_and_called([*parser.push(answer), *parser.finish()])
        assert said == ""
        assert name in ("get_weather", "clock")
        assert set(json.loads(arguments)) <= ({"city", "days"} if name == "get_weather" else set())


def test_references_stay_inside_their_tool() -> None:
    """Two tools whose schemas use the same names, a property called like a keyword, and one that refers to
    itself.
    """
    nested = Tool(
        "tree",
        None,
        {
            "type": "object",
            "$id": "https://example.com/tree",
            "properties": {"enum": {"$ref": "#/$defs/days"}, "down": {"$ref": "#"}},
            "additionalProperties": False,
            "$defs": {"days": {"type": "boolean"}},
        },
    )
    tokenizer = byte_tokenizer()
    plan = ToolUse((WEATHER, nested), ToolChoice.REQUIRED, FORMATS["json"])
    grammar = plan.grammar(Known(tokenizer))
    deep = '{"name": "tree", "arguments": {"enum": true, "down": {"enum": false}}}'
    assert writes(tokenizer, grammar, deep) is True
    assert writes(tokenizer, grammar, deep.replace("true", "3")) is not True
    assert writes(tokenizer, grammar, CALLS["json"][0]) is True


def test_a_schema_that_cannot_be_enforced_names_its_tool() -> None:
    wrong = tool_of(1, "wrong", None, {"type": "object", "properties": {"a": {"$ref": "http://elsewhere/x"}}})
    with pytest.raises(CallerError) as refused:
        ToolUse((CLOCK, wrong), ToolChoice.AUTO, FORMATS["hermes"]).grammar(Known(byte_tokenizer()))
    assert refused.value.code is ErrorCode.SCHEMA_UNSUPPORTED
    assert refused.value.param == "tools[1].function.parameters"
    assert "wrong" in refused.value.message


def test_schemas_are_bounded_together() -> None:
    large = [Tool(f"t{index}", None, {"type": "object", "description": "x" * 60_000}) for index in range(2)]
    with pytest.raises(CallerError, match=str(limits.MAX_TOOL_SCHEMA_BYTES)) as refused:
        ToolUse(tuple(large), ToolChoice.AUTO, FORMATS["hermes"]).grammar(Known(byte_tokenizer()))
    assert refused.value.param == "tools[1].function.parameters"
    coprime = [
        Tool(name, None, {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": number}}})
        for name, number in (("a", 997), ("b", 991))
    ]
    with pytest.raises(CallerError, match="together") as refused:
        ToolUse(tuple(coprime), ToolChoice.AUTO, FORMATS["hermes"]).grammar(Known(byte_tokenizer()))
    assert refused.value.param == "tools"


def arguments(tool: Tool, answer: str) -> dict[str, Any]:
    parser = ToolUse((tool,), ToolChoice.AUTO, FORMATS["qwen3_coder"]).parser()
    pieces = [part for character in answer for part in parser.push(character)]
    said, ((name, found),) = said_and_called([*pieces, *parser.finish()])
    assert (said, name) == ("", tool.name)
    return dict(json.loads(found))


def test_values_of_tags_are_text_or_json_by_their_schema() -> None:
    text = {"type": "string", "description": "any"}
    properties = {
        "free": text,
        "maybe": {"anyOf": [text, {"type": "null"}], "default": None},
        "one": {"enum": ["a", "b\nc"], "type": "string"},
        "either": {"anyOf": [text, {"type": "integer"}]},
        "dated": {"type": "string", "format": "date"},
        "deep": {"$ref": "#/$defs/point"},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["free", "deep"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    tool = tool_of(0, "f", None, schema)
    asked = ToolUse((tool,), ToolChoice.REQUIRED, FORMATS["qwen3_coder"])
    tokenizer = TOKENIZERS["special"]
    grammar = asked.grammar(Known(tokenizer))

    def answer(**values: str) -> str:
        lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
        return f"<tool_call>\n<function=f>\n{''.join(lines)}</function>\n</tool_call>"

    whole = answer(
        free=' 7 "</parameter>\n',
        maybe="null",
        one="b\nc",
        either='"7"',
        dated='"2020-01-31"',
        deep='{"x": 1}',
    )
    assert writes(tokenizer, grammar, whole) is True
    assert arguments(tool, whole) == {
        "free": ' 7 "</parameter>\n', "maybe": None, "one": "b\nc",
        "either": "7", "dated": "2020-01-31", "deep": {"x": 1},
    }  # fmt: skip
    least = answer(free="null", maybe="nullable", deep='{"x": 2}')
    assert writes(tokenizer, grammar, least) is True
    assert arguments(tool, least) == {"free": "null", "maybe": "nullable", "deep": {"x": 2}}
    for wrong in (
        answer(free="x"),
        answer(free="x", one="c", deep='{"x": 1}'),
        answer(free="x", either="text", deep='{"x": 1}'),
        answer(free="x", deep='{"x": "1"}'),
        answer(free="x", dated='"today"', deep='{"x": 1}'),
    ):
        assert writes(tokenizer, grammar, wrong) is not True, wrong


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
        {"type": "object", "minProperties": 1, "properties": {"a": {}}},
        {"type": "object", "properties": {"a>b": {}}},
    ],
)
def test_arguments_that_tags_cannot_be_held_to_are_refused(parameters: dict[str, Any]) -> None:
    tool = Tool("f", None, parameters)
    with pytest.raises(CallerError) as refused:
        ToolUse((tool,), ToolChoice.AUTO, FORMATS["qwen3_coder"]).grammar(Known(byte_tokenizer()))
    assert refused.value.code is ErrorCode.SCHEMA_UNSUPPORTED
