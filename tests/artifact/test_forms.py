"""The forms in which people really have adapters: names, element types, carried weights, inert fields."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tests.artifact.tiny import (
    LAYERS,
    TinyTensors,
    edit_config,
    edit_tensors,
    lora_tensors,
    save_adapter,
    tiny_base,
    write_lora,
)

from loraplex.artifact.base_modules import BaseTensors
from loraplex.artifact.identify import identify
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import Artifact, Method
from loraplex.artifact.tensors import Dtype
from loraplex.artifact.vectors import ServedTensors
from loraplex.core.errors import CallerError, ErrorCode

BASE = "ab" * 32


def load(folder: Path) -> Artifact:
    return load_adapter(folder, tiny_base())


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {change(name): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n,
        lambda n: n.removeprefix("base_model.model."),
        lambda n: n.replace(".weight", ".default.weight"),
        lambda n: n.replace(".weight", ".my-adapter_1.weight"),
        lambda n: n.removeprefix("base_model.model.").replace(".weight", ".default.weight"),
    ],
    ids=["as PEFT writes", "no prefix", "infix", "other infix", "no prefix, infix"],
)
def test_names_do_not_change_the_identity(tmp_path: Path, change: Callable[[str], str]) -> None:
    plain = identify(load(write_lora(tmp_path / "plain")), BASE)
    folder = write_lora(tmp_path / "renamed")
    edit_tensors(folder, renamed(change))
    artifact = load(folder)
    assert artifact.report == f"{4 * LAYERS} of {4 * LAYERS} tensors applied, {2 * LAYERS} modules"
    assert identify(artifact, BASE) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.25},
        {"inference_mode": False},
        {"task_type": None},
        {"base_model_name_or_path": "some/base"},
        {"base_model_name_or_path": None},
        {"revision": "main"},
        {"fan_in_fan_out": True},
        {"peft_version": "0.9.0"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": None},
        {"auto_mapping": {"a": "b"}},
        {"modules_to_save": None},
        {"modules_to_save": []},
        {"megatron_core": "megatron.core"},
        {"loftq_config": {}},
        {"eva_config": None},
        {"qalora_group_size": 32},
        {"layer_replication": None},
        {"a_field_of_tomorrow": None},
        {"another": False},
        {"layers_pattern": None},
        {"layers_to_transform": []},
        {"exclude_modules": []},
        {"rank_pattern": {"o_proj": 9}},
        {"alpha_pattern": {}},
        {"lora_alpha": 8.0},
        {"rank_pattern": None},
        {"target_modules": r".*\.self_attn\.[qv]_proj"},
        {"target_modules": ["v_proj", "q_proj", "not_here"]},
        {"r": 9, "rank_pattern": {"proj": 4, "q_proj|v_proj": 4}},
        {"lora_alpha": 1, "alpha_pattern": {"[qv]_proj": 8}},
    ],
    ids=lambda f: next(iter(f.items())).__repr__()[:40],
)
def test_what_computes_the_same_has_the_same_identity(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = identify(load(write_lora(tmp_path / "plain")), BASE)
    assert identify(load(write_lora(tmp_path / "other", **fields)), BASE) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 9},
        {"lora_alpha": 8.000001},
        {"use_rslora": True},
        {"alpha_pattern": {"v_proj": 16}},
        {"alora_invocation_tokens": [1, 2]},
    ],
    ids=lambda f: next(iter(f)),
)
def test_what_computes_something_else_has_another_identity(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = identify(load(write_lora(tmp_path / "plain")), BASE)
    other = identify(load(write_lora(tmp_path / "other", **fields)), BASE)
    assert other.artifact != plain.artifact
    assert other.semantic != plain.semantic


def test_every_byte_counts(tmp_path: Path) -> None:
    seen = set()
    for index, name in enumerate([None, *sorted(lora_tensors())]):
        folder = write_lora(tmp_path / str(index))

        def nudge(tensors: dict[str, torch.Tensor], name: str | None = name) -> dict[str, torch.Tensor]:
            if name is not None:
                tensors[name].view(torch.int32)[0, 0] ^= 1
            return tensors

        edit_tensors(folder, nudge)
        seen.add(identify(load(folder), BASE).artifact)
    assert len(seen) == 1 + 4 * LAYERS


def test_the_element_type_is_part_of_the_identity(tmp_path: Path) -> None:
    digests = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        folder = write_lora(tmp_path / str(dtype))
        zeros = {name: torch.zeros_like(t, dtype=dtype) for name, t in lora_tensors().items()}
        save_file(zeros, folder / "adapter_model.safetensors")
        artifact = load(folder)
        assert {t.dtype.storage.itemsize for m in artifact.modules for t in m.tensors.values()} == {
            dtype.itemsize
        }
        digests[dtype] = identify(artifact, BASE).artifact
    assert len(set(digests.values())) == 3


@pytest.mark.parametrize("low", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_header_length_that_looks_like_a_pickle_is_none(tmp_path: Path, low: int) -> None:
    folder = write_lora(tmp_path)
    path = folder / "adapter_model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    wanted = (1 << 16) + low
    path.write_bytes(struct.pack("<Q", wanted) + raw[8 : 8 + length].ljust(wanted) + raw[8 + length :])
    assert load(folder).tensors_applied == 4 * LAYERS


def test_mixed_element_types_load(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    edit_tensors(folder, lambda t: {n: v.bfloat16() if "lora_A" in n else v for n, v in t.items()})
    kinds = {t.dtype for m in load(folder).modules for t in m.tensors.values()}
    assert kinds == {Dtype.FLOAT32, Dtype.BFLOAT16}


def test_tensor_data_cannot_be_written_to(tmp_path: Path) -> None:
    tensor = next(iter(load(write_lora(tmp_path)).modules[0].tensors.values()))
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0, 0] = 1


def test_a_large_file_is_read_in_parallel_with_the_same_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_lora(tmp_path)
    alone = identify(load(folder), BASE)
    monkeypatch.setattr("loraplex.artifact.threads.FROM_BYTES", 1)
    monkeypatch.setattr("loraplex.artifact.threads.os.cpu_count", lambda: 4)
    assert identify(load(folder), BASE) == alone


def head_and_embedding(folder: Path) -> Path:
    """An adapter of lm_head and embed_tokens, beside which PEFT saves both base weights."""
    save_adapter(folder, LoraConfig(r=2, target_modules=["lm_head", "embed_tokens"]))
    assert sum("base_layer" in name for name in load_file(folder / "adapter_model.safetensors")) == 2
    return folder


def test_carried_base_weights_are_proven_equal(tmp_path: Path) -> None:
    folder = head_and_embedding(tmp_path)
    artifact = load_adapter(folder, tiny_base(), TinyTensors())
    assert artifact.report == "6 of 6 tensors applied, 2 of them equal to the base, 2 modules"
    assert artifact.methods == {Method.LORA, Method.EMBEDDING}
    edit_tensors(folder, lambda t: {n: v for n, v in t.items() if "base_layer" not in n})
    bare = load_adapter(folder, tiny_base())
    assert identify(bare, BASE) == identify(artifact, BASE)


def test_weights_of_layers_without_an_adapter_are_proven_equal_too(tmp_path: Path) -> None:
    model = save_adapter(tmp_path, LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    artifact = load_adapter(tmp_path, tiny_base(), TinyTensors())
    assert artifact.carried == (
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
    )
    assert (
        artifact.report
        == f"{2 * LAYERS + 2} of {2 * LAYERS + 2} tensors applied, 2 of them equal to the base, "
        f"{LAYERS} modules"
    )
    edit_tensors(tmp_path, lambda t: {n: v + 1e-3 if "lm_head" in n else v for n, v in t.items()})
    with pytest.raises(CallerError, match=r"lm_head.*merge") as caught:
        load_adapter(tmp_path, tiny_base(), TinyTensors())
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED


def test_carried_base_weights_in_a_narrower_type_are_the_bases_rounded(tmp_path: Path) -> None:
    folder = head_and_embedding(tmp_path)
    edit_tensors(folder, lambda t: {n: v.bfloat16() if "base_layer" in n else v for n, v in t.items()})
    assert len(load_adapter(folder, tiny_base(), TinyTensors()).carried) == 2


def recast(folder: Path, *types: torch.dtype) -> None:
    """Take the repeated base weights through element types, one after the other."""

    def through(value: torch.Tensor) -> torch.Tensor:
        for kind in types:
            value = value.to(kind)
        return value

    edit_tensors(folder, lambda t: {n: through(v) if "base_layer" in n else v for n, v in t.items()})


def refused_carried(folder: Path, base: BaseTensors, served: Dtype | None) -> None:
    with pytest.raises(CallerError, match="replaces base weights") as caught:
        load_adapter(folder, tiny_base(), base, served=served)
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED


@pytest.mark.parametrize("served", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_carried_base_weights_may_be_those_of_the_served_type(tmp_path: Path, served: Dtype) -> None:
    """Trained on a rounded base and saved wide: the bits that a server of this type holds, not those of the
    file.
    """
    folder = head_and_embedding(tmp_path)
    narrow = getattr(torch, served.value)
    assert len(load_adapter(folder, tiny_base(), TinyTensors(), served=served).carried) == 2
    recast(folder, narrow, torch.float32)
    assert len(load_adapter(folder, tiny_base(), TinyTensors(), served=served).carried) == 2
    for other in (None, Dtype.FLOAT32, Dtype.FLOAT16 if served is Dtype.BFLOAT16 else Dtype.BFLOAT16):
        refused_carried(folder, TinyTensors(), other)


def test_carried_base_weights_equal_a_base_that_is_held_rounded(tmp_path: Path) -> None:
    """The file's weights beside a base whose own bits are gone already; in float32 they differ."""
    folder = head_and_embedding(tmp_path)
    resident = ServedTensors(TinyTensors(), Dtype.BFLOAT16)
    assert len(load_adapter(folder, tiny_base(), resident, served=Dtype.BFLOAT16).carried) == 2
    refused_carried(folder, resident, Dtype.FLOAT32)


