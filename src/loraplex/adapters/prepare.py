"""From a folder to a registered image: fetch, verify, hash, convert, store. Heavy, and never on the step
loop.

This is the work itself. The server asks `preparation.py`, which hands it to `prepare_pool.py`, whose children
run `prepare_process.py`, which calls this; `LLM` calls this directly.

Specification: architecture "A request's way" (4), rulings "Loading"; 0x01G.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from loraplex.artifact.card import Card, read_card
from loraplex.artifact.companions import NO_COMPANIONS, Companions
from loraplex.artifact.convert import to_image
from loraplex.artifact.identify import AdapterIdentity, function_of, identify, shares_of
from loraplex.artifact.notes import Note
from loraplex.artifact.read_artifact import load_adapter, require_executable
from loraplex.artifact.record import Artifact, Method
from loraplex.artifact.refuse import bad_config
from loraplex.build.base_model import BaseModel
from loraplex.catalog.artifacts import ArtifactStore
from loraplex.catalog.sources import LocalSource, parse_source
from loraplex.core.layout import AdapterImage, ObjectDemand, object_demand
from loraplex.core.messages import RegisterAdapter
from loraplex.identity.activation import last_invocation
from loraplex.identity.compatibility import NOTHING_SHARED, Shares
from loraplex.images.disk_store import ImageStore
from loraplex.text.codec import TextCodec, load_tokenizer

EXECUTABLE = frozenset(Method)
"""Methods that the operators execute."""


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """A verified adapter whose image lies in the store. register: the engine's message, with call id 0.

    content: key of its files in the artifact store, None when they were read from a local folder. notes,
    companions, card: of these files; another folder with the same function may have others.
    shares: what it has in common with the base; nothing where nobody looked.
    """

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
    content: str | None = None
    notes: tuple[Note, ...] = ()
    companions: Companions = NO_COMPANIONS
    shares: Shares = NOTHING_SHARED
    card: Card | None = None


def prepare_adapter(path: str | os.PathLike[str], base: BaseModel, store: ImageStore) -> PreparedAdapter:
    """Read, verify, hash and convert the adapter in `path`, and put its image into `store`.

    Raises a `CallerError` of the `adapter_*` codes; then nothing was stored.
    """
    tensors = base.tensors
    codec = None if base.weights is None else base_codec(base.weights)
    artifact = load_adapter(
        path,
        base.modules,
        tensors,
        served=base.dtype,
        facts=base.facts,
        token_id=None if codec is None else codec.token_id,
    )
    require_executable(artifact, EXECUTABLE)
    card = read_card(Path(path), activated=artifact.invocation_tokens is not None)
    if card is not None:
        check_card(card, artifact, codec)
    identity = identify(artifact, base.abi)
    function = function_of(artifact, identity, base.spec.layers)
    image = to_image(artifact, base.geometry, base.dtype, base.abi, tensors)
    store.put(image)
    return PreparedAdapter(
        identity=identity,
        method=artifact.method,
        ranks=artifact.ranks,
        targets=tuple(sorted({m.module.name.lower() for m in artifact.modules})),
        tensors_applied=artifact.tensors_applied,
        tensors_total=artifact.tensors_total,
        modules=len(artifact.modules),
        device_bytes=image.pages.nbytes,
        host_bytes=artifact.nbytes,
        report=artifact.report,
        register=_register(artifact, image, object_demand(base.geometry, image.extents), function.kv),
        notes=artifact.notes,
        companions=artifact.companions,
        shares=shares_of(artifact, identity, function),
        card=card,
    )


def prepare_source(
    source: str | Path,
    base: BaseModel,
    store: ImageStore,
    artifacts: ArtifactStore,
    content: str | None = None,
) -> PreparedAdapter:
    """`prepare_adapter` for any source: a remote one is downloaded into `artifacts` first.

    content: the key that its files must have there. Raises as `prepare_adapter` and `ArtifactStore.reading`
    do.
    """
    parsed = parse_source(os.fspath(source))
    if isinstance(parsed, LocalSource):
        return prepare_adapter(parsed.folder, base, store)
    with artifacts.reading(parsed, content) as (folder, key):
        return replace(prepare_adapter(folder, base, store), content=key)


@lru_cache(maxsize=1)
def base_codec(folder: str) -> TextCodec | None:
    """The base's tokenizer; a process prepares for one base. None where it has none."""
    return load_tokenizer(Path(folder))


def check_card(card: Card, artifact: Artifact, codec: TextCodec | None) -> None:
    """Raise `adapter_config_invalid` where a text of the card does not give the invocation's tokens.

    codec: of the base; without one nothing can be said.
    """
    if codec is None:
        return
    for key, text in card.texts.items():
        ids = codec.encode(text, add_special=False)
        if last_invocation(ids, artifact.invocation_tokens or ()) is None:
            raise bad_config(
                key,
                f"{key} of the card is {text[:80]!r}, which does not give the tokens of "
                "alora_invocation_tokens",
            )


def _register(
    artifact: Artifact, image: AdapterImage, demand: ObjectDemand, execution: str
) -> RegisterAdapter:
    ranks = Counter(m.rank for m in artifact.modules if m.rank)
    return RegisterAdapter(
        call_id=0,
        key=image.key,
        kernel_digest=image.kernel_digest,
        pages=demand.pages,
        size_class=demand.size_class,
        ranks=tuple(sorted(ranks.items())),
        modules=tuple(sorted({int(m.module) for m in artifact.modules})),
        host_bytes=artifact.nbytes,
        execution=execution,
        invocation=artifact.invocation_tokens or (),
    )
