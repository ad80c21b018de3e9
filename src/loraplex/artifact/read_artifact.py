"""The way in: a folder becomes an artifact, or a typed refusal.

Specification: 0x01G; architecture "A request's way" (4) (verify, hash over the bytes read).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from loraplex.artifact.base_facts import BaseFacts, base_notes, companion_notes, token_notes
from loraplex.artifact.base_modules import BaseModules, BaseTensors
from loraplex.artifact.companions import TokenId, read_companions
from loraplex.artifact.peft_config import decode_config
from loraplex.artifact.record import Artifact, Method
from loraplex.artifact.refuse import unsupported
from loraplex.artifact.resolve import fill, fit
from loraplex.artifact.source import ByteProgress, WeightFiles, read_config
from loraplex.artifact.tensors import Dtype


def load_adapter(
    path: str | os.PathLike[str],
    base: BaseModules,
    base_tensors: BaseTensors | None = None,
    progress: ByteProgress | None = None,
    *,
    served: Dtype | None = None,
    facts: BaseFacts | None = None,
    token_id: TokenId | None = None,
) -> Artifact:
    """Read, verify and resolve the PEFT adapter in the folder `path` against `base`.

    base_tensors: the base's weights, for files that repeat some of them. progress: see `ByteProgress`.
    served: element type that the base is served in, in which repeated weights are compared too. facts: what
    the base is beside its modules; without it nothing is noted. token_id: of the base's tokenizer, against
    which that of the files is held. Raises a `CallerError` of the `adapter_*` codes; on return every tensor
    of the files is applied.
    """
    folder = Path(path)
    record = read_config(folder)
    config = decode_config(record, base.family)
    notes = () if facts is None else base_notes(record, facts)
    with WeightFiles(folder) as weights:
        fitted = fit(config, weights.entries, base)
        tensors = weights.read(progress)
    artifact = fill(fitted, tensors, base_tensors, served)
    companions = read_companions(folder, token_id)
    if facts is not None:
        notes += token_notes(artifact, companions, base, facts) + companion_notes(companions, base, facts)
    return replace(artifact, notes=notes, companions=companions)


def require_executable(artifact: Artifact, supported: Iterable[Method]) -> None:
    """Refuse with `adapter_unsupported` an adapter of which the operators cannot execute every part."""
    missing = artifact.methods - frozenset(supported)
    if missing:
        names = ", ".join(sorted(missing))
        raise unsupported("", f"the adapter is {artifact.method}; {names} cannot be executed yet")
