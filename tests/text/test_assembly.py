"""One sample's answer from the engine's messages: the same however its tokens are split over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.tiny_text import byte_codec, byte_tokenizer, write_folder
from tests.text.tools.tool_cases import CLOCK, said_and_called
from tokenizers import AddedToken

from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.core.messages import Ended, TokenLogprobs, Tokens
from loraplex.core.request import SamplingParams
from loraplex.text.assembly import TOOL_CALLS, Piece, SampleAssembly
from loraplex.text.codec import TextCodec, load_tokenizer
from loraplex.text.tools.choosing import FORMATS
from loraplex.text.tools.tool_types import ToolChoice
from loraplex.text.tools.tool_use import ToolUse


def _codec() -> TextCodec:
    with TemporaryDirectory() as folder:
        return byte_codec(Path(folder))


CODEC = _codec()
TEXT = "ok a-b-c nev\u00e9r"
IDS = CODEC.encode(TEXT, add_special=False)


def scored(ids: Sequence[int]) -> Tokens:
    return Tokens("r", tuple(ids), tuple(TokenLogprobs((token,), (-float(token),)) for token in ids))


def assemble(
    params: SamplingParams, cuts: Sequence[int] = (), codec: TextCodec | None = CODEC
) -> tuple[Piece, SampleAssembly, list[int]]:
    """The answer of all of IDS, in messages that begin at `cuts`; and what the engine was told to finish
    with.
    """
    sample, piece, told = SampleAssembly(0, codec, params, ()), Piece(0), []
    edges = [0, *sorted(cuts), len(IDS)]
    messages = [scored(IDS[low:high]) for low, high in itertools.pairwise(edges)]
    for message in [*messages, Ended("r", "length")]:
        last = sample.take(message, piece)
        if last is not None:
            told.append(last)
    return piece, sample, told


@given(
    st.lists(st.integers(0, len(IDS)), max_size=4),
    st.sampled_from([(), ("a-b",), ("\u00e9",), ("zz",)]),
    st.sampled_from([0, 5, 6]),
)
def test_an_answer_does_not_depend_on_how_its_tokens_come(
    cuts: list[int], stop: tuple[str, ...], least: int
) -> None:
    params = SamplingParams(stop=stop, logprobs=0, min_tokens=least)
    piece, sample, told = assemble(params, cuts)
    whole, other, also_told = assemble(params)
    assert (piece, sample.tokens, told) == (whole, other.tokens, also_told)
    assert sample.over


def test_a_stop_string_ends_text_tokens_and_log_probabilities_at_its_last_token() -> None:
    piece, sample, told = assemble(SamplingParams(stop="a-b", logprobs=0))
    assert piece.text == "ok "
    assert piece.finish_reason == sample.finish_reason == "stop"
    assert piece.token_ids == IDS[:6]
    assert [entry.ids[0] for entry in piece.logprobs] == IDS[:6]
    assert (sample.tokens, told) == (6, [6])


@pytest.mark.parametrize(("least", "ends"), [(5, True), (6, False), (16, False)])
def test_a_stop_string_is_not_acted_on_before_min_tokens(least: int, ends: bool) -> None:
    """It completes with the sixth token: of min_tokens 6 that is one, as vLLM counts."""
    piece, sample, told = assemble(SamplingParams(stop="a-b", min_tokens=least))
    assert (piece.text, told) == (("ok ", [6]) if ends else (TEXT, []))
    assert sample.finish_reason == ("stop" if ends else "length")


def test_a_stop_string_of_a_broken_character_completes_with_the_end() -> None:
    """The last bytes are no character until the answer is over: they become U+FFFD, which may be the stop
    string.
    """
    sample, piece = SampleAssembly(0, CODEC, SamplingParams(stop="\ufffd"), ()), Piece(0)
    start = CODEC.encode("\u00e9", add_special=False)[:1]
    assert sample.take(Tokens("r", tuple(start)), piece) is None
    assert not sample.over
    assert sample.take(Ended("r", "length"), piece) is None
    assert (piece.text, piece.finish_reason, sample.tokens) == ("", "stop", 1)


def test_without_a_tokenizer_an_answer_is_its_tokens() -> None:
    piece, _, told = assemble(SamplingParams(), codec=None)
    assert (piece.text, piece.token_ids, piece.finish_reason, told) == ("", IDS, "length", [])


def test_an_error_ends_a_sample_and_what_comes_behind_is_nobodys() -> None:
    sample, piece = SampleAssembly(0, CODEC, SamplingParams(), ()), Piece(0)
    with pytest.raises(CapacityError) as raised:
        sample.take(Ended("r", code="queue_full", message="many wait", param="model"), piece)
    assert (raised.value.code, raised.value.param) == (ErrorCode.QUEUE_FULL, "model")
    assert sample.over
    assert sample.take(scored(IDS), piece) is None
    assert piece == Piece(0)


def call_codec(folder: Path) -> TextCodec:
    """One in which the mark of Mistral's calls is a special token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", normalized=False, special=True)])
    codec = load_tokenizer(write_folder(folder, tokenizer))
    assert codec is not None
    return codec


USE = ToolUse((CLOCK,), ToolChoice.AUTO, FORMATS["mistral"])


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(("reason", "expected"), [("stop", TOOL_CALLS), ("length", "length")])
def test_calls_are_no_part_of_the_text_and_say_why_an_answer_ended(
    tmp_path: Path, step: int, reason: str, expected: str
) -> None:
    codec = call_codec(tmp_path)
    ids = codec.encode('Now. [TOOL_CALLS] [{"name": "clock", "arguments": {}}]', add_special=False)
    sample, piece = SampleAssembly(0, codec, SamplingParams(), (), USE), Piece(0)
    for at in range(0, len(ids), step):
        sample.take(Tokens("r", tuple(ids[at : at + step])), piece)
    sample.take(Ended("r", reason), piece)
    assert said_and_called([piece.text, *piece.calls]) == ("Now.", [("clock", "{}")])
    assert (piece.finish_reason, sample.finish_reason) == (expected, expected)
    assert piece.token_ids == ids


def test_an_answer_without_calls_is_text_although_there_are_tools(tmp_path: Path) -> None:
    codec = call_codec(tmp_path)
    sample, piece = SampleAssembly(0, codec, SamplingParams(), (), USE), Piece(0)
    sample.take(Tokens("r", tuple(codec.encode("hello [TOOL_CALLS", add_special=False))), piece)
    sample.take(Ended("r", "stop"), piece)
    assert (piece.text, piece.calls, piece.finish_reason) == ("hello [TOOL_CALLS", [], "stop")
