"""What `loraplex verify` finds out about an adapter without serving it: everything that a load would.

The same reader, resolver, conversion and digests as a load, so that what passes here is what is served.
Specification: 0x01G (manifest), 0x04D (page demand).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.artifact.artifact_manifest import manifest_of
from loraplex.artifact.base_modules import BaseModules, BaseTensors
from loraplex.artifact.convert import to_image
from loraplex.artifact.identify import function_of, identify, shares_of
from loraplex.artifact.read_artifact import require_executable
from loraplex.artifact.record import AdaptedModule, Artifact, Method
from loraplex.artifact.source import weight_files
from loraplex.artifact.tensors import Dtype
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.layout import PageGeometry, block_bytes, object_demand
from loraplex.identity.compatibility import Shared, Shares
from loraplex.identity.digests import BaseAbi
from loraplex.identity.manifest import AdapterManifest, check_adapter_manifest, decode_manifest

_WHERE: Final = {
    Shared.ALWAYS: "always",
    Shared.BEFORE_INVOCATION: "before the invocation",
    Shared.NEVER: "never",
}


@dataclass(frozen=True, slots=True)
class Verification:
    """A verified adapter: artifact, manifest, and what it costs.

    pages: where it has no slab page to share. size_class: of the block that it takes, 0 for whole pages.
    file_bytes: on disk. factor_bytes: elements in the served type, without page tails. host_bytes,
    device_bytes: what the host store and the pool hold: pages, or a block. shares: what it has in common with
    the base.
    """

    artifact: Artifact
    manifest: AdapterManifest
    pages: int
    page_bytes: int
    file_bytes: int
    factor_bytes: int
    size_class: int
    shares: Shares

    @property
    def host_bytes(self) -> int:
        """Bytes of the image's pages or block in the host store."""
        return self.pages * block_bytes(self.page_bytes, self.size_class)

    @property
    def device_bytes(self) -> int:
        """Bytes of the pages, or of the block, that the adapter takes from the pool."""
        return self.pages * block_bytes(self.page_bytes, self.size_class)

    def record(self) -> dict[str, Any]:
        """For `--json`."""
        artifact, manifest = self.artifact, self.manifest
        return {
            "ok": True,
            "method": artifact.method,
            "ranks": list(artifact.ranks),
            "targets": sorted({m.module.name.lower() for m in artifact.modules}),
            "tensors_applied": artifact.tensors_applied,
            "tensors_total": artifact.tensors_total,
            "report": artifact.report,
            "notes": [{"kind": note.kind.value, "message": note.message} for note in artifact.notes],
            "invocation_tokens": list(artifact.invocation_tokens or ()),
            "shares": msgspec.to_builtins(self.shares),
            "base_digest": manifest.base_sha256,
            "artifact_digest": manifest.artifact_sha256,
            "semantic_digest": manifest.semantic_sha256,
            "kernel_digest": manifest.kernel_sha256[0],
            "modules": [_module_record(m) for m in artifact.modules],
            "tier_bytes": {
                "file": self.file_bytes,
                "factors": self.factor_bytes,
                "host": self.host_bytes,
                "device": self.device_bytes,
            },
            "pages": self.pages,
            "page_bytes": self.page_bytes,
            "size_class": self.size_class,
            "manifest": msgspec.to_builtins(manifest),
        }

    def lines(self) -> list[str]:
        """For a terminal."""
        artifact, manifest = self.artifact, self.manifest
        return [
            f"{artifact.method}: {artifact.report}",
            *(f"note      {note.message}" for note in artifact.notes),
            f"base      {manifest.base_sha256}",
            f"artifact  {manifest.artifact_sha256}",
            f"semantic  {manifest.semantic_sha256}",
            f"kernel    {manifest.kernel_sha256[0]}",
            *(
                f"  {m.name}: rank {m.rank}, alpha {m.alpha}, scale {m.scale:g} ({m.rule.value}), "
                f"{m.d_in} -> {m.d_out}"
                for m in artifact.modules
            ),
            f"bytes     file {self.file_bytes}, factors {self.factor_bytes}",
            f"          host {self.host_bytes}, device {self.device_bytes}",
            f"pages     {self.pages} of {self.page_bytes} bytes{self._shared()}",
            f"shares    {self._with_base()}",
        ]

    def _with_base(self) -> str:
        shares, tokens = self.shares, self.artifact.invocation_tokens
        said = (
            f"KV rows {_WHERE[shares.kv]}, hidden states {_WHERE[shares.hidden]}, logits "
            f"{_WHERE[shares.logits]}, continuations {_WHERE[shares.sampling]}"
        )
        return said if tokens is None else f"{said}; invoked by token ids {list(tokens)}"

    def _shared(self) -> str:
        if not self.size_class:
            return ""
        return f", of which it takes a block of 1/{1 << self.size_class} and shares the rest"


