"""Manifests: everything that defines an adapter, or a whole launch, in one record whose digests are
recomputed.

`AdapterManifest` is what `loraplex verify` prints. `RuntimeManifest` adds request, slot, cache and
generations, so that an answer can be traced from its bytes to its row. A manifest is accepted only when every
digest, projection and ledger in it follows from the rest. Specification: 0x01G "What is refused".
"""

from __future__ import annotations

import json
from typing import Final, TypeVar

import msgspec

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.identity.activation import last_invocation
from loraplex.identity.binding import RequestBinding, SlotBinding
from loraplex.identity.cache import CacheAbi, cache_root, prefix_identity
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.identity.compatibility import adapter_function
from loraplex.identity.digests import (
    ALWAYS_ON,
    ArtifactIdentity,
    BaseAbi,
    invalid,
    invocation_policy,
    semantic_abi,
)
from loraplex.identity.execution import History, history_of
from loraplex.identity.generations import decode as decode_generations
from loraplex.identity.kernel import KernelAbi, check_shards
from loraplex.identity.launch_snapshot import LaunchOwners, LaunchRow, validate_launch

SCHEMA: Final = 1
DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
T = TypeVar("T")


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements and bytes: of the unique artifact, of each shard's factors, and of all shards together."""

    scalars: int
    bytes: int
    shard_scalars: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    cluster_bytes: int


class AdapterManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapter over one base, with its conversions. invocation_tokens: aLoRA's, or None when always on."""

    schema: int
    base: BaseAbi
    base_sha256: str
    artifact: ArtifactIdentity
    artifact_sha256: str
    invocation_tokens: tuple[int, ...] | None
    activation_sha256: str
    semantic_sha256: str
    kernels: tuple[KernelAbi, ...]
    kernel_sha256: tuple[str, ...]
    ledger: Ledger


class RuntimeManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of one launch. prompt_tokens: int32 values. generations, observed: text forms of generation
    vectors.

    shard: which of the adapter's kernels the slot holds. cache_history: under which executions the KV rows
    were made. invoked_at: position at which an activated adapter was invoked. row_*: what the row's plan saw.
    """

    adapter: AdapterManifest
    request: RequestBinding
    request_sha256: str
    slot: SlotBinding
    slot_sha256: str
    shard: int
    cache: CacheAbi
    cache_sha256: str
    cache_history: History
    invoked_at: int | None
    graph_revision: int
    namespace: str
    prompt_tokens: tuple[int, ...]
    side_inputs: str
    prefix_sha256: str
    generations: dict[str, str]
    observed: dict[str, str]
    row_request_sha256: str
    row_slot_sha256: str
    row_kernel_sha256: str


def ledger_of(artifact: ArtifactIdentity, kernels: tuple[KernelAbi, ...]) -> Ledger:
    """The ledger that follows from tensor records and local layouts; analytical, without alignment and
    tables.
    """
    shard_scalars = tuple(kernel.scalars() for kernel in kernels)
    shard_bytes = tuple(k.scalars() * _itemsize(k.dtype) for k in kernels)
    return Ledger(
        scalars=sum(m.scalars() for m in artifact.modules),
        bytes=sum(_elements(t.shape) * _itemsize(t.dtype) for m in artifact.modules for t in m.tensors),
        shard_scalars=shard_scalars,
        shard_bytes=shard_bytes,
        cluster_bytes=sum(shard_bytes),
    )


def _elements(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def _itemsize(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise invalid(f"dtype {dtype!r} is not one of {sorted(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def adapter_manifest(
    base: BaseAbi, artifact: ArtifactIdentity, tokens: tuple[int, ...] | None, kernels: tuple[KernelAbi, ...]
) -> AdapterManifest:
    """The manifest of these records, with its digests."""
    activation = _activation(tokens)
    return AdapterManifest(
        schema=SCHEMA,
        base=base,
        base_sha256=base.digest,
        artifact=artifact,
        artifact_sha256=artifact.digest,
        invocation_tokens=tokens,
        activation_sha256=activation,
        semantic_sha256=semantic_abi(base.digest, artifact.digest, activation),
        kernels=kernels,
        kernel_sha256=tuple(kernel.digest for kernel in kernels),
        ledger=ledger_of(artifact, kernels),
    )


def _activation(tokens: tuple[int, ...] | None) -> str:
    return ALWAYS_ON if tokens is None else invocation_policy(tokens)


def check_adapter_manifest(manifest: AdapterManifest) -> None:
    """Raise `identity_invalid` on the first field that does not follow from the others."""
    if manifest.schema != SCHEMA:
        raise invalid(f"the manifest has schema {manifest.schema}, expected {SCHEMA}")
    expected = adapter_manifest(
        manifest.base, manifest.artifact, manifest.invocation_tokens, manifest.kernels
    )
    if manifest.artifact.base != expected.base_sha256:
        raise invalid("the artifact names another base than the manifest")
    for kernel in manifest.kernels:
        if kernel.semantic != expected.semantic_sha256:
            raise invalid("a kernel ABI names another adapter than the manifest")
    if manifest.kernels:
        check_shards(manifest.kernels, manifest.artifact.modules)
    for field in AdapterManifest.__struct_fields__:
        got, want = getattr(manifest, field), getattr(expected, field)
        if got != want:
            raise invalid(f"{field} is {_short(got)}, the records give {_short(want)}")


def check_runtime_manifest(manifest: RuntimeManifest) -> None:
    """Check the adapter, every binding and projection, and the launch; raises the code of what drifted."""
    adapter = manifest.adapter
    check_adapter_manifest(adapter)
    _same("cache_sha256", manifest.cache_sha256, manifest.cache.digest)
    if manifest.cache.base != adapter.base_sha256:
        raise InternalFault(
            ErrorCode.LEASE_MISMATCH, "the KV rows were made over another base than the adapter's"
        )
    _same("prefix_sha256", manifest.prefix_sha256, prefix_of(manifest))
    _same("request_sha256", manifest.request_sha256, manifest.request.digest)
    _same("slot_sha256", manifest.slot_sha256, manifest.slot.digest)
    if not 0 <= manifest.shard < len(adapter.kernel_sha256):
        raise invalid(f"shard {manifest.shard} is not one of {len(adapter.kernel_sha256)} kernels")
    _same("row_kernel_sha256", manifest.row_kernel_sha256, adapter.kernel_sha256[manifest.shard])
    generations = decode_generations(manifest.generations)
    if manifest.request.attempt != generations.request.value:
        raise InternalFault(
            ErrorCode.STALE_REQUEST_GENERATION,
            f"the request is attempt {manifest.request.attempt}, its owner is at {generations.request.value}",
        )
    row = LaunchRow(
        manifest.row_request_sha256,
        manifest.row_slot_sha256,
        manifest.row_kernel_sha256,
        decode_generations(manifest.observed),
    )
    validate_launch(
        row,
        LaunchOwners(
            request=manifest.request,
            adapter_base=adapter.base_sha256,
            adapter_semantic=adapter.semantic_sha256,
            slot=manifest.slot,
            cache_history=manifest.cache_history,
            request_history=request_history(manifest),
            generations=generations,
        ),
    )


def request_history(manifest: RuntimeManifest) -> History:
    """The executions that the manifest's adapter and activation call for."""
    adapter = manifest.adapter
    if (adapter.invocation_tokens is None) != (manifest.invoked_at is None):
        raise invalid(
            f"an adapter with the invocation {adapter.invocation_tokens} was invoked at {manifest.invoked_at}"
        )
    if adapter.invocation_tokens is not None:
        found = last_invocation(manifest.prompt_tokens, adapter.invocation_tokens)
        if found != manifest.invoked_at:
            raise invalid(f"invoked_at is {manifest.invoked_at}, the prompt's last invocation is at {found}")
    if manifest.graph_revision != GRAPH_REVISION:
        raise invalid(f"graph_revision is {manifest.graph_revision}, expected {GRAPH_REVISION}")
    function = adapter_function(
        adapter.base_sha256, adapter.semantic_sha256, adapter.artifact.modules, manifest.cache.layers
    )
    return history_of(adapter.base_sha256, function.kv, manifest.invoked_at)


