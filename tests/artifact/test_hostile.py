"""What a folder that somebody made to hurt may cost: little is read, little is done, before it is refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.artifact.corpus_config import LFS_POINTER, WEIGHTS
from tests.artifact.tiny import LAYERS, edit_config, tiny_base, write_lora

from loraplex.artifact import fields, matching
from loraplex.artifact.companions import Companions, read_companions
from loraplex.artifact.jsontext import MAX_DEPTH, MAX_VALUES, JsonError, parse_object, show
from loraplex.artifact.matching import Selector
from loraplex.artifact.patterns import StepBudget
from loraplex.artifact.peft_config import decode_config
from loraplex.artifact.read_artifact import load_adapter
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import (
    MAX_ADAPTER_TENSORS,
    MAX_ERROR_PARAM_CHARS,
    MAX_PATTERN_ENTRIES,
    MAX_PATTERN_STEPS,
    MAX_PATTERNS_CHARS,
    MAX_TOKENIZER_VALUES,
)


def refusal(folder: Path) -> CallerError:
    with pytest.raises(CallerError) as caught:
        load_adapter(folder, tiny_base())
    return caught.value


def write_header(folder: Path, entries: dict[str, Any], nbytes: int) -> None:
    """Weights of which only the header is there; the data is a hole."""
    text = json.dumps(entries).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a weight file."""
    reads: list[int] = []
    real = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        got = real(fd, buffers, offset)
        reads.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    return reads


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", [1 << 20, 512]),
        ("base_model.model.model.layers.0.self_attn.q_proj.nothing", [1 << 20, 512]),
        ("base_model.model.lm_head.base_layer.weight", [1 << 20, 512]),
    ],
)
def test_no_data_is_read_of_what_does_not_fit(
    tmp_path: Path, bytes_read: list[int], name: str, shape: list[int]
) -> None:
    folder = write_lora(tmp_path)
    nbytes = 4 * shape[0] * shape[1]
    write_header(folder, {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}, nbytes)
    assert refusal(folder).root.value == "caller"
    assert 0 < sum(bytes_read) < 4096


def test_more_tensors_than_any_base_has_modules(tmp_path: Path, bytes_read: list[int]) -> None:
    folder = write_lora(tmp_path)
    entries = {
        f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i in range(MAX_ADAPTER_TENSORS + 1)
    }
    write_header(folder, entries, 4 * len(entries))
    error = refusal(folder)
    assert error.code is ErrorCode.ADAPTER_TOO_LARGE
    assert f"{MAX_ADAPTER_TENSORS + 1} tensors, at most {MAX_ADAPTER_TENSORS}" in error.message


def test_as_many_patterns_as_are_read_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the modules of a large base, each by a pattern of its own."""
    base = tiny_base(layers=126)
    names = [module.name for module in base.modules()]
    more = [f"model.layers.{i}.self_attn.q_proj" for i in range(200, 200 + MAX_PATTERN_ENTRIES - len(names))]
    ranks = {name: 1 + index % 64 for index, name in enumerate([*more, *names])}
    assert len(ranks) == MAX_PATTERN_ENTRIES
    compiled: list[str] = []
    monkeypatch.setattr(matching, "compile_pattern", compiled.append)
    config = decode_config(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": ranks}
    )
    selector = Selector(config)
    assert [selector.rank(module) for module in base.modules()] == [ranks[name] for name in names]
    assert MAX_PATTERN_STEPS - selector._work.left < 30 * len(names)
    assert compiled == []


def test_a_plain_pattern_keeps_its_place_among_others() -> None:
    config = decode_config(
        {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": "all-linear",
            "rank_pattern": {r"layers\.1\..*": 9, "self_attn.q_proj": 5, "self_attn_q_proj": 7, ".*proj": 6},
        }
    )
    selector = Selector(config)
    ranks = {module.name: selector.rank(module) for module in tiny_base().modules()}
    assert ranks["model.layers.1.self_attn.q_proj"] == 9
    assert ranks["model.layers.0.self_attn.q_proj"] == 5
    assert ranks["model.layers.0.self_attn.k_proj"] == 6
    assert ranks["lm_head"] == 4


def test_patterns_are_counted_together_before_one_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(_: str) -> None:
        raise AssertionError("a pattern was parsed")

    monkeypatch.setattr(fields, "compile_pattern", parsed)
    for name in ("rank_pattern", "alpha_pattern"):
        folder = write_lora(tmp_path / name)
        entries = {f"{'.*' * 100}{index}": 4 for index in range(1000)}
        edit_config(folder, lambda c, name=name, entries=entries: c | {name: entries})
        error = refusal(folder)
        assert (error.code, error.param) == (ErrorCode.ADAPTER_CONFIG_INVALID, name)
        assert str(MAX_PATTERNS_CHARS) in error.message


@pytest.mark.parametrize("item", [b"[]", b"{}", b"0.5"])
def test_values_are_counted_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: bytes
) -> None:
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(json, "loads", loads)
    many = b'{"a":[' + b",".join([item] * (MAX_VALUES + 2)) + b"]}"
    with pytest.raises(JsonError, match=f"at most {MAX_VALUES}"):
        parse_object(many)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(many)
        with pytest.raises(CallerError, match=f"{name} has {MAX_VALUES + 1} commas"):
            read_companions(folder)


def test_a_tokenizers_values_are_counted_and_only_what_is_needed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b'{"merges":[' + b",".join([b"[]"] * (MAX_TOKENIZER_VALUES + 2)) + b"]}")
    with pytest.raises(CallerError, match=f"at most {MAX_TOKENIZER_VALUES}"):
        read_companions(tmp_path)
    for text in ('{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": [["a"]]}}', "[" * 100_000, "[]"):
        path.write_text(text)
        with pytest.raises(CallerError, match=r"tokenizer\.json is no tokenizer"):
            read_companions(tmp_path)
    path.write_text('{"model": {"vocab": {"a": 0}, "merges": [[["a"]]]}, "added_tokens": null}')
    assert read_companions(tmp_path, {"a": 0}.get) == Companions()


def test_a_long_field_is_cut_in_message_and_parameter(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    edit_config(folder, lambda c: c | {"x" * 1_000_000: 1})
    error = refusal(folder)
    assert (len(error.message) < 300, len(error.param or "")) == (True, MAX_ERROR_PARAM_CHARS)


def test_a_class_of_many_characters_costs_its_length() -> None:
    work = StepBudget()
    ranges = "".join(f"{chr(at)}-{chr(at + 1)}" for at in range(0x4E00, 0x4E00 + 3 * 2000, 3))
    pattern = matching.compile_pattern(f"[{ranges}]")
    pattern.fullmatch("b", work)
    assert MAX_PATTERN_STEPS - work.left >= 2000


def test_steps_end_before_a_processor_minds(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    edit_config(folder, lambda c: c | {"target_modules": "(.*.*)*" * 2000 + "x"})
    error = refusal(folder)
    assert (error.code, str(MAX_PATTERN_STEPS) in error.message) == (ErrorCode.ADAPTER_CONFIG_INVALID, True)


@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_depth_ends_at_its_limit(brackets: str) -> None:
    left, right = brackets[:-1], brackets[-1]
    good = '{"x":' + left * (MAX_DEPTH - 1) + "0" + right * (MAX_DEPTH - 1) + "}"
    assert list(parse_object(good.encode())) == ["x"]
    deep = '{"x":' + left * (MAX_DEPTH + 1) + "0" + right * (MAX_DEPTH + 1) + "}"
    with pytest.raises(JsonError, match="nests deeper"):
        parse_object(deep.encode())


def test_values_are_shown_as_json_writes_them() -> None:
    decoded = parse_object(
        b'{"v": [null, true, 1.50, "x", {"a": 1}], "n": 1.50, "long": "' + b"y" * 500 + b'"}'
    )
    assert show(decoded["v"]) == '[null, true, 1.5, "x", {"a": 1}]'
    assert show(decoded["n"]) == "1.50"
    assert show(decoded["long"]) == '"' + "y" * 79 + "..."
    assert show(["z" * 30] * 100_000) == f"{json.dumps(['z' * 30] * 3)[:80]}..."


def test_a_pointer_is_called_one(tmp_path: Path) -> None:
    for name in (WEIGHTS, "adapter_config.json"):
        folder = write_lora(tmp_path / name)
        (folder / name).write_bytes(LFS_POINTER)
        message = refusal(folder).message
        assert message.startswith(f"{name} is a Git LFS pointer to a file of 27280152 bytes")
        assert "git lfs pull" in message


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', "an XML document"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "a gzip archive"),
        (b"GGUF\x03\x00\x00\x00" + bytes(20), "a GGUF file"),
        (bytes(8), "its header is empty, expected an opening brace"),
        (b"\x02" + bytes(7) + b"[]", 'its header starts with "[", expected'),
        (b'{"error":"Repository not found"}', "begins with the text '{\"error\"'"),
        (b"\xff" * 20, "declares a header of 18446744073709551615 bytes"),
    ],
)
def test_what_is_not_safetensors_is_called_what_it_is(tmp_path: Path, head: bytes, words: str) -> None:
    folder = write_lora(tmp_path)
    (folder / WEIGHTS).write_bytes(head)
    error = refusal(folder)
    assert error.code is ErrorCode.ADAPTER_FILE_MALFORMED
    assert words in error.message


def test_messages_speak_no_python(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, use_dora=False)
    text = (folder / WEIGHTS).read_bytes()
    name = b"q_proj.lora_A.weight"
    (folder / WEIGHTS).write_bytes(text.replace(name, b"q_proj.lora_B...bias"[: len(name)], 1))
    assert "Kind." not in refusal(folder).message
    folder = write_lora(tmp_path)
    (folder / WEIGHTS).write_bytes(text.replace(name, b"q_proj.ia3_l.weights", 1))
    assert "Kind." not in refusal(folder).message
    for field, value in (("lora_alpha", None), ("r", [1.5, None]), ("peft_type", True)):
        folder = write_lora(tmp_path, **{field: value})
        message = refusal(folder).message
        assert not {"None", "True", "Decimal64"} & set(message.replace("[", " ").replace(",", " ").split())
        assert show(value) in message


def test_a_tensor_of_another_method_is_named_in_words(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, use_dora=True)
    error = refusal(folder)
    assert error.message.endswith("is a target, but has no tensor lora_magnitude_vector")
    folder = write_lora(tmp_path, lora_bias=False)
    raw = (folder / WEIGHTS).read_bytes()
    swapped = raw.replace(
        b"layers.0.self_attn.q_proj.lora_A.weight", b"layers.0.self_attn.q_proj.ia3_l.default"
    )
    assert swapped != raw
    (folder / WEIGHTS).write_bytes(swapped)
    assert refusal(folder).message.endswith("is ia3_l, model.layers.0.self_attn.q_proj takes lora_A, lora_B")


def test_a_whole_folder_still_loads(tmp_path: Path) -> None:
    assert load_adapter(write_lora(tmp_path), tiny_base()).tensors_applied == 4 * LAYERS
