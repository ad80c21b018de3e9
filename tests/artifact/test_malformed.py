"""One thing wrong at a time: each mutation of a valid adapter is refused with the code of the invariant it
breaks.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.artifact.corpus import CASES
from tests.artifact.corpus_config import (
    A0,
    JSON,
    LARGE,
    MALFORMED,
    PICKLE,
    Q0,
    SHAPE,
    SOURCE,
    UNMATCHED,
    UNSUPPORTED,
    WEIGHTS,
    Mutation,
)
from tests.artifact.corpus_weights import (
    FILES,
    INDEX,
    header,
    put,
    raw,
    remove,
    shards,
    tensors,
    write_shards,
)
from tests.artifact.tiny import LAYERS, tiny_base, write_lora

from loraplex.artifact.base_modules import BaseModules
from loraplex.artifact.read_artifact import load_adapter
from loraplex.core.errors import CallerError, ErrorCode


def refusal(folder: Path, base: BaseModules | None = None) -> CallerError:
    with pytest.raises(CallerError) as caught:
        load_adapter(folder, base or tiny_base())
    return caught.value


@pytest.mark.parametrize(("group", "name", "mutate", "code"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_refused_with_its_code(
    tmp_path: Path, group: str, name: str, mutate: Mutation, code: ErrorCode
) -> None:
    folder = write_lora(tmp_path / "adapter")
    assert load_adapter(folder, tiny_base()).tensors_applied == 4 * LAYERS
    mutate(folder)
    error = refusal(folder)
    assert error.code is code, str(error)
    assert error.message
    assert len(error.message) < 600
    assert code is SOURCE or str(tmp_path) not in error.message


def test_the_corpus_is_large_enough() -> None:
    assert len(CASES) >= 150
    assert len({(c[0], c[1]) for c in CASES}) == len(CASES)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "weights.txt").write_bytes(b"x")
    assert refusal(tmp_path / "weights.bin").code is PICKLE
    assert refusal(tmp_path / "weights.txt").code is SOURCE
    assert refusal(tmp_path / "nowhere").code is SOURCE
    assert refusal(tmp_path / "nul\0byte").code is SOURCE


def test_an_initialisation_that_changes_the_base_says_what_to_do(tmp_path: Path) -> None:
    error = refusal(write_lora(tmp_path, init_lora_weights="pissa"))
    assert "path_initial_model_for_weight_conversion" in error.message


def refused_saying(folder: Path, code: ErrorCode, words: str, bias: bool = False) -> None:
    error = refusal(folder, tiny_base(bias=bias))
    assert (error.code, words in error.message) == (code, True), str(error)


def test_two_names_of_one_factor_are_named(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    put(A0.removeprefix("base_model.model."), torch.zeros(4, 32))(folder)
    refused_saying(folder, UNMATCHED, "are both lora_A")


def test_biases_need_a_mode_a_target_and_a_bias_in_the_base(tmp_path: Path) -> None:
    for index, (mode, module, base_bias, words) in enumerate(
        [
            ("none", "q_proj", True, "bias is none"),
            ("lora_only", "k_proj", True, "bias is lora_only"),
            ("all", "q_proj", False, "has none in the base"),
        ]
    ):
        folder = write_lora(tmp_path / str(index), bias=mode)
        put(f"{Q0.replace('q_proj', module)}.bias", torch.ones(32))(folder)
        refused_saying(folder, UNMATCHED, words, base_bias)


def embedding(folder: Path, **fields: Any) -> Path:
    write_lora(folder, target_modules=["embed_tokens"], **fields)
    stem = "base_model.model.model.embed_tokens.lora_"
    save_file(
        {f"{stem}embedding_A": torch.zeros(4, 64), f"{stem}embedding_B": torch.zeros(32, 4)}
        | ({f"{stem}magnitude_vector": torch.ones(1, 32)} if fields.get("use_dora") else {}),
        folder / WEIGHTS,
    )
    return folder


def test_an_embedding_takes_plain_factors_only(tmp_path: Path) -> None:
    assert load_adapter(embedding(tmp_path / "plain"), tiny_base()).tensors_applied == 2
    refused_saying(embedding(tmp_path / "dora", use_dora=True), UNSUPPORTED, "DoRA on model.embed_tokens")
    alora = embedding(tmp_path / "alora", alora_invocation_tokens=[1])
    refused_saying(alora, UNSUPPORTED, "plain LoRA factors only")


@pytest.mark.parametrize("shape", [(31,), (33,), (1, 32), (32, 1), (), (0,)])
def test_a_vector_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = write_lora(tmp_path, target_modules=["q_proj"], use_dora=True)
    tensors(lambda t: [t.pop(name) for name in list(t) if "v_proj" in name])(folder)
    stems = [Q0.replace(".0.", f".{layer}.") for layer in range(LAYERS)]
    tensors(lambda t: t.update({f"{stem}.lora_magnitude_vector": torch.ones(32) for stem in stems}))(folder)
    assert load_adapter(folder, tiny_base()).tensors_applied == 3 * LAYERS
    put(f"{Q0}.lora_magnitude_vector", torch.ones(shape))(folder)
    assert refusal(folder).code is SHAPE


def test_messages_name_what_is_missing_or_wrong(tmp_path: Path) -> None:
    cases: list[tuple[Mutation, ErrorCode, str]] = [
        (remove(JSON), SOURCE, "adapter_config.json is not in"),
        (header(lambda _: {}), MALFORMED, "holds no tensor"),
        (raw(lambda t: t[:8] + b" " + t[9:]), MALFORMED, "expected an opening brace"),
        ({name: mutate for name, mutate, _ in FILES}["tensor in two shards"], MALFORMED, "lies in"),
        (shards(lambda _: None, lambda f: (f / INDEX).write_text("{" + " " * (5 << 20))), MALFORMED,
        "is larger than"),
    ]  # fmt: skip
    for index, (mutate, code, words) in enumerate(cases):
        folder = write_lora(tmp_path / str(index))
        mutate(folder)
        refused_saying(folder, code, words)
    refused_saying(tmp_path / "nowhere", SOURCE, f"{tmp_path}/nowhere does not exist")


def test_the_count_is_a_check_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_lora(tmp_path)
    put("base_model.model.lm_head.base_layer.weight", torch.ones(64, 32))(folder)
    monkeypatch.setattr("loraplex.artifact.resolve.check_carried", lambda *_: ())
    refused_saying(folder, UNMATCHED, "12 of 13 tensors were applied")


def test_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_lora(tmp_path)
    monkeypatch.setattr("loraplex.artifact.safetensors_file.MAX_ADAPTER_TENSORS", 11)
    assert refusal(folder).code is LARGE
    monkeypatch.undo()
    monkeypatch.setattr("loraplex.artifact.safetensors_file.MAX_ADAPTER_BYTES", 100)
    assert refusal(folder).code is LARGE
    monkeypatch.undo()
    monkeypatch.setattr("loraplex.artifact.source.MAX_ADAPTER_BYTES", 100)
    assert refusal(folder).code is LARGE
    monkeypatch.undo()
    monkeypatch.setattr("loraplex.artifact.source.MAX_ADAPTER_TENSORS", 11)
    assert refusal(folder).code is LARGE


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_lora(tmp_path)
    real = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, buffers, offset) if offset < 4096 else 0

    monkeypatch.setattr(os, "preadv", short)
    assert refusal(folder).code is MALFORMED


def test_shards_load_as_one(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    whole = load_adapter(folder, tiny_base())
    write_shards(folder)
    parts = load_adapter(folder, tiny_base())
    digests = [[t.sha256 for m in a.modules for t in m.tensors.values()] for a in (whole, parts)]
    assert digests[0] == digests[1]
    assert parts.tensors_applied == 4 * LAYERS


def test_what_may_not_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read everything has to be told by the system that something is closed."""
    folder = write_lora(tmp_path)
    real = Path.stat
    for closed in (tmp_path.name, "adapter_config.json", "adapter_model.safetensors"):

        def stat(path: Path, *, follow_symlinks: bool = True, closed: str = closed) -> os.stat_result:
            if path.name == closed:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, follow_symlinks=follow_symlinks)

        monkeypatch.setattr(Path, "stat", stat)
        refused_saying(folder, SOURCE, f"{closed} cannot be read: Permission denied")
        monkeypatch.undo()