def prefix_of(manifest: RuntimeManifest) -> str:
    """The prefix identity that the manifest's cache, history, tokens and namespace give."""
    root = cache_root(manifest.cache.digest, manifest.graph_revision, manifest.namespace)
    try:
        tokens = b"".join(token.to_bytes(4, "little", signed=True) for token in manifest.prompt_tokens)
    except OverflowError:
        raise invalid("a prompt token does not fit int32") from None
    return prefix_identity(root, manifest.cache_history, tokens, manifest.side_inputs)


def _same(field: str, got: str, expected: str) -> None:
    if got != expected:
        raise invalid(f"{field} is {_short(got)}, the records give {_short(expected)}")


def _short(value: object) -> str:
    return f"{value!s:.80}"


def encode_manifest(manifest: AdapterManifest | RuntimeManifest) -> bytes:
    """JSON text of a manifest, sorted, with a line feed at the end."""
    text = json.dumps(msgspec.to_builtins(manifest), sort_keys=True, indent=1, ensure_ascii=False)
    return text.encode("utf-8") + b"\n"


def decode_adapter_manifest(data: bytes) -> AdapterManifest:
    """A manifest that was checked; raises `identity_invalid` for any text that is not one."""
    manifest = _decode(data, AdapterManifest)
    check_adapter_manifest(manifest)
    return manifest


def decode_runtime_manifest(data: bytes) -> RuntimeManifest:
    """A runtime manifest that was checked; raises the code of what does not hold."""
    manifest = _decode(data, RuntimeManifest)
    check_runtime_manifest(manifest)
    return manifest


def decode_manifest(data: bytes) -> AdapterManifest:
    """The adapter's manifest in a text of either kind, after every check of that kind."""
    try:
        whole = "adapter" in msgspec.json.decode(data, type=dict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the manifest cannot be read: {error}") from None
    return decode_runtime_manifest(data).adapter if whole else decode_adapter_manifest(data)


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the manifest cannot be read: {error}") from None
