"""The identities of an artifact: its record for H_artifact, and the semantic digest.

Connects what was read to `identity`, which knows nothing of files. Specification: 0x01G.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex.artifact.base_modules import BaseModules
from loraplex.artifact.record import AdaptedModule, Artifact, TensorRole
from loraplex.identity.canonical import digest
from loraplex.identity.compatibility import Function, Shares, adapter_function, shares_with_base
from loraplex.identity.digests import (
    ALWAYS_ON,
    ArtifactIdentity,
    ModuleSpec,
    TensorRecord,
    invocation_policy,
    semantic_abi,
)

_AXES: Final[dict[TensorRole, tuple[str, ...]]] = {
    TensorRole.A: ("rank", "input"),
    TensorRole.B: ("output", "rank"),
    TensorRole.LORA_BIAS: ("output",),
    TensorRole.MAGNITUDE: ("output",),
    TensorRole.BIAS: ("output",),
    TensorRole.IA3_IN: ("one", "input"),
    TensorRole.IA3_OUT: ("output", "one"),
}


@dataclass(frozen=True, slots=True)
class AdapterIdentity:
    """Digests of one artifact over one base: H_base, H_artifact, H_adapter_semantic, and its activation
    policy's.
    """

    base: str
    artifact: str
    semantic: str
    activation: str = ALWAYS_ON


def artifact_record(artifact: Artifact, base_abi: str) -> ArtifactIdentity:
    """The record behind H_artifact: the effective configuration and every tensor as it was read."""
    return ArtifactIdentity(
        method=artifact.method,
        peft_config=digest(
            {
                "methods": sorted(m.value for m in artifact.methods),
                "invocation_tokens": list(artifact.invocation_tokens or ()),
            }
        ),
        base=base_abi,
        modules=tuple(_spec(module) for module in artifact.modules),
    )


def identify(artifact: Artifact, base_abi: str) -> AdapterIdentity:
    """All digests of `artifact` over the base whose H_base is `base_abi`."""
    content = artifact_record(artifact, base_abi).digest
    tokens = artifact.invocation_tokens
    policy = ALWAYS_ON if tokens is None else invocation_policy(tokens)
    return AdapterIdentity(base_abi, content, semantic_abi(base_abi, content, policy), policy)


def function_of(artifact: Artifact, identity: AdapterIdentity, layers: int) -> Function:
    """What the artifact is where it acts, as far as KV rows, hidden states and logits can tell (0x08B).
    layers: of the base.
    """
    return adapter_function(identity.base, identity.semantic, map(_spec, artifact.modules), layers)


def shares_of(artifact: Artifact, identity: AdapterIdentity, function: Function) -> Shares:
    """What it has in common with the base."""
    return shares_with_base(function, identity.base, activated=artifact.invocation_tokens is not None)


def _spec(module: AdaptedModule) -> ModuleSpec:
    return ModuleSpec(
        name=module.name,
        target=module.module.name.lower(),
        base_shape=(module.d_out, module.d_in),
        rank=module.rank,
        alpha=module.alpha,
        rule=module.rule.value,
        tensors=tuple(
            TensorRecord(role.value, _AXES[role], tensor.dtype.value, tensor.shape, tensor.sha256)
            for role, tensor in sorted(module.tensors.items())
        ),
    )


def target_map(base: BaseModules) -> str:
    """Digest of the base's target-module map: names, dimensions and biases of every adaptable module."""
    return digest([[m.name, m.module.name.lower(), m.d_in, m.d_out, m.has_bias] for m in base.modules()])
