"""0x01G: the worked rank-and-shard identity trace, its invariances, and the negative fixtures.

Everything goes through the shipping code: a PEFT folder on disk, the loader, the sharded conversion, the
manifest. The specification prints sizes and ranks; factor values, module names of layer 0 and the base
digests are ours.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.exact.identity_cases import (
    ABI,
    ACTIVATED,
    BASE,
    INVALID,
    MUTATIONS,
    PAGES,
    RANKS,
    RELATIONS,
    launch,
    mutate,
    write,
)

from loraplex.artifact.convert import to_image
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.tensors import Dtype
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.ids import (
    CacheGeneration,
    SlotGeneration,
)
from loraplex.identity.cache import block_key, cache_root
from loraplex.identity.canonical import canonical, digest
from loraplex.identity.digests import ALWAYS_ON, invocation_policy, semantic_abi
from loraplex.identity.generations import GenerationVector
from loraplex.identity.manifest import (
    RuntimeManifest,
    check_runtime_manifest,
    decode_runtime_manifest,
    encode_manifest,
    prefix_of,
)


@pytest.fixture
def manifest(tmp_path: Path) -> RuntimeManifest:
    return launch(load_adapter(write(tmp_path), BASE))


def test_worked_sizes(manifest: RuntimeManifest) -> None:
    ledger = manifest.adapter.ledger
    assert (ledger.scalars, ledger.bytes) == (96, 192)
    assert ledger.shard_scalars == (72, 72)
    assert ledger.shard_bytes == (144, 144)
    assert ledger.cluster_bytes == 288
    assert ledger.cluster_bytes > ledger.bytes


def test_sharded_images_hold_the_worked_bytes(tmp_path: Path) -> None:
    artifact = load_adapter(write(tmp_path), BASE)
    for rank in range(RANKS):
        image = to_image(artifact, PAGES, Dtype.BFLOAT16, ABI.digest, shard=(rank, RANKS))
        assert int((image.extents[:, 4] * image.extents[:, 6]).sum()) * image.itemsize == 144


def test_another_slot_changes_only_the_binding(tmp_path: Path, manifest: RuntimeManifest) -> None:
    again = launch(load_adapter(write(tmp_path / "copy"), BASE), slot_generation=12)
    assert again.adapter == manifest.adapter
    assert (again.cache_sha256, again.prefix_sha256) == (manifest.cache_sha256, manifest.prefix_sha256)
    assert again.request_sha256 == manifest.request_sha256
    assert again.slot_sha256 != manifest.slot_sha256
    late = msgspec.structs.replace(again, row_slot_sha256=manifest.slot_sha256, observed=manifest.observed)
    with pytest.raises(InternalFault) as caught:
        check_runtime_manifest(late)
    assert caught.value.code is ErrorCode.STALE_SLOT_GENERATION


@pytest.mark.parametrize(
    "change", [{"v_rank": 2}, {"nudge": True}, {"target": "k_proj"}], ids=["rank", "one byte", "retargeted"]
)
def test_content_changes_every_identity_that_depends_on_it(
    tmp_path: Path, manifest: RuntimeManifest, change: dict[str, Any]
) -> None:
    other = launch(load_adapter(write(tmp_path / "other", **change), BASE))
    assert other.adapter.base_sha256 == manifest.adapter.base_sha256
    assert other.adapter.artifact_sha256 != manifest.adapter.artifact_sha256
    assert other.adapter.semantic_sha256 != manifest.adapter.semantic_sha256
    assert other.adapter.kernel_sha256 != manifest.adapter.kernel_sha256
    assert other.prefix_sha256 != manifest.prefix_sha256
    assert other.slot_sha256 != manifest.slot_sha256


def test_a_moved_alias_another_folder_and_inert_fields_change_nothing(
    tmp_path: Path, manifest: RuntimeManifest
) -> None:
    moved = launch(load_adapter(write(tmp_path / "customer-blue" / "v2", dropout=0.3), BASE))
    assert moved == manifest


def test_activation_is_part_of_the_semantics(manifest: RuntimeManifest) -> None:
    adapter = manifest.adapter
    policies = [ALWAYS_ON, invocation_policy([1, 2]), invocation_policy([2, 1])]
    assert len({semantic_abi(adapter.base_sha256, adapter.artifact_sha256, p) for p in policies}) == 3


def test_prefix_excludes_ownership_and_includes_namespace(manifest: RuntimeManifest) -> None:
    request = msgspec.structs.replace(
        manifest.request, request_id="req-18", attempt=3, policy=digest("other")
    )
    other = msgspec.structs.replace(
        manifest, request=request, slot=msgspec.structs.replace(manifest.slot, slot=4, slot_generation=99)
    )
    assert prefix_of(other) == manifest.prefix_sha256
    for change in ({"namespace": "tenant-b"}, {"prompt_tokens": (5, 6, 8)}, {"graph_revision": 2}):
        assert prefix_of(msgspec.structs.replace(manifest, **change)) != manifest.prefix_sha256


def test_block_keys_chain_tokens_under_a_root(manifest: RuntimeManifest) -> None:
    root = cache_root(manifest.cache_sha256, 1, "tenant-a")
    acting = bytes.fromhex(manifest.cache_history[0].execution)
    first = block_key(root, acting, 0, (5).to_bytes(4, "little") + (6).to_bytes(4, "little"))
    assert block_key(first, acting, 0, (7).to_bytes(4, "little")) != block_key(
        root, acting, 0, (7).to_bytes(4, "little")
    )
    word = b"\0\0\0\0"
    for parent, execution, acts_from, tokens in (
        (b"", acting, 0, word),
        (root, b"", 0, word),
        (root, acting, 1, word),
        (root, acting, -1, word),
        (root, acting, 0, b""),
        (root, acting, 0, b"\0\0\0"),
    ):
        with pytest.raises(InternalFault) as caught:
            block_key(parent, execution, acts_from, tokens)
        assert caught.value.code is ErrorCode.IDENTITY_INVALID


def test_generations_of_two_namespaces_never_compare() -> None:
    for compare in (
        lambda: SlotGeneration(1) == CacheGeneration(1),
        lambda: SlotGeneration(2) >= CacheGeneration(1),
    ):  # type: ignore[operator]
        with pytest.raises(InternalFault) as caught:
            compare()
        assert caught.value.code is ErrorCode.GENERATION_NAMESPACE


def test_canonical_text() -> None:
    value = {"b": [1, True, None, "é"], "a": {"y": -1, "x": "0.1"}}
    assert canonical(value) == '{"a":{"x":"0.1","y":-1},"b":[1,true,null,"é"]}'.encode()
    assert canonical({"b": 1, "a": 2}) == canonical({"a": 2, "b": 1})
    assert len({canonical(v) for v in (1, True, "1", "true", [1], None, "")}) == 7


@pytest.mark.parametrize(
    "value", [1.0, {"a": [0.5]}, {1: "a"}, b"x", {"a": {2}}, "\ud800", Path("/tmp"), ErrorCode.INTERNAL]
)
def test_what_has_no_canonical_text_is_refused(value: Any) -> None:
    with pytest.raises(InternalFault) as caught:
        canonical(value)
    assert caught.value.code is ErrorCode.IDENTITY_INVALID


def test_a_manifest_survives_its_text(manifest: RuntimeManifest) -> None:
    assert decode_runtime_manifest(encode_manifest(manifest)) == manifest


# One-field mutations: path into the JSON text, new value (or a function of the old one), code of the broken
# invariant.


@pytest.mark.parametrize(
    ("path", "change", "code"), MUTATIONS, ids=[f"{i}-{m[0]}" for i, m in enumerate(MUTATIONS)]
)
def test_one_changed_field_is_refused(
    manifest: RuntimeManifest, path: str, change: Any, code: ErrorCode
) -> None:
    record = json.loads(encode_manifest(manifest))
    mutate(record, path, change)
    with pytest.raises(InternalFault) as caught:
        decode_runtime_manifest(json.dumps(record).encode())
    assert caught.value.code is code


def test_a_missing_field_is_refused(manifest: RuntimeManifest) -> None:
    record = json.loads(encode_manifest(manifest))
    for name in record:
        short = {k: v for k, v in record.items() if k != name}
        with pytest.raises(InternalFault) as caught:
            decode_runtime_manifest(json.dumps(short).encode())
        assert caught.value.code is INVALID


@pytest.mark.parametrize(("name", "change", "code"), RELATIONS, ids=[r[0] for r in RELATIONS])
def test_a_broken_relation_is_refused_even_with_fresh_digests(
    manifest: RuntimeManifest,
    name: str,
    change: Callable[[RuntimeManifest], RuntimeManifest],
    code: ErrorCode,
) -> None:
    with pytest.raises(InternalFault) as caught:
        check_runtime_manifest(change(manifest))
    assert caught.value.code is code


def test_the_vector_has_one_component_for_each_reason() -> None:
    names = [f.name for f in dataclasses.fields(GenerationVector)]
    assert names == ["catalog", "request", "slot", "pointer_table", "plan", "cache", "rng"]


def test_there_are_enough_cases() -> None:
    assert len(MUTATIONS) + len(RELATIONS) > 130


@pytest.fixture
def activated(tmp_path: Path) -> RuntimeManifest:
    return launch(load_adapter(write(tmp_path / "activated", invocation=(6,)), BASE))


def test_an_activated_launch_says_where_its_adapter_began(activated: RuntimeManifest) -> None:
    assert (activated.invoked_at, [interval.start for interval in activated.cache_history]) == (1, [0, 1])
    assert decode_runtime_manifest(encode_manifest(activated)) == activated


@pytest.mark.parametrize(
    ("change", "code", "said"), [case[1:] for case in ACTIVATED], ids=[case[0] for case in ACTIVATED]
)
def test_an_activation_that_does_not_hold(
    activated: RuntimeManifest,
    change: Callable[[RuntimeManifest], RuntimeManifest],
    code: ErrorCode,
    said: str,
) -> None:
    with pytest.raises(InternalFault, match=said) as caught:
        decode_runtime_manifest(encode_manifest(change(activated)))
    assert caught.value.code is code
