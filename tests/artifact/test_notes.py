"""What an adapter's files say beside its weights: read, held against the base, and said."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.artifact.corpus_config import LFS_POINTER, WEIGHTS
from tests.artifact.tiny import VOCAB, tiny_base, write_lora

from loraplex.artifact.base_facts import BaseFacts, base_names, hub_commit
from loraplex.artifact.companions import COMPANION_FILES, AddedText, Companions, read_companions
from loraplex.artifact.notes import NoteKind
from loraplex.artifact.read_artifact import load_adapter
from loraplex.core.errors import CallerError, ErrorCode

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
FACTS = BaseFacts(names=base_names(["/models/Tiny-Llama", "tiny"]), commit=COMMIT, token_ids=60)


def notes(folder: Path, facts: BaseFacts = FACTS) -> list[NoteKind]:
    return [note.kind for note in load_adapter(folder, tiny_base(), facts=facts).notes]


@pytest.mark.parametrize(
    ("named", "same"),
    [
        ("owner/Tiny-Llama", True),
        ("/elsewhere/tiny-llama/", True),
        ("TINY", True),
        ("C:\\models\\tiny", True),
        (f"/cache/models--owner--Tiny-Llama/snapshots/{COMMIT}", True),
        ("tiny.gguf", True),
        (None, True),
        ("", True),
        (".", True),
        ("owner/Tiny-Llama-2", False),
        ("/elsewhere/checkpoint-500", False),
        (f"/cache/models--owner--other/snapshots/{COMMIT}", False),
    ],
)
def test_another_base_is_said_and_refused_where_that_is_asked(
    tmp_path: Path, named: str | None, same: bool
) -> None:
    folder = write_lora(tmp_path, base_model_name_or_path=named)
    assert notes(folder) == ([] if same else [NoteKind.OTHER_BASE])
    if same:
        assert notes(folder, replace(FACTS, strict=True)) == []
        return
    with pytest.raises(CallerError, match="served here is tiny, tiny-llama") as caught:
        notes(folder, replace(FACTS, strict=True))
    assert caught.value.code is ErrorCode.ADAPTER_BASE_MISMATCH
    assert json.dumps(named) in caught.value.message


def test_another_revision_of_the_base_is_said(tmp_path: Path) -> None:
    for revision, found in ((OTHER, [NoteKind.OTHER_BASE_REVISION]), (COMMIT, []), ("main", []), (None, [])):
        folder = write_lora(tmp_path, base_model_name_or_path="owner/tiny", revision=revision)
        assert notes(folder) == found
    folder = write_lora(tmp_path, base_model_name_or_path=f"models--a--tiny/snapshots/{OTHER}")
    assert notes(folder) == [NoteKind.OTHER_BASE_REVISION]
    with pytest.raises(CallerError):
        notes(folder, replace(FACTS, strict=True))
    assert hub_commit("/models/tiny") is None


def test_a_head_that_reaches_masked_tokens_is_said(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, target_modules=["lm_head"])
    stem = "base_model.model.lm_head.lora_"
    save_file(
        {f"{stem}A.weight": torch.ones(4, 32), f"{stem}B.weight": torch.ones(VOCAB, 4)}, folder / WEIGHTS
    )
    assert notes(folder) == [NoteKind.MASKED_TOKENS]
    (note,) = load_adapter(folder, tiny_base(), facts=FACTS).notes
    assert "token ids 60 to 63" in note.message
    put(folder, added_tokens={"<a>": 60, "<b>": 61})
    assert "token ids 62 to 63" in load_adapter(folder, tiny_base(), facts=FACTS).notes[0].message
    (folder / "added_tokens.json").unlink()
    assert notes(folder, BaseFacts(FACTS.names, token_ids=VOCAB)) == []
    assert notes(folder, BaseFacts(FACTS.names)) == []
    assert notes(write_lora(tmp_path / "linears")) == []


def put(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        path = folder / f"{name}.json" if name != "template" else folder / "chat_template.jinja"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_companions_are_read_wherever_they_are_written(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    assert read_companions(folder) == Companions()
    put(folder, chat_template={"chat_template": "from json"})
    assert read_companions(folder).chat_template == "from json"
    put(
        folder,
        tokenizer_config={
            "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
        },
    )
    assert read_companions(folder).chat_template == "d"
    put(
        folder,
        tokenizer_config={
            "chat_template": "from config",
            "eos_token": {"content": "<e>"},
            "bos_token": "<s>",
        },
    )
    found = read_companions(folder)
    assert (found.chat_template, found.eos_token) == ("from config", "<e>")
    put(folder, template="from jinja", generation_config={"eos_token_id": [7, 2, 7]})
    found = read_companions(folder)
    assert (found.chat_template, found.eos_token_ids) == ("from jinja", (2, 7))
    put(folder, tokenizer={"added_tokens": [{"id": 61, "content": "<a>"}]})
    assert read_companions(folder).added == (plain(61, "<a>"),)
    put(
        folder, added_tokens={"<b>": 62, "<a>": 61}, special_tokens_map={"additional_special_tokens": ["<b>"]}
    )
    assert read_companions(folder).added == (plain(61, "<a>"), AddedText(62, "<b>"))
    decoder = {
        "63": {"content": "<c>", "special": True, "rstrip": True},
        "61": {"content": "<a>", "special": True},
    }
    put(folder, tokenizer_config={"added_tokens_decoder": decoder})
    assert read_companions(folder).added == (AddedText(61, "<a>"), AddedText(63, "<c>", rstrip=True))
    put(
        folder,
        tokenizer_config={"added_tokens_decoder": decoder | {"61": {"content": "<a>"}}, "pad_token": "<a>"},
    )
    assert read_companions(folder).added[0] == AddedText(61, "<a>")
    put(folder, tokenizer_config={"added_tokens_decoder": {}})
    assert read_companions(folder).added == (plain(61, "<a>"),)


def plain(index: int, text: str) -> AddedText:
    """An added token that is part of a text like any other."""
    return AddedText(index, text, special=False, normalized=True)


@pytest.mark.parametrize(
    ("config", "beside", "end"),
    [
        ({}, {"eos_token": "<e>"}, "<e>"),
        ({"eos_token": "<c>"}, {"eos_token": {"content": "<e>", "lstrip": False}}, "<e>"),
        ({"eos_token": "<c>", "added_tokens_decoder": {}}, {"eos_token": "<e>"}, "<c>"),
        ({"eos_token": None, "added_tokens_decoder": {}}, {"eos_token": "<e>"}, "<e>"),
        ({"eos_token": "<c>"}, {}, "<c>"),
        ({"eos_token": None}, {}, None),
    ],
)
def test_the_end_token_is_the_one_that_transformers_takes(
    tmp_path: Path, config: Any, beside: Any, end: str | None
) -> None:
    folder = put(write_lora(tmp_path), tokenizer_config=config, special_tokens_map=beside)
    assert read_companions(folder).eos_token == end


@pytest.mark.parametrize("form", ["bpe", "unigram"])
def test_another_vocabulary_is_told_by_its_first_tokens(tmp_path: Path, form: str) -> None:
    known = {f"t{index}": index for index in range(60)}

    def vocabulary(changes: dict[str, int]) -> dict[str, Any]:
        ids = known | changes
        listed = [[text, -1.0] for text in sorted(ids, key=lambda text: ids[text])]
        return {"model": {"vocab": ids if form == "bpe" else listed}}

    folder = put(write_lora(tmp_path), tokenizer=vocabulary({}))
    assert read_companions(folder, known.get).others == ()
    more = {f"n{index}": 60 + index for index in range(20)}
    put(folder, tokenizer=vocabulary(more))
    assert read_companions(folder, known.get).others == tuple((60 + i, f"n{i}") for i in range(8))
    assert read_companions(folder).others == ()
    artifact = load_adapter(folder, tiny_base(), facts=FACTS, token_id=known.get)
    assert [note.kind for note in artifact.notes] == [NoteKind.OTHER_VOCABULARY]
    assert '"n0" (60), "n1" (61)' in artifact.notes[0].message


def test_what_differs_from_the_base_is_said(tmp_path: Path) -> None:
    theirs = Companions(
        chat_template="t", eos_token_ids=(2,), special=(("eos_token", "</s>"),), added=(AddedText(2, "</s>"),)
    )
    facts = BaseFacts(FACTS.names, token_ids=60, companions=theirs)
    folder = put(
        write_lora(tmp_path),
        template="t",
        generation_config={"eos_token_id": 2},
        tokenizer_config={"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}},
    )
    assert notes(folder, facts) == []
    put(folder, template="other")
    assert notes(folder, facts) == [NoteKind.CHAT_TEMPLATE]
    put(folder, generation_config={"eos_token_id": [2, 5]})
    assert notes(folder, facts) == [NoteKind.CHAT_TEMPLATE, NoteKind.END_TOKENS]
    put(folder, template="t", generation_config={}, added_tokens={"<x>": 61, "<y>": 64})
    put(folder, tokenizer_config={"eos_token": "<|im_end|>"})
    artifact = load_adapter(folder, tiny_base(), facts=facts)
    assert [note.kind for note in artifact.notes] == [
        NoteKind.END_TOKENS,
        NoteKind.ADDED_TOKENS,
        NoteKind.ADDED_TOKENS,
    ]
    text = " / ".join(note.message for note in artifact.notes)
    assert '"<|im_end|>"' in text
    assert '"<x>" (61), "<y>" (64)' in text
    assert "reach 64, the base's vocabulary ends at 64: they are not used" in text
    assert [(token.index, token.text) for token in artifact.companions.added] == [(61, "<x>"), (64, "<y>")]


@pytest.mark.parametrize("name", COMPANION_FILES)
def test_a_companion_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    for index, damage in enumerate(
        (
            os.mkfifo,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.mkdir(),
            lambda path: path.write_bytes(b"\xff\xfe"),
            lambda path: os.truncate(path, 64 << 20) if path.write_bytes(b"") == 0 else None,
        )
    ):
        folder = write_lora(tmp_path / str(index))
        damage(folder / name)
        with pytest.raises(CallerError) as caught:
            load_adapter(folder, tiny_base())
        assert caught.value.code is ErrorCode.ADAPTER_FILE_MALFORMED
        assert name in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("generation_config.json", '{"eos_token_id": [true]}'),
        ("added_tokens.json", '{"<a>": -1}'),
        ("added_tokens.json", '{"<a>": 61, "<b>": 61}'),
        ("added_tokens.json", '{"": 61}'),
        ("added_tokens.json", '{"\\ud800": 61}'),
        ("tokenizer_config.json", '{"eos_token": "\\udfff"}'),
        ("tokenizer_config.json", '{"eos_token": 2}'),
        ("special_tokens_map.json", '{"eos_token": ["\\ud800"]}'),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}'),
        ("tokenizer_config.json", '{"chat_template": {"default": "x"}}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 3}]}'),
        ("tokenizer.json", '{"added_tokens": [{"id": 61, "content": "<a>"}, {"id": 61, "content": "<b>"}]}'),
        ("tokenizer.json", '{"added_tokens": ["<a>"]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "<a>"}}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", LFS_POINTER.decode()),
        ("tokenizer_config.json", json.dumps({"chat_template": "x" * 140_000})),
    ],
)
def test_what_a_companion_may_not_say(tmp_path: Path, name: str, text: str) -> None:
    folder = write_lora(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(CallerError) as caught:
        load_adapter(folder, tiny_base())
    assert (caught.value.code, name in caught.value.message) == (ErrorCode.ADAPTER_FILE_MALFORMED, True)


def test_companions_and_notes_are_in_no_digest(tmp_path: Path) -> None:
    from loraplex.artifact.identify import identify

    plain = load_adapter(write_lora(tmp_path / "a"), tiny_base())
    other = load_adapter(put(write_lora(tmp_path / "b"), template="t"), tiny_base(), facts=FACTS)
    assert plain.companions != other.companions
    assert identify(plain, "0" * 64) == identify(other, "0" * 64)
