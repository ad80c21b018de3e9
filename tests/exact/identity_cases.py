"""0x01G: the worked manifest, and the ways in which one field or one relation of it can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from loraplex.artifact.artifact_manifest import kernels_of
from loraplex.artifact.base_modules import BaseModules
from loraplex.artifact.identify import artifact_record, target_map
from loraplex.artifact.record import Artifact
from loraplex.artifact.tensors import Dtype
from loraplex.core.errors import ErrorCode
from loraplex.core.ids import (
    CacheGeneration,
    CatalogGeneration,
    Module,
    PlanGeneration,
    PointerTableGeneration,
    RequestAttempt,
    RngGeneration,
    SlotGeneration,
)
from loraplex.core.layout import Geometry, PageGeometry
from loraplex.identity import generations
from loraplex.identity.activation import last_invocation
from loraplex.identity.binding import RequestBinding, SlotBinding
from loraplex.identity.cache import CacheAbi
from loraplex.identity.canonical import digest
from loraplex.identity.digests import BaseAbi
from loraplex.identity.execution import Interval, adapter_execution, base_execution
from loraplex.identity.generations import GenerationVector
from loraplex.identity.manifest import RuntimeManifest, adapter_manifest, check_runtime_manifest, prefix_of

BASE = BaseModules(
    layers=1, dims={Module.Q: (8, 8), Module.K: (8, 8), Module.V: (8, 8), Module.EMBED: (64, 8)}
)
ABI = BaseAbi(weights=digest("w"), config=digest("c"), transforms=digest("t"), target_map=target_map(BASE))
PAGES = PageGeometry(Geometry.RANK_ROWS, 2, row_page_bytes=128)
RANKS = 2
PROMPT = (5, 6, 7)


def write(
    folder: Path,
    *,
    v_rank: int = 4,
    target: str = "v_proj",
    nudge: bool = False,
    dropout: float = 0.0,
    invocation: tuple[int, ...] = (),
) -> Path:
    """q_proj rank 2 alpha 4, v_proj rank 4 alpha 8, bfloat16. invocation: activates it, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", target],
        "rank_pattern": {target: v_rank}, "alpha_pattern": {target: 8}, "lora_dropout": dropout,
    }  # fmt: skip
    if invocation:
        config["alora_invocation_tokens"] = list(invocation)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, rank in (("q_proj", 2), (target, v_rank)):
        stem = f"base_model.model.model.layers.0.self_attn.{name}"
        tensors[f"{stem}.lora_A.weight"] = torch.arange(8.0 * rank).reshape(rank, 8).bfloat16() / 8
        tensors[f"{stem}.lora_B.weight"] = torch.arange(8.0 * rank).reshape(8, rank).bfloat16() / 4
    if nudge:
        tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] += 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def launch(artifact: Artifact, *, slot_generation: int = 11, abi: BaseAbi = ABI) -> RuntimeManifest:
    """req-17, attempt 0, bound to the artifact, published in worker slot 3.

    An activated adapter is invoked at the prompt's last invocation.
    """
    record = artifact_record(artifact, abi.digest)
    kernels = kernels_of(artifact, PAGES, Dtype.BFLOAT16, abi.digest, RANKS)
    adapter = adapter_manifest(abi, record, artifact.invocation_tokens, kernels)
    request = RequestBinding(
        namespace="tenant-a",
        request_id="req-17",
        attempt=0,
        lineage="req-17",
        base=abi.digest,
        semantic=adapter.semantic_sha256,
        policy=digest({"temperature": "0"}),
    )
    slot = SlotBinding(
        worker_epoch=1,
        device="cuda:0",
        slot=3,
        slot_generation=slot_generation,
        pointer_table_generation=5,
        semantic=adapter.semantic_sha256,
        kernel=adapter.kernel_sha256[1],
    )
    cache = CacheAbi(
        base=abi.digest,
        dtype="bfloat16",
        layout="page-major",
        page_tokens=16,
        layers=1,
        kv_heads=1,
        head_dim=8,
        position="rope:default:10000",
        visibility="causal",
        shard=(1, 2),
    )
    vector = GenerationVector(
        catalog=CatalogGeneration(2),
        request=RequestAttempt(0),
        slot=SlotGeneration(slot_generation),
        pointer_table=PointerTableGeneration(5),
        plan=PlanGeneration(40),
        cache=CacheGeneration(9),
        rng=RngGeneration(1),
    )
    invoked_at = None
    history = (Interval(0, adapter_execution(adapter.semantic_sha256)),)
    if artifact.invocation_tokens is not None:
        invoked_at = last_invocation(PROMPT, artifact.invocation_tokens)
        assert invoked_at
        history = (Interval(0, base_execution(abi.digest)), Interval(invoked_at, history[0].execution))
    manifest = RuntimeManifest(
        adapter=adapter,
        request=request,
        request_sha256=request.digest,
        slot=slot,
        slot_sha256=slot.digest,
        shard=1,
        cache=cache,
        cache_sha256=cache.digest,
        cache_history=history,
        invoked_at=invoked_at,
        graph_revision=1,
        namespace="tenant-a",
        prompt_tokens=PROMPT,
        side_inputs=digest({"side_inputs": []}),
        prefix_sha256="",
        generations=generations.encode(vector),
        observed=generations.encode(vector),
        row_request_sha256=request.digest,
        row_slot_sha256=slot.digest,
        row_kernel_sha256=adapter.kernel_sha256[1],
    )
    manifest = msgspec.structs.replace(manifest, prefix_sha256=prefix_of(manifest))
    check_runtime_manifest(manifest)
    return manifest


