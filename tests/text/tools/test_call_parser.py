"""Answers become text and calls: the same however they come, and with nothing given out that may be taken
back.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tools.tool_cases import ANSWERS, Call, said_and_called

from loraplex.text.tools.choosing import FORMATS
from loraplex.text.tools.tool_types import CallDelta

CASES = [(form, *case) for form, cases in ANSWERS.items() for case in cases]


@pytest.mark.parametrize(("form", "answer", "said", "called"), CASES)
def test_an_answer_is_read_whole(form: str, answer: str, said: str, called: list[Call]) -> None:
    parser = FORMATS[form].parser()
    assert said_and_called([*parser.push(answer), *parser.finish()]) == (said, called)


@pytest.mark.parametrize(("form", "answer", "said", "called"), CASES)
def test_every_split_of_an_answer_reads_the_same(
    form: str, answer: str, said: str, called: list[Call]
) -> None:
    splits = [[answer[:at], answer[at:]] for at in range(len(answer) + 1)]
    for split in [*splits, list(answer)]:
        parser = FORMATS[form].parser()
        parts = [part for piece in split for part in parser.push(piece)]
        assert said_and_called([*parts, *parser.finish()]) == (said, called), split


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name"', ": ", '"f"',
', "arguments"', '{"a', "\\", '"', "}", "]", "[", ";", ",", "\n", "x"]  # fmt: skip


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(MARKS), max_size=14).map("".join),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_any_text_reads_the_same_however_it_is_split(form: str, answer: str, cuts: list[int]) -> None:
    whole, piecewise = FORMATS[form].parser(), FORMATS[form].parser()
    expected = said_and_called([*whole.push(answer), *whole.finish()])
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    parts = [part for low, high in itertools.pairwise(edges) for part in piecewise.push(answer[low:high])]
    assert said_and_called([*parts, *piecewise.finish()]) == expected


def test_arguments_come_as_they_are_written_and_marks_are_held_back() -> None:
    parser = FORMATS["hermes"].parser()
    assert parser.push("Let me look. <tool") == ["Let me look."]
    assert parser.push('_call>\n{"name": "get_wea') == []
    (head,) = parser.push('ther", "arguments": {"ci')
    assert isinstance(head, CallDelta)
    assert (head.index, head.name, head.arguments) == (0, "get_weather", '{"ci')
    assert head.id is not None
    assert head.id.startswith("call_")
    assert parser.push('ty": "Oslo"') == [CallDelta(0, None, None, 'ty": "Oslo"')]
    assert parser.push("}}\n</tool_call>") == [CallDelta(0, None, None, "}")]
    assert parser.finish() == []


def test_ids_of_mistral_have_nine_letters_and_digits() -> None:
    parser = FORMATS["mistral"].parser()
    (call,) = parser.push('[TOOL_CALLS] [{"name": "clock", "arguments": {}}]')
    assert isinstance(call, CallDelta)
    assert call.id is not None
    assert len(call.id) == 9
    assert call.id.isalnum()