def test_carried_base_weights_that_do_not_fit_the_served_type_are_others(tmp_path: Path) -> None:
    folder = head_and_embedding(tmp_path)
    edit_tensors(folder, lambda t: {n: v + 1e5 if "base_layer" in n else v for n, v in t.items()})
    refused_carried(folder, TinyTensors(), Dtype.FLOAT16)


@pytest.mark.parametrize("served", [None, Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_changed_base_weights_are_refused_by_name(tmp_path: Path, name: str, served: Dtype | None) -> None:
    folder = head_and_embedding(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for key, value in tensors.items():
            if "base_layer" in key and name in key:
                value[-1, -1] += 1e-2
        return tensors

    edit_tensors(folder, change)
    with pytest.raises(CallerError) as caught:
        load_adapter(folder, tiny_base(), TinyTensors(), served=served)
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED
    assert name in caught.value.message


def test_invocation_tokens_are_kept_in_order(tmp_path: Path) -> None:
    artifact = load(write_lora(tmp_path, alora_invocation_tokens=[3, 1, 3]))
    assert artifact.invocation_tokens == (3, 1, 3)
    assert artifact.methods == {Method.LORA, Method.ALORA}


def test_alpha_text_is_exact(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    for text, expected in (
        ("8", "8"),
        ("8.0", "8"),
        ("0.8e1", "8"),
        ("0.1", "0.1"),
        ("1e-3", "0.001"),
        ("12345678.5", "12345678.5"),
    ):
        edit_config(folder, lambda c: c | {"lora_alpha": "ALPHA"})
        path = folder / "adapter_config.json"
        path.write_text(path.read_text().replace('"ALPHA"', text))
        module = load(folder).modules[0]
        assert module.alpha == expected
        assert module.scale == float(text) / 4
        assert json.loads(path.read_text())["lora_alpha"] == float(text)


def test_extreme_values_survive(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    largest = torch.finfo(torch.float32).max
    edit_tensors(
        folder, lambda t: {n: torch.full_like(v, largest if "lora_A" in n else -0.0) for n, v in t.items()}
    )
    tensors = [t for m in load(folder).modules for t in m.tensors.values()]
    assert {float(np.abs(t.float32()).max()) for t in tensors} == {largest, 0.0}