INVALID, LEASE, SLOT = ErrorCode.IDENTITY_INVALID, ErrorCode.LEASE_MISMATCH, ErrorCode.STALE_SLOT_GENERATION
REQUEST, LAYOUT = ErrorCode.STALE_REQUEST_GENERATION, ErrorCode.OPERATOR_LAYOUT
DRIFT = "f" * 64
Q, V = "adapter.artifact.modules.0", "adapter.artifact.modules.1"
KERNEL = "adapter.kernels.1"
LOCAL = f"{KERNEL}.layouts.0"


def other_digest(_: Any) -> str:
    return DRIFT


def swapped(pair: list[Any]) -> list[Any]:
    return pair[::-1]


def doubled(items: list[Any]) -> list[Any]:
    return [items[0], *items]


MUTATIONS: list[tuple[str, Any, ErrorCode]] = [
    *((f"adapter.base.{name}", other_digest, INVALID) for name in ("weights", "config", "transforms",
    "target_map")),
    *((f"adapter.{name}", other_digest, INVALID) for name in ("base_sha256", "artifact_sha256",
    "activation_sha256", "semantic_sha256")),
    *((f"adapter.kernel_sha256.{i}", other_digest, INVALID) for i in (0, 1)),
    ("adapter.base.weights", "xyz", INVALID),
    ("adapter.base.weights", DRIFT.upper(), INVALID),
    ("adapter.base.path", "/models/base", INVALID),
    ("adapter.schema", 2, INVALID),
    ("adapter.schema", "1", INVALID),
    ("adapter.artifact.method", "rslora", INVALID),
    ("adapter.artifact.peft_config", other_digest, INVALID),
    ("adapter.artifact.base", other_digest, INVALID),
    ("adapter.artifact.modules", swapped, INVALID),
    ("adapter.artifact.modules", doubled, INVALID),
    ("adapter.artifact.modules", [], INVALID),
    ("adapter.invocation_tokens", [7], INVALID),
    ("adapter.invocation_tokens", [], INVALID),
    *((f"{module}.{field}", value, INVALID) for module in (Q, V) for field, value in (
        ("name", "model.layers.0.self_attn.zz_proj"), ("target", "k"), ("base_shape", [8, 16]), ("rank", 3),
        ("rank", 0), ("alpha", "5"), ("alpha", "x"), ("alpha", "nan"), ("alpha", "4.0"), ("alpha", "0"),
        ("alpha", 4), ("rule", "alpha"), ("rule", "alpha/sqrt(r)"), ("tensors.0.sha256", other_digest),
        ("tensors.1.sha256", other_digest), ("tensors.0.shape", swapped), ("tensors.0.axes", swapped),
        ("tensors.0.dtype", "float16"), ("tensors.0.role", "B"), ("tensors.1.role", "A"),
        ("tensors", swapped),
        ("tensors", doubled), ("tensors", lambda t: t[:1]), ("tensors.1.shape", [8]), ("extra", 1),
    )),
    (f"{KERNEL}.semantic", other_digest, INVALID),
    (f"{KERNEL}.kernel_family", "paired-slot", INVALID),
    (f"{KERNEL}.conversion_revision", 3, INVALID),
    (f"{KERNEL}.constant", "absolute", INVALID),
    (f"{KERNEL}.dtype", "float16", INVALID),
    (f"{KERNEL}.packing.page_bytes", 256, INVALID),
    (f"{KERNEL}.packing.extents_sha256", other_digest, INVALID),
    (f"{KERNEL}.shard", [0, 2], INVALID),
    (f"{KERNEL}.shard", [2, 2], INVALID),
    (f"{KERNEL}.shard", [1, 3], INVALID),
    (f"{KERNEL}.layouts", swapped, INVALID),
    (f"{KERNEL}.layouts", lambda rows: rows[:1], INVALID),
    (f"{LOCAL}.name", "model.layers.0.self_attn.k_proj", INVALID),
    (f"{LOCAL}.rank", 4, INVALID),
    (f"{LOCAL}.scale_bits", 0, INVALID),
    (f"{LOCAL}.a_axes", ["input", "rank"], INVALID),
    (f"{LOCAL}.b_axes", ["output", "rank"], INVALID),
    (f"{LOCAL}.output_range", [0, 4], INVALID),
    (f"{LOCAL}.output_range", [4, 9], INVALID),
    (f"{LOCAL}.output_range", [3, 8], INVALID),
    (f"{LOCAL}.output_range", [8, 8], INVALID),
    (f"{LOCAL}.input_range", [0, 4], INVALID),
    ("adapter.kernels", swapped, INVALID),
    ("adapter.kernels", lambda rows: rows[:1], INVALID),
    ("adapter.ledger.scalars", 288, INVALID),
    ("adapter.ledger.bytes", 288, INVALID),
    ("adapter.ledger.shard_scalars", [96, 96], INVALID),
    ("adapter.ledger.shard_bytes", [192, 144], INVALID),
    ("adapter.ledger.cluster_bytes", 192, INVALID),
    ("request.semantic", other_digest, INVALID),
    ("request.base", other_digest, INVALID),
    ("request.request_id", "req-18", INVALID),
    ("request.attempt", 1, INVALID),
    ("request.policy", other_digest, INVALID),
    ("request.namespace", "tenant-b", INVALID),
    ("request.lineage", "req-16", INVALID),
    ("request_sha256", other_digest, INVALID),
    ("slot.slot", 4, INVALID),
    ("slot.slot_generation", 12, INVALID),
    ("slot.pointer_table_generation", 6, INVALID),
    ("slot.worker_epoch", 2, INVALID),
    ("slot.device", "cuda:1", INVALID),
    ("slot.semantic", other_digest, INVALID),
    ("slot.kernel", other_digest, INVALID),
    ("slot_sha256", other_digest, INVALID),
    ("shard", 0, INVALID),
    ("shard", 2, INVALID),
    ("shard", -1, INVALID),
    ("cache.base", other_digest, INVALID),
    ("cache.dtype", "float32", INVALID),
    ("cache.page_tokens", 32, INVALID),
    ("cache.visibility", "window:128", INVALID),
    ("cache.position", "rope:linear:2", INVALID),
    ("cache.shard", [0, 2], INVALID),
    ("cache_sha256", other_digest, INVALID),
    ("cache_history.0.1", other_digest, INVALID),
    ("cache_history.0.0", 1, INVALID),
    ("cache_history", [], INVALID),
    ("invoked_at", 1, INVALID),
    ("graph_revision", 2, INVALID),
    ("namespace", "tenant-b", INVALID),
    ("prompt_tokens", [5, 6, 8], INVALID),
    ("prompt_tokens", [1 << 31], INVALID),
    ("side_inputs", other_digest, INVALID),
    ("prefix_sha256", other_digest, INVALID),
    ("row_request_sha256", other_digest, REQUEST),
    ("row_slot_sha256", other_digest, SLOT),
    ("row_kernel_sha256", other_digest, INVALID),
    *((f"{side}.{name}", f"{name}:77", code) for side in ("generations", "observed") for name, code in (
        ("catalog", LEASE), ("request", REQUEST), ("slot", SLOT), ("pointer_table", SLOT),
        ("plan", ErrorCode.STALE_PLAN_GENERATION), ("cache", ErrorCode.STALE_KV_FRONTIER), ("rng", REQUEST),
    )),
    ("observed.slot", "cache:11", ErrorCode.GENERATION_NAMESPACE),
    ("observed.cache", "slot:9", ErrorCode.GENERATION_NAMESPACE),
    ("observed.plan", "40", ErrorCode.GENERATION_NAMESPACE),
    ("observed.plan", "plan:-1", INVALID),
    ("observed.plan", "plan:040", INVALID),
    ("observed.plan", 40, INVALID),
    ("observed.other", "other:1", INVALID),
    ("extra", 1, INVALID),
]  # fmt: skip


