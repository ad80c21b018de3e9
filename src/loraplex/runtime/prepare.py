"""From a folder to a registered image: fetch, verify, hash, convert, store. Heavy, and never on the step loop.

Specification: DESIGN 2 step 4, DESIGN 4 "Loading"; 0x01G.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from loraplex.artifact.convert import to_image
from loraplex.artifact.identify import AdapterIdentity, identify
from loraplex.artifact.load import load_adapter, require_executable
from loraplex.artifact.record import Artifact, Method
from loraplex.core.messages import RegisterAdapter
from loraplex.runtime.base import BaseModel
from loraplex.runtime.images import ImageStore

EXECUTABLE = frozenset(Method) - {Method.ALORA}
"""Methods that the operators execute: all but aLoRA, whose activation point requests do not carry yet."""


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """A verified adapter whose image lies in the store. register: the engine's message, with call id 0."""

    identity: AdapterIdentity
    method: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    tensors_applied: int
    tensors_total: int
    modules: int
    device_bytes: int
    host_bytes: int
    report: str
    register: RegisterAdapter


def prepare_adapter(path: str | os.PathLike[str], base: BaseModel, store: ImageStore) -> PreparedAdapter:
    """Read, verify, hash and convert the adapter in `path`, and put its image into `store`.

    Raises a `CallerError` of the `adapter_*` codes; then nothing was stored.
    """
    artifact = load_adapter(path, base.modules, base.tensors)
    require_executable(artifact, EXECUTABLE)
    image = to_image(artifact, base.geometry, base.dtype, base.abi, base.tensors)
    store.put(image)
    return PreparedAdapter(
        identity=identify(artifact, base.abi),
        method=artifact.method,
        ranks=artifact.ranks,
        targets=tuple(sorted({m.module.name.lower() for m in artifact.modules})),
        tensors_applied=artifact.tensors_applied,
        tensors_total=artifact.tensors_total,
        modules=len(artifact.modules),
        device_bytes=image.pages.nbytes,
        host_bytes=artifact.nbytes,
        report=artifact.report,
        register=_register(artifact, image.key, image.kernel_digest, len(image.pages)),
    )


def _register(artifact: Artifact, key: str, kernel_digest: str, pages: int) -> RegisterAdapter:
    ranks = Counter(m.rank for m in artifact.modules if m.rank)
    return RegisterAdapter(
        call_id=0,
        key=key,
        kernel_digest=kernel_digest,
        pages=pages,
        ranks=tuple(sorted(ranks.items())),
        modules=tuple(sorted({int(m.module) for m in artifact.modules})),
        host_bytes=artifact.nbytes,
    )
