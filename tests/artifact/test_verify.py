"""`verify` says exactly what a load would find: digests, ranks, scales, bytes and pages, or the refusal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from peft import LoraConfig
from tests.artifact.tiny import (
    HIDDEN,
    LAYERS,
    TinyTensors,
    edit_config,
    edit_tensors,
    save_adapter,
    tiny_base,
    tiny_model,
    write_lora,
)

from loraplex.adapters.prepare import prepare_adapter
from loraplex.artifact.convert import to_image
from loraplex.artifact.identify import target_map
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import Method
from loraplex.artifact.source import ByteProgress
from loraplex.artifact.tensors import Dtype
from loraplex.artifact.verify import Verification, refusal_record, verify_artifact
from loraplex.build.base_model import describe_base
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.layout import Geometry, PageGeometry
from loraplex.identity.canonical import digest
from loraplex.identity.digests import BaseAbi
from loraplex.identity.manifest import decode_adapter_manifest
from loraplex.images.disk_store import ImageStore

ABI = BaseAbi(
    weights=digest("w"), config=digest("c"), transforms=digest("t"), target_map=target_map(tiny_base())
)
PAGES = PageGeometry(Geometry.RANK_ROWS, 2, row_page_bytes=1024)


def verify(
    folder: Path,
    *,
    supported: Sequence[Method] | None = None,
    base_tensors: TinyTensors | None = None,
    progress: ByteProgress | None = None,
) -> Verification:
    base = tiny_base()
    artifact = load_adapter(folder, base, base_tensors, progress, served=Dtype.BFLOAT16)
    return verify_artifact(
        folder, artifact, base, ABI, PAGES, Dtype.BFLOAT16, base_tensors=base_tensors, supported=supported
    )


def test_the_report_is_what_a_load_gives(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "a", rank_pattern={}, alpha_pattern={"v_proj": 2.5})
    found = verify(folder, supported=[Method.LORA])
    image = to_image(load_adapter(folder, tiny_base()), PAGES, Dtype.BFLOAT16, ABI.digest)
    record = json.loads(json.dumps(found.record()))
    assert record["semantic_digest"] == image.key
    assert record["kernel_digest"] == image.kernel_digest
    assert record["pages"] == len(image.pages)
    assert record["tier_bytes"]["device"] == record["tier_bytes"]["host"] == image.pages.nbytes
    assert record["tier_bytes"]["factors"] == LAYERS * 2 * 4 * ((HIDDEN + 32) + (HIDDEN + 16))
    assert record["tier_bytes"]["file"] == (folder / "adapter_model.safetensors").stat().st_size
    assert (record["tensors_applied"], record["tensors_total"]) == (12, 12)
    assert record["report"] == "12 of 12 tensors applied, 6 modules"
    scales = {m["target"]: (m["rank"], m["alpha"], m["scale"]) for m in record["modules"]}
    assert scales == {"q": (4, "8", 2.0), "v": (4, "2.5", 0.625)}
    assert decode_adapter_manifest(json.dumps(record["manifest"]).encode()) == found.manifest
    assert any("rank 4, alpha 2.5, scale 0.625" in line for line in found.lines())
    store = ImageStore(tmp_path / "store")
    store.put(image)
    assert store.verify(record["kernel_digest"]).key == record["semantic_digest"]


def test_an_executable_subset_is_enforced_by_name(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, use_rslora=True)
    assert verify(folder).artifact.method == "rslora"
    with pytest.raises(CallerError) as caught:
        verify(folder, supported=[Method.LORA])
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED
    assert "rslora" in caught.value.message


def test_a_refusal_has_a_record(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    edit_config(folder, lambda c: c | {"r": 5})
    with pytest.raises(CallerError) as caught:
        verify(folder)
    record = refusal_record(caught.value)
    assert record["ok"] is False
    assert record["error"]["code"] == "adapter_rank_mismatch"
    assert record["error"]["param"].endswith("lora_A.weight")


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    folder = write_lora(tmp_path)
    seen: list[tuple[int, int]] = []
    verify(folder, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) == 12
    assert max(seen) == (seen[0][1], seen[0][1])


def test_repeated_base_weights_are_compared_as_they_are_served(tmp_path: Path) -> None:
    """Both ways in, `verify` and a server's own, know the served type."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    folder = tmp_path / "a"
    tuned = save_adapter(folder, LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(folder, save_embedding_layers=True)
    repeated = ("lm_head.weight", "embed_tokens.weight")
    edit_tensors(
        folder, lambda t: {n: v.bfloat16().float() if n.endswith(repeated) else v for n, v in t.items()}
    )
    assert len(verify(folder, base_tensors=TinyTensors()).artifact.carried) == 2
    store = ImageStore(tmp_path / "store")
    rounded = describe_base(tmp_path / "base", Dtype.BFLOAT16, 4)
    assert "2 of them equal to the base" in prepare_adapter(folder, rounded, store).report
    with pytest.raises(CallerError) as caught:
        prepare_adapter(folder, describe_base(tmp_path / "base", Dtype.FLOAT32, 4), store)
    assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED
