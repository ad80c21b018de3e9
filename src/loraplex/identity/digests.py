"""Base, artifact, semantic and kernel identities: frozen records, each with the digest of exactly its own
fields.

Each record answers one question and holds nothing that belongs to another: an alias, a path or a slot is
never part of what an adapter is. Digests of bytes are made by whoever read them and passed in.

Specification: 0x01G; rulings "Identity".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.identity.canonical import Value, check_digest, digest
from loraplex.identity.scale import ScaleRule, alpha_text

ALWAYS_ON: Final = digest({"activation": "always"})
"""Activation policy of an ordinary adapter: every position."""

FACTOR_AXES: Final = {"A": ("rank", "input"), "B": ("output", "rank")}
"""Logical axes of the two factors."""


def invalid(message: str) -> InternalFault:
    """The error of a record that contradicts itself or its digest."""
    return InternalFault(ErrorCode.IDENTITY_INVALID, message)


def invocation_policy(tokens: Sequence[int]) -> str:
    """Activation policy of an adapter that is on from its last invocation sequence (0x08E)."""
    if not tokens:
        raise invalid("an invocation policy needs at least one token")
    return digest({"activation": "invocation", "tokens": list(tokens)})


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its role, logical axes, element type, shape and the digest of its bytes as they
    were read.
    """

    role: str
    axes: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def value(self) -> Value:
        """For `canonical`."""
        if len(self.axes) != len(self.shape):
            raise invalid(f"tensor {self.role} has shape {self.shape} but the axes {self.axes}")
        return {
            "role": self.role,
            "axes": self.axes,
            "dtype": self.dtype,
            "shape": self.shape,
            "sha256": check_digest(self.role, self.sha256),
        }


class BaseAbi(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which exact shared operator: digests of weights, configuration, weight transforms and target-module
    map.
    """

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


class ModuleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One adapted module. base_shape: (d_out, d_in). alpha: shortest decimal text. rule: how the scale
    follows.

    rank 0 and alpha "0" where the module has vectors only. tensors: sorted by role.
    """

    name: str
    target: str
    base_shape: tuple[int, int]
    rank: int
    alpha: str
    rule: str
    tensors: tuple[TensorRecord, ...]

    def value(self) -> Value:
        """For `canonical`; raises `identity_invalid` where factors disagree with rank or base shape."""
        self.check_factors()
        return {
            "module": self.name,
            "target": self.target,
            "base_shape": self.base_shape,
            "rank": self.rank,
            "alpha": self.alpha,
            "scale_rule": self.rule,
            "tensors": [t.value() for t in self.tensors],
        }

    def check_factors(self) -> None:
        """Factors are there exactly when the rank is not 0, and have the logical axes and shapes."""
        roles = [t.role for t in self.tensors]
        if roles != sorted(set(roles)) or not roles:
            raise invalid(f"module {self.name} has the tensors {roles}, expected each once, sorted by role")
        good_alpha = alpha_text(self.alpha) == self.alpha if self.rank else self.alpha == "0"
        if not good_alpha or self.rule not in set(ScaleRule):
            raise invalid(
                f"module {self.name} has alpha {self.alpha!r} and rule {self.rule!r}, which give no scale"
            )
        d_out, d_in = self.base_shape
        shapes = {"A": (self.rank, d_in), "B": (d_out, self.rank)} if self.rank else {}
        if set(roles) & set(FACTOR_AXES) != set(shapes):
            raise invalid(f"module {self.name} has rank {self.rank} but the tensors {roles}")
        for tensor in self.tensors:
            if tensor.role in shapes:
                expected = (FACTOR_AXES[tensor.role], shapes[tensor.role])
                if (tensor.axes, tensor.shape) != expected:
                    raise invalid(
                        f"factor {tensor.role} of {self.name} is {tensor.axes} {tensor.shape}, expected "
                        f"{expected}"
                    )

    def scalars(self) -> int:
        """Elements of all tensors."""
        return sum(_elements(t.shape) for t in self.tensors)


def _elements(shape: tuple[int, ...]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


class ArtifactIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which learned delta: method, effective configuration, base and module specifications, sorted
    by name.
    """

    method: str
    peft_config: str
    base: str
    modules: tuple[ModuleSpec, ...]

    @property
    def digest(self) -> str:
        """H_artifact."""
        names = [m.name for m in self.modules]
        if names != sorted(set(names)) or not names:
            raise invalid("module records must be there, sorted by name, each once")
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
