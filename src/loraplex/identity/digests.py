"""Every identity of the runtime as a frozen record with a digest: base, artifact, semantics, kernel, request, slot.

Each record answers one question and holds nothing that belongs to another: an alias, a path or a slot is never part
of what an adapter is. Digests of bytes are made by whoever read them and passed in.

Specification: 0x01G; DESIGN 4 "Identity".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.identity.canonical import Value, check_digest, digest

ALWAYS_ON: Final = digest({"activation": "always"})
"""Activation policy of an ordinary adapter: every position."""


def invocation_policy(tokens: Sequence[int]) -> str:
    """Activation policy of an adapter that is on from its last invocation sequence (0x08E)."""
    if not tokens:
        raise InternalFault(ErrorCode.IDENTITY_INVALID, "an invocation policy needs at least one token")
    return digest({"activation": "invocation", "tokens": list(tokens)})


@dataclass(frozen=True, slots=True)
class BaseAbi:
    """Which exact shared operator: digests of weights, configuration, weight transforms and target-module map."""

    weights: str
    config: str
    transforms: str
    target_map: str

    @property
    def digest(self) -> str:
        """H_base."""
        return digest(
            {
                "model_weights_sha256": check_digest("weights", self.weights),
                "model_config_sha256": check_digest("config", self.config),
                "weight_transform_sha256": check_digest("transforms", self.transforms),
                "target_module_map_sha256": check_digest("target_map", self.target_map),
            }
        )


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One factor or vector: its logical axes, element type, shape and the digest of the bytes as they were read."""

    role: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def value(self) -> Value:
        """For `canonical`."""
        if len(self.axes) != len(self.shape):
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID,
                f"tensor {self.role} has shape {self.shape} but the axes {self.axes}",
            )
        return {
            "role": self.role,
            "axes": list(self.axes),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sha256": check_digest(self.role, self.sha256),
        }


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One adapted module. base_shape: [d_out, d_in]. alpha: shortest decimal text. rule: how the scale follows."""

    name: str
    target: str
    base_shape: tuple[int, int]
    rank: int
    alpha: str
    rule: str
    tensors: tuple[TensorRecord, ...]

    def value(self) -> Value:
        """For `canonical`; raises `identity_invalid` where factors disagree with rank or base shape."""
        _check_factors(self)
        return {
            "module": self.name,
            "target": self.target,
            "base_shape": list(self.base_shape),
            "rank": self.rank,
            "alpha": self.alpha,
            "scale_rule": self.rule,
            "tensors": [t.value() for t in self.tensors],
        }


def _check_factors(spec: ModuleSpec) -> None:
    roles = [t.role for t in spec.tensors]
    if roles != sorted(set(roles)):
        raise InternalFault(
            ErrorCode.IDENTITY_INVALID, f"module {spec.name} has the tensors {roles}, expected each once"
        )
    d_out, d_in = spec.base_shape
    expected = {"A": (("rank", "input"), (spec.rank, d_in)), "B": (("output", "rank"), (d_out, spec.rank))}
    for tensor in spec.tensors:
        if tensor.role in expected and (tensor.axes, tensor.shape) != expected[tensor.role]:
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID,
                f"factor {tensor.role} of {spec.name} is {tensor.axes} {tensor.shape}, expected {expected[tensor.role]}",
            )


@dataclass(frozen=True, slots=True)
class ArtifactIdentity:
    """Which learned delta: method, effective configuration, base and module specifications, sorted by name."""

    method: str
    peft_config: str
    base: str
    modules: tuple[ModuleSpec, ...]

    @property
    def digest(self) -> str:
        """H_artifact."""
        names = [m.name for m in self.modules]
        if names != sorted(set(names)):
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID, "module records must be sorted by name and occur once"
            )
        return digest(
            {
                "method": self.method,
                "peft_config_sha256": check_digest("peft_config", self.peft_config),
                "base_sha256": check_digest("base", self.base),
                "modules": [m.value() for m in self.modules],
            }
        )


def semantic_abi(base: str, artifact: str, activation: str) -> str:
    """H_adapter_semantic: which base-plus-adapter function is requested."""
    return digest(
        {
            "base_sha256": check_digest("base", base),
            "artifact_sha256": check_digest("artifact", artifact),
            "activation_policy_sha256": check_digest("activation", activation),
        }
    )


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """How one module's factors lie on one shard: physical axes and the ranges of input and output held here."""

    name: str
    rank: int
    scale_bits: int
    a_axes: tuple[str, str]
    b_axes: tuple[str, str]
    input_range: tuple[int, int]
    output_range: tuple[int, int]

    def value(self) -> Value:
        """For `canonical`."""
        return {
            "module": self.name,
            "rank": self.rank,
            "scale_bits": self.scale_bits,
            "a_axes": list(self.a_axes),
            "b_axes": list(self.b_axes),
            "input_range": list(self.input_range),
            "output_range": list(self.output_range),
        }

    def scalars(self) -> int:
        """Factor elements held on this shard."""
        inputs = self.input_range[1] - self.input_range[0]
        outputs = self.output_range[1] - self.output_range[0]
        return self.rank * (inputs + outputs)


@dataclass(frozen=True, slots=True)
class KernelAbi:
    """Which converted bytes a kernel may consume: storage layout, conversion, element type, packing, shard.

    kernel_family names the storage layout, never a launch. shard: (rank, ranks).
    """

    semantic: str
    kernel_family: str
    conversion_revision: int
    dtype: str
    packing: Mapping[str, Value]
    layouts: tuple[LocalLayout, ...]
    shard: tuple[int, int]

    @property
    def digest(self) -> str:
        """H_kernel,local."""
        names = [layout.name for layout in self.layouts]
        if names != sorted(set(names)):
            raise InternalFault(
                ErrorCode.IDENTITY_INVALID, "local layouts must be sorted by name and occur once"
            )
        if not 0 <= self.shard[0] < self.shard[1]:
            raise InternalFault(ErrorCode.IDENTITY_INVALID, f"shard {self.shard} is not (rank, ranks)")
        return digest(
            {
                "adapter_semantic_sha256": check_digest("semantic", self.semantic),
                "kernel_family": self.kernel_family,
                "conversion_revision": self.conversion_revision,
                "dtype": self.dtype,
                "packing": self.packing,
                "local_module_layouts": [layout.value() for layout in self.layouts],
                "parallel_shard": list(self.shard),
            }
        )
