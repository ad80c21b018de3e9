"""The manifest of an artifact: its identity records and the kernel ABIs of its conversions.

Specification: 0x01G "Worked identity".
"""

from __future__ import annotations

from loraplex.artifact.convert import extent_table, kernel_abi
from loraplex.artifact.identify import artifact_record, identify
from loraplex.artifact.record import Artifact
from loraplex.artifact.shards import module_shapes
from loraplex.artifact.tensors import Dtype
from loraplex.core.layout import PageGeometry, place
from loraplex.identity.digests import BaseAbi
from loraplex.identity.kernel import KernelAbi
from loraplex.identity.manifest import AdapterManifest, adapter_manifest


def kernels_of(
    artifact: Artifact, geometry: PageGeometry, dtype: Dtype, base_abi: str, ranks: int = 1
) -> tuple[KernelAbi, ...]:
    """The kernel ABI of each of `ranks` shards; no byte is converted. base_abi: H_base."""
    semantic = identify(artifact, base_abi).semantic
    out = []
    for rank in range(ranks):
        extents, _ = place(geometry, module_shapes(artifact, (rank, ranks)))
        out.append(kernel_abi(artifact, geometry, dtype, semantic, extent_table(extents), (rank, ranks)))
    return tuple(out)


def manifest_of(
    artifact: Artifact, base: BaseAbi, geometry: PageGeometry, dtype: Dtype, ranks: int = 1
) -> AdapterManifest:
    """The artifact's manifest over `base`, converted to `dtype` for `ranks` shards."""
    kernels = kernels_of(artifact, geometry, dtype, base.digest, ranks)
    return adapter_manifest(base, artifact_record(artifact, base.digest), artifact.invocation_tokens, kernels)