def verify_artifact(
    folder: Path,
    artifact: Artifact,
    base: BaseModules,
    base_abi: BaseAbi,
    geometry: PageGeometry,
    dtype: Dtype,
    *,
    base_tensors: BaseTensors | None = None,
    supported: Iterable[Method] | None = None,
) -> Verification:
    """Convert and price an adapter that was read from `folder`; raises whatever a load would raise.

    geometry, dtype: of the server that would hold it. supported: methods that the operators execute; None
    checks the files alone.
    """
    if supported is not None:
        require_executable(artifact, supported)
    image = to_image(artifact, geometry, dtype, base_abi.digest, base_tensors)
    demand = object_demand(geometry, image.extents)
    manifest = manifest_of(artifact, base_abi, geometry, dtype)
    check_adapter_manifest(manifest)
    identity = identify(artifact, base_abi.digest)
    return Verification(
        artifact=artifact,
        manifest=manifest,
        pages=demand.pages,
        page_bytes=geometry.page_bytes,
        size_class=demand.size_class,
        file_bytes=sum(file.stat().st_size for file in weight_files(folder)),
        factor_bytes=manifest.ledger.shard_bytes[0],
        shares=shares_of(artifact, identity, function_of(artifact, identity, base.layers)),
    )


def expected_manifest(data: bytes, name: str) -> AdapterManifest:
    """The manifest in `data`, an adapter's or a whole launch's, after every check of its kind.

    name: of the file, for people. Raises `manifest_invalid` for what is none or does not hold, caused by the
    invariant that it breaks (`identity_invalid`, `lease_mismatch`, `stale_*`, ...): the file is the caller's,
    whoever wrote it.
    """
    try:
        return decode_manifest(data)
    except LoraplexError as error:
        raise CallerError(
            ErrorCode.MANIFEST_INVALID,
            f"{name} is not a manifest that holds ({error.code.value}): {error.message}",
            param="manifest",
        ) from error


def check_same(expected: AdapterManifest, found: AdapterManifest) -> None:
    """Raise unless the manifest expected is that of the adapter found: `adapter_source_changed`,
    `adapter_base_mismatch`.

    Kernel ABIs are checked within a manifest; they follow a server's page size and element type, not the
    adapter.
    """
    if expected.base_sha256 != found.base_sha256:
        raise CallerError(
            ErrorCode.ADAPTER_BASE_MISMATCH,
            f"the manifest is for base {expected.base_sha256:.16}, this base is {found.base_sha256:.16}",
        )
    if expected.semantic_sha256 != found.semantic_sha256:
        raise CallerError(
            ErrorCode.ADAPTER_SOURCE_CHANGED,
            f"the manifest is of artifact {expected.artifact_sha256:.16}, the files are "
            f"{found.artifact_sha256:.16}",
        )


def refusal_record(error: LoraplexError) -> dict[str, Any]:
    """For `--json` when the adapter is refused. violated: code of what a manifest breaks, where one does not
    hold.
    """
    record = {"code": error.code.value, "message": error.message, "param": error.param}
    cause = error.__cause__
    if error.code is ErrorCode.MANIFEST_INVALID and isinstance(cause, LoraplexError):
        record["violated"] = cause.code.value
    return {"ok": False, "error": record}


def _module_record(module: AdaptedModule) -> dict[str, Any]:
    return {
        "name": module.name,
        "target": module.module.name.lower(),
        "layer": module.layer,
        "d_in": module.d_in,
        "d_out": module.d_out,
        "rank": module.rank,
        "alpha": module.alpha,
        "rule": module.rule.value,
        "scale": module.scale,
        "tensors": {
            role.value: {"name": t.name, "dtype": t.dtype.value, "shape": list(t.shape), "sha256": t.sha256}
            for role, t in sorted(module.tensors.items())
        },
    }