def mutate(record: Any, path: str, change: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        record = record[int(part) if part.isdecimal() else part]
    key: Any = int(last) if last.isdecimal() else last
    record[key] = change(record[key]) if callable(change) else change


def resealed(manifest: RuntimeManifest, **changes: Any) -> RuntimeManifest:
    """A manifest whose digests were made again after the change, so that only the relation is broken."""
    out = msgspec.structs.replace(manifest, **changes)
    out = msgspec.structs.replace(
        out,
        cache_sha256=out.cache.digest,
        request_sha256=out.request.digest,
        slot_sha256=out.slot.digest,
        row_request_sha256=out.request.digest,
        row_slot_sha256=out.slot.digest,
    )
    return msgspec.structs.replace(out, prefix_sha256=prefix_of(out))


RELATIONS: list[tuple[str, Callable[[RuntimeManifest], RuntimeManifest], ErrorCode]] = [
    ("request of another adapter", lambda m: resealed(m, request=msgspec.structs.replace(m.request,
    semantic=DRIFT)), LEASE),
    ("request without adapter", lambda m: resealed(m, request=msgspec.structs.replace(m.request,
    semantic=None)), LEASE),
    ("request over another base", lambda m: resealed(m, request=msgspec.structs.replace(m.request,
    base=DRIFT)), LEASE),
    ("request attempt", lambda m: resealed(m, request=msgspec.structs.replace(m.request, attempt=1)),
    REQUEST),
    ("slot holds another adapter", lambda m: resealed(m, slot=msgspec.structs.replace(m.slot,
    semantic=DRIFT)), LEASE),
    ("slot holds another shard", lambda m: resealed(m, slot=msgspec.structs.replace(m.slot,
    kernel=m.adapter.kernel_sha256[0])), LAYOUT),
    ("slot generation", lambda m: resealed(m, slot=msgspec.structs.replace(m.slot, slot_generation=12)),
    SLOT),
    ("pointer table generation", lambda m: resealed(m, slot=msgspec.structs.replace(m.slot,
    pointer_table_generation=6)), SLOT),
    ("cache of another adapter", lambda m: resealed(m, cache_history=(Interval(0,
    adapter_execution(DRIFT)),)), LEASE),
    ("another graph of dependencies", lambda m: resealed(m, graph_revision=2), INVALID),
    ("invoked without an invocation", lambda m: resealed(m, invoked_at=1), INVALID),
    ("cache over another base", lambda m: resealed(m, cache=msgspec.structs.replace(m.cache, base=DRIFT)),
    LEASE),
]  # fmt: skip


def rows_by(manifest: RuntimeManifest, *history: Interval, **changes: Any) -> RuntimeManifest:
    """The KV rows as if made under another history, with digests made again."""
    return resealed(manifest, cache_history=history, **changes)


ACTIVATED: list[tuple[str, Callable[[RuntimeManifest], RuntimeManifest], ErrorCode, str]] = [
    (
        "the first invocation counts",
        lambda m: rows_by(
            m, Interval(0, m.cache_history[1].execution), prompt_tokens=(6, 6, 7), invoked_at=0
        ),
        INVALID,
        "last invocation is at 1",
    ),
    (
        "it acts behind its invocation",
        lambda m: rows_by(m, m.cache_history[0], Interval(2, m.cache_history[1].execution), invoked_at=2),
        INVALID,
        "last invocation is at 1",
    ),
    (
        "the prompt invokes nothing",
        lambda m: resealed(m, prompt_tokens=(5, 5, 7)),
        INVALID,
        "last invocation is at None",
    ),
    (
        "never invoked",
        lambda m: rows_by(m, m.cache_history[0], invoked_at=None),
        INVALID,
        "was invoked at None",
    ),
    (
        "always on all the same",
        lambda m: rows_by(m, Interval(0, m.cache_history[1].execution)),
        LEASE,
        "KV rows were made under",
    ),
    (
        "the base behind the invocation",
        lambda m: rows_by(m, m.cache_history[0]),
        LEASE,
        "KV rows were made under",
    ),
    (
        "another boundary",
        lambda m: rows_by(m, m.cache_history[0], Interval(2, m.cache_history[1].execution)),
        LEASE,
        "KV rows were made under",
    ),
    (
        "another graph of dependencies",
        lambda m: resealed(m, graph_revision=2),
        INVALID,
        "graph_revision is 2, expected 1",
    ),
]
"""Of a launch whose adapter is invoked by token 6: what its digests do not show."""
