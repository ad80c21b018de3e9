"""Valid records for catalog tests, numbered."""

from __future__ import annotations

import hashlib
from typing import Any

from loraplex.catalog.changes import Draft
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, ArtifactRecord
from loraplex.identity.digests import ALWAYS_ON, semantic_abi

BASE_ABI = hashlib.sha256(b"base").hexdigest()


def artifact(number: int = 0, **changes: Any) -> ArtifactRecord:
    """The artifact of one number: another number is other content."""
    content = hashlib.sha256(f"artifact {number}".encode()).hexdigest()
    fields: dict[str, Any] = {
        "base": BASE_ABI, "artifact": content, "activation": ALWAYS_ON,
        "semantic": semantic_abi(BASE_ABI, content, ALWAYS_ON), "method": "lora", "ranks": (4, 8),
        "targets": ("q", "v"), "tensors_applied": 12, "tensors_total": 12, "modules": 6, "nbytes": 4096,
    }  # fmt: skip
    return ArtifactRecord(**(fields | changes))


def draft(alias: str = "a", number: int = 0, namespace: str = DEFAULT_NAMESPACE, **changes: Any) -> Draft:
    """What publishing that artifact under an alias asks for."""
    fields: dict[str, Any] = {"source": f"/adapters/{number}", "artifact": artifact(number)} | changes
    return Draft(AliasKey(namespace, alias), **fields)
