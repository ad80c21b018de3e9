"""Detokenisation: the split of a stream never matters, characters and stop strings are never cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.tiny_text import TEMPLATE, byte_codec, byte_tokenizer, metaspace_tokenizer, write_folder

from loraplex.build.engine_build import end_tokens
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.text import codec as text_module
from loraplex.text.chat_template import ChatTemplate
from loraplex.text.codec import TextCodec, load_tokenizer
from loraplex.text.detokenizer import MAX_HELD_TOKENS, Detokenizer
from loraplex.text.stop_strings import StopStrings

BYTE = TextCodec(byte_tokenizer(), {1, 2}, "<|start|>", None)
META = TextCodec(metaspace_tokenizer(), {2}, "<s>", None)
TEXTS = st.text(st.sampled_from("hello w STOP\n👩‍🚀日本語é\u0301e\u0301🇩🇪ß"), max_size=30)


def stream(
    codec: TextCodec, ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()
) -> tuple[str, int | None]:
    detokenizer, out, at = Detokenizer(codec, stops), "", 0
    for cut in [*sorted(c % (len(ids) + 1) for c in cuts), len(ids)]:
        out += detokenizer.push(ids[at:cut])
        at = cut
    out += detokenizer.finish()
    return out, detokenizer.stopped_at


def cut_by_text(text: str, stops: tuple[str, ...]) -> str:
    """What the output must be, from the text alone: up to the stop string that completes first."""
    for end in range(len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)]
    return text


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
@pytest.mark.parametrize("codec", [BYTE, META], ids=["byte", "metaspace"])
def test_any_split_gives_the_text_of_the_whole(codec: TextCodec, text: str, cuts: list[int]) -> None:
    ids = codec.encode(text, add_special=False)
    assert stream(codec, ids, cuts) == (codec.decode(ids), None)
    if codec is BYTE:
        assert codec.decode(ids) == text


@pytest.mark.parametrize("codec", [BYTE, META], ids=["byte", "metaspace"])
@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_tokens_that_it_would_have_if_it_were_short(
    codec: TextCodec, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("hello w STOP\n👩‍🚀日本語é" * 20, "<|start|>hello" * 3, " \n  \n", "h" * 500):
        short = codec.encode(text, special)
        monkeypatch.setattr(text_module, "SHORT_TEXT_CHARS", 0)
        assert codec.encode(text, special) == short
        monkeypatch.undo()


def test_what_cannot_fit_is_known_without_tokenising() -> None:
    assert BYTE.surely_exceeds("x" * (9 * 10 + 1), 10)  # no token is longer than <|start|>
    assert not BYTE.surely_exceeds("x" * 90, 10)
    assert not META.surely_exceeds("x" * 10_000, 10), "its normaliser may shorten a text"


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=8),
    stops=st.lists(st.text(st.sampled_from("loSTOP 日👩e\u0301"), min_size=1, max_size=4), max_size=3).map(
        tuple
    ),
)
def test_stop_strings_depend_on_the_text_only(text: str, cuts: list[int], stops: tuple[str, ...]) -> None:
    ids = BYTE.encode(text, add_special=False)
    out, stopped = stream(BYTE, ids, cuts, stops)
    assert out == cut_by_text(text, stops)
    assert stopped == stream(BYTE, ids, [], stops)[1]
    assert (stopped is not None) == any(stop in text for stop in stops)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(3, 258), max_size=24), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_arbitrary_bytes_are_split_invariant_and_lose_nothing(ids: list[int], cuts: list[int]) -> None:
    assert stream(BYTE, ids, cuts)[0] == BYTE.decode(ids)


def test_incomplete_character_is_held_until_it_is_whole() -> None:
    ids = BYTE.encode("👩", add_special=False)
    detokenizer = Detokenizer(BYTE)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "👩"]
    assert Detokenizer(BYTE).push(ids[:2]) == ""
    cut = Detokenizer(BYTE)
    cut.push(ids[:2])
    assert cut.finish() == "\ufffd"


def test_endless_broken_bytes_do_not_grow_the_window() -> None:
    token = next(i for i in range(3, 259) if BYTE.token_bytes(i) == b"\xff")
    detokenizer = Detokenizer(BYTE)
    out = detokenizer.push([token] * 500)
    assert len(detokenizer._window) <= 2 * MAX_HELD_TOKENS + 2
    assert out + detokenizer.finish() == "\ufffd" * 500


@given(
    early=st.text(st.sampled_from("abc"), max_size=6),
    late=st.text(st.sampled_from("abc"), max_size=8),
    stops=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_that_completes_early_is_none(early: str, late: str, stops: list[str]) -> None:
    """It may begin there."""
    text, strings, out, stopped = early + late, StopStrings(stops, ()), "", False
    for at, character in enumerate(text):
        more, stopped = strings.add(character, early=at < len(early))
        out += more
        if stopped:
            break
    out += "" if stopped else strings.add("", final=True)[0]
    ends = [end for end in range(len(early) + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert stopped == bool(ends)
    whole = text[: ends[0]] if ends else text
    longest = max((len(stop) for stop in stops if ends and whole.endswith(stop)), default=0)
    assert out == whole[: len(whole) - longest]


def test_stop_string_over_three_tokens_is_found_at_its_last_token() -> None:
    ids = [i for c in "ok a-b-c later" for i in BYTE.encode(c, add_special=False)]
    detokenizer = Detokenizer(BYTE, ["a-b"])
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join(pieces) == "ok "
    assert pieces[3:5] == ["", ""]
    assert detokenizer.stopped_at == 5
    assert detokenizer.finish() == ""


def test_held_stop_prefix_comes_out_when_it_does_not_complete() -> None:
    detokenizer = Detokenizer(BYTE, ["STOP"])
    assert detokenizer.push(BYTE.encode("xSTO", add_special=False)) == "x"
    assert detokenizer.push(BYTE.encode("RY", add_special=False)) == "STORY"
    assert detokenizer.push(BYTE.encode("ST", add_special=False)) == ""
    assert detokenizer.finish() == "ST"


def test_context_keeps_the_space_of_a_continued_word() -> None:
    world = META.encode("world", add_special=False)
    assert Detokenizer(META).push(world) == "world"
    assert Detokenizer(META, context=META.encode("hello", add_special=False)).push(world) == " world"


def test_special_tokens_leave_no_text_and_no_gap() -> None:
    ids = [*META.encode("hello", add_special=False), 1, *META.encode("world", add_special=False)]
    assert stream(META, ids, [])[0] == "hello world" == META.decode(ids)
    assert Detokenizer(BYTE, skip_special=False).push([1]) == "<|end|>"


def test_load_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    codec = byte_codec(tmp_path)
    assert (codec.eos_token_ids, codec.vocab_size) == ({1, 2}, 3 + 256 + 8)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CallerError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_end_tokens_come_from_the_tokenizer_when_no_configuration_names_them(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_tokenizer())
    (tmp_path / "generation_config.json").unlink()
    codec = load_tokenizer(tmp_path)
    assert codec is not None
    assert codec.eos_token_ids == {1}
    assert end_tokens(tmp_path) == (1,)  # an engine sees what its clients see


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [([5, 3], 7, (3, 5)), (4, [7], (4,)), (None, 7, (7,)), ([], [7, 8], (7, 8)), (None, None, ())],
)
def test_the_first_configuration_that_names_end_tokens_decides(
    tmp_path: Path, generation: object, config: object, ends: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert end_tokens(tmp_path) == ends


@pytest.mark.parametrize("value", ["2", True, [1, "2"], {"id": 1}, 1.5])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: object) -> None:
    write_folder(tmp_path, byte_tokenizer())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    for read in (end_tokens, load_tokenizer):
        with pytest.raises(CallerError) as caught:
            read(tmp_path)
        assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_bos_is_never_doubled(tmp_path: Path) -> None:
    codec = byte_codec(tmp_path)
    assert codec.encode("a") == [0, *codec.encode("a", add_special=False)]
    assert codec.encode("<|start|>a") == codec.encode("a")
    ids = codec.chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1
    assert codec.decode(ids, skip_special=False) == "<|start|>[user]hi<|end|>[assistant]"


def test_template_file_wins_and_templates_are_confined(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_tokenizer())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'].__class__.__mro__ }}")
    codec = load_tokenizer(tmp_path)
    assert codec is not None
    with pytest.raises(CallerError) as caught:
        codec.chat([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<ü>"}'),
        ("{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
    ],
)
def test_what_templates_rely_on(tmp_path: Path, source: str, text: str) -> None:
    codec = load_tokenizer(write_folder(tmp_path, byte_tokenizer(), source))
    assert codec is not None
    assert codec.decode(codec.chat([{"role": "user", "content": "<ü>"}])) == text


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{% for m in messages %}[{{ m.role }}]{% endfor %}", "[system][user]"),
        (
            "{% for m in messages %}[{{ 'developer' if m.role == 'developer' else m.role }}]{% endfor %}",
            "[developer][user]",
        ),
    ],
)
def test_a_developer_is_a_system_to_templates_that_do_not_know_it(source: str, roles: str) -> None:
    said = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert ChatTemplate(source, {}).render(said) == roles


def test_template_refusals_and_absence(tmp_path: Path) -> None:
    codec = load_tokenizer(write_folder(tmp_path, byte_tokenizer(), "{{ raise_exception('no system') }}"))
    assert codec is not None
    with pytest.raises(CallerError, match="no system"):
        codec.chat([{"role": "user", "content": "x"}])
    with pytest.raises(CallerError) as caught:
        BYTE.chat([])
    assert caught.value.code is ErrorCode.UNSUPPORTED_OPTION


def test_token_text_and_bytes() -> None:
    word, emoji = BYTE.encode("hello", add_special=False), BYTE.encode("👩", add_special=False)
    assert BYTE.token_text(word[0]) == "hello"
    assert BYTE.token_text(emoji[0]) == "bytes:\\xf0"
    assert b"".join(BYTE.token_bytes(t) for t in emoji).decode() == "👩"
    assert BYTE.token_text(1) == "<|end|>"
    assert META.token_text(META.encode("world", add_special=False)[0]) in (" world", " ")
    assert BYTE.token_bytes(10_000) == b""


def test_text_loads_no_torch() -> None:
    code = "import loraplex.text.codec, sys, json; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": "src"}
    )
    assert json.loads(done.stdout) is False


def test_template_of_the_rig_is_used() -> None:
    assert "add_generation_prompt" in TEMPLATE


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_tokenizer())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CallerError, match="is not readable text") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
