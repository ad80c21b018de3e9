"""Each check of an identity record on its own: the record refuses to have a digest, and says which rule it
breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.identity.digests import (
    ArtifactIdentity,
    BaseAbi,
    ModuleSpec,
    TensorRecord,
    invocation_policy,
    semantic_abi,
)
from loraplex.identity.kernel import A_AXES, B_AXES, RANK_ROWS, KernelAbi, LocalLayout, Packing, check_shards
from loraplex.identity.manifest import AdapterManifest, adapter_manifest, check_adapter_manifest, ledger_of
from loraplex.identity.scale import ScaleRule, alpha_text, scale_bits, scale_of

D = "d" * 64
A = TensorRecord("A", ("rank", "input"), "bfloat16", (2, 8), D)
B = TensorRecord("B", ("output", "rank"), "bfloat16", (6, 2), D)
SPEC = ModuleSpec("m.q", "q", (6, 8), 2, "4", "alpha/r", (A, B))
OTHER = msgspec.structs.replace(SPEC, name="m.v", target="v")
BASE = BaseAbi(D, D, D, D)
ARTIFACT = ArtifactIdentity("lora", D, BASE.digest, (SPEC, OTHER))
SEMANTIC = adapter_manifest(BASE, ARTIFACT, None, ()).semantic_sha256


def layout(spec: ModuleSpec, **changes: Any) -> LocalLayout:
    whole = LocalLayout(
        spec.name, 2, scale_bits("4", 2, ScaleRule.ALPHA_OVER_R), A_AXES, B_AXES, (0, 8), (0, 6)
    )
    return msgspec.structs.replace(whole, **changes)


def kernel(rank: int, **changes: Any) -> KernelAbi:
    half = {"output_range": (3 * rank, 3 * rank + 3)}
    abi = KernelAbi(
        SEMANTIC,
        RANK_ROWS,
        1,
        "bfloat16",
        Packing(64, D),
        (layout(SPEC, **half), layout(OTHER, **half)),
        (rank, 2),
    )
    return msgspec.structs.replace(abi, **changes)


def manifest(**changes: Any) -> AdapterManifest:
    whole = adapter_manifest(BASE, ARTIFACT, None, (kernel(0), kernel(1)))
    return msgspec.structs.replace(whole, **changes)


def spec(**changes: Any) -> Callable[[], object]:
    return lambda: msgspec.structs.replace(SPEC, **changes).value()


def artifact(*modules: ModuleSpec) -> Callable[[], object]:
    return lambda: msgspec.structs.replace(ARTIFACT, modules=modules).digest


def shards(*kernels: KernelAbi) -> Callable[[], object]:
    return lambda: check_shards(kernels, (SPEC, OTHER))


def first(**changes: Any) -> Callable[[], object]:
    """Two shards, of which the first holds its first module otherwise."""
    half = {"output_range": (0, 3)} | changes
    return shards(kernel(0, layouts=(layout(SPEC, **half), layout(OTHER, output_range=(0, 3)))), kernel(1))


def tensor(base: TensorRecord, **changes: Any) -> TensorRecord:
    return msgspec.structs.replace(base, **changes)


BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "no invocation token": (lambda: invocation_policy([]), "at least one token"),
    "tensor axes": (lambda: tensor(A, axes=("rank",)).value(), "but the axes"),
    "tensor digest": (lambda: tensor(A, sha256="x").value(), "64 hexadecimal characters"),
    "base digest": (lambda: BaseAbi(D, D, D, D.upper()).digest, "target_map"),
    "no tensors": (spec(tensors=()), "expected each once"),
    "tensors unsorted": (spec(tensors=(B, A)), "expected each once"),
    "tensors twice": (spec(tensors=(A, A, B)), "expected each once"),
    "alpha not canonical": (spec(alpha="4.0"), "give no scale"),
    "alpha without rank": (spec(rank=0, tensors=(tensor(A, role="bias"),)), "give no scale"),
    "rule unknown": (spec(rule="alpha"), "give no scale"),
    "factor missing": (spec(tensors=(A,)), "has rank 2 but the tensors"),
    "factors without rank": (spec(rank=0, alpha="0"), "has rank 0 but the tensors"),
    "A transposed": (spec(tensors=(tensor(A, shape=(8, 2)), B)), "factor A"),
    "B axes": (spec(tensors=(A, tensor(B, axes=("rank", "output")))), "factor B"),
    "rank of B": (spec(tensors=(A, tensor(B, shape=(6, 3)))), "factor B"),
    "no modules": (artifact(), "sorted by name"),
    "modules unsorted": (artifact(OTHER, SPEC), "sorted by name"),
    "module twice": (artifact(SPEC, SPEC), "sorted by name"),
    "semantic of no digest": (lambda: semantic_abi(D, D, ""), "activation"),
    "layouts unsorted": (lambda: kernel(0, layouts=(layout(OTHER), layout(SPEC))).digest, "sorted by name"),
    "shard outside": (lambda: kernel(0, shard=(2, 2)).digest, "not (rank, ranks)"),
    "extent digest": (lambda: kernel(0, packing=Packing(64, "x")).digest, "extents_sha256"),
    "shards out of order": (shards(kernel(1), kernel(0)), "expected ranks 0 to 1"),
    "shard missing": (shards(kernel(0)), "expected ranks 0 to 0"),
    "mixed conversions": (shards(kernel(0), kernel(1, dtype="float16")), "different conversions"),
    "shard without a module": (shards(kernel(0), kernel(1, layouts=(layout(SPEC),))), "does not hold"),
    "local rank": (first(rank=4), "local layout of m.q"),
    "local scale": (first(scale_bits=0), "local layout of m.q"),
    "local orientation of A": (first(a_axes=("input", "rank")), "local layout of m.q"),
    "local orientation of B": (first(b_axes=("output", "rank")), "local layout of m.q"),
    "empty range": (first(output_range=(3, 3)), "output range of m.q"),
    "range outside": (first(output_range=(0, 7)), "output range of m.q"),
    "input range outside": (first(input_range=(-1, 8)), "input range of m.q"),
    "outputs overlap": (first(output_range=(0, 4)), "the shards of m.q"),
    "outputs with a gap": (first(output_range=(0, 2)), "the shards of m.q"),
    "both axes cut": (first(input_range=(0, 4)), "the shards of m.q"),
    "dtype without size": (lambda: ledger_of(ARTIFACT, (kernel(0, dtype="int8"),)), "is not one of"),
    "schema": (lambda: check_adapter_manifest(manifest(schema=2)), "has schema 2"),
    "artifact over another base": (
        lambda: check_adapter_manifest(manifest(artifact=msgspec.structs.replace(ARTIFACT, base=D))),
        "another base"
    ),
    "kernel of another adapter": (
        lambda: check_adapter_manifest(manifest(kernels=(kernel(0, semantic=D), kernel(1)))),
        "another adapter"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    call, words = BROKEN[name]
    with pytest.raises(InternalFault) as caught:
        call()
    assert caught.value.code is ErrorCode.IDENTITY_INVALID
    assert words in caught.value.message


def test_the_records_of_these_tests_are_whole() -> None:
    whole = manifest()
    check_adapter_manifest(whole)
    assert {kernel.semantic for kernel in whole.kernels} == {whole.semantic_sha256}


def test_row_parallel_and_replicated_shards_are_whole() -> None:
    rows = [layout(SPEC, input_range=(4 * r, 4 * r + 4)) for r in (0, 1)]
    halves = [layout(OTHER, output_range=(3 * r, 3 * r + 3)) for r in (0, 1)]
    check_shards([kernel(r, layouts=(rows[r], halves[r])) for r in (0, 1)], (SPEC, OTHER))
    with pytest.raises(InternalFault) as caught:  # the first shard twice: half of each update is in neither
        check_shards([kernel(r, layouts=(rows[0], halves[0])) for r in (0, 1)], (SPEC, OTHER))
    assert caught.value.code is ErrorCode.IDENTITY_INVALID


@pytest.mark.parametrize(
    ("value", "expected"),
    [(8, "8"), ("8.0", "8"), ("1.6e1", "16"), ("0.1", "0.1"), ("1e-3", "0.001"), (10**8, "100000000")],
)
def test_alpha_text(value: int | str, expected: str) -> None:
    assert alpha_text(value) == expected


@pytest.mark.parametrize("value", [0, -1, 10**9, "nan", "inf", "-0.0", "1e999", "1e-999", "x", 10**400])
def test_what_is_no_alpha(value: int | str) -> None:
    assert alpha_text(value) is None


def test_scales() -> None:
    assert scale_of("16", 64, ScaleRule.ALPHA_OVER_R) == 0.25
    assert scale_of("16", 64, ScaleRule.ALPHA_OVER_SQRT_R) == 2.0
    assert scale_bits("1", 1, ScaleRule.ALPHA_OVER_R) == 0x3F80_0000
