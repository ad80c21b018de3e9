"""Every malformed manifest and launch snapshot of the corpus again, through the command that users have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.exact.identity_cases import ACTIVATED, MUTATIONS, RELATIONS, launch, mutate, write

from loraplex import cli
from loraplex.artifact.read_artifact import load_adapter
from loraplex.build.base_model import base_identity, base_modules, hash_weights, read_config
from loraplex.core.errors import ErrorCode
from loraplex.identity.manifest import RuntimeManifest, encode_manifest
from loraplex.model.spec import spec_from_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with the worked example's projections, [8, 8]; its weights are only hashed here."""
    folder = tmp_path_factory.mktemp("base")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(8, dtype=np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def manifest(base: Path, adapter: Path) -> RuntimeManifest:
    spec = spec_from_config(read_config(base))
    modules = base_modules(spec)
    abi = base_identity(spec, modules, hash_weights(base))
    return launch(load_adapter(adapter, modules), abi=abi)


class Verify:
    def __init__(self, base: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.base, self.file, self.capsys = base, file, capsys

    def __call__(self, adapter: Path, text: bytes) -> tuple[int, Any]:
        self.file.write_bytes(text)
        with pytest.raises(SystemExit) as ended:
            cli.main(
                ["verify", str(adapter), "--base", str(self.base), "--manifest", str(self.file), "--json"]
            )
        return int(ended.value.code or 0), json.loads(self.capsys.readouterr().out)

    def refused(self, adapter: Path, text: bytes, code: ErrorCode) -> None:
        status, found = self(adapter, text)
        assert (status, found["error"]["code"]) == (2, code.value), found
        assert "violated" not in found["error"]

    def does_not_hold(self, adapter: Path, text: bytes, violated: ErrorCode) -> None:
        """The file is the caller's to mend, whichever invariant it breaks; that one is named."""
        status, found = self(adapter, text)
        error = found["error"]
        assert (status, error["code"], error["param"]) == (2, "manifest_invalid", "manifest"), found
        assert error["violated"] == violated.value, found
        assert str(self.file) in error["message"]
        assert f"({violated.value})" in error["message"]


@pytest.fixture
def verify(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    return Verify(base, tmp_path / "manifest.json", capsys)


def test_what_verify_printed_verifies_again(
    adapter: Path, manifest: RuntimeManifest, verify: Verify, tmp_path: Path
) -> None:
    status, found = verify(adapter, encode_manifest(manifest))
    assert (status, found["semantic_digest"]) == (0, manifest.adapter.semantic_sha256)
    assert verify(adapter, json.dumps(found["manifest"]).encode())[0] == 0
    changed = write(tmp_path / "changed", nudge=True)
    verify.refused(changed, encode_manifest(manifest), ErrorCode.ADAPTER_SOURCE_CHANGED)
    other = launch(load_adapter(adapter, base_modules(spec_from_config(read_config(verify.base)))))
    verify.refused(adapter, encode_manifest(other), ErrorCode.ADAPTER_BASE_MISMATCH)


@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_one_changed_field(adapter: Path, manifest: RuntimeManifest, verify: Verify, number: int) -> None:
    path, change, code = MUTATIONS[number]
    record = json.loads(encode_manifest(manifest))
    mutate(record, path, change)
    verify.does_not_hold(adapter, json.dumps(record).encode(), code)


@pytest.mark.parametrize("number", range(len(RELATIONS)))
def test_a_broken_relation(adapter: Path, manifest: RuntimeManifest, verify: Verify, number: int) -> None:
    _, change, code = RELATIONS[number]
    verify.does_not_hold(adapter, encode_manifest(change(manifest)), code)


@pytest.mark.parametrize("number", range(len(ACTIVATED)))
def test_an_activation_that_does_not_hold(base: Path, tmp_path: Path, verify: Verify, number: int) -> None:
    _, change, code, _ = ACTIVATED[number]
    folder = write(tmp_path / "activated", invocation=(6,))
    spec = spec_from_config(read_config(base))
    modules = base_modules(spec)
    made = launch(load_adapter(folder, modules), abi=base_identity(spec, modules, hash_weights(base)))
    assert verify(folder, encode_manifest(made))[0] == 0
    verify.does_not_hold(folder, encode_manifest(change(made)), code)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"adapter": 1}', b"{}{}"])
def test_no_manifest_at_all(adapter: Path, verify: Verify, text: bytes) -> None:
    verify.does_not_hold(adapter, text, ErrorCode.IDENTITY_INVALID)


def test_the_families_are_large_enough() -> None:
    launches = [m for m in MUTATIONS if not m[0].startswith("adapter.")]
    print(
        f"{len(MUTATIONS) - len(launches)} malformed manifests, {len(launches) + len(RELATIONS)} launch "
        "snapshots"
    )
    assert len(MUTATIONS) - len(launches) > 30
    assert len(launches) + len(RELATIONS) > 30
