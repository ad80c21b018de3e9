"""What `loraplex verify` does: an adapter's source is read as a server would read it, and nothing is
registered.

Progress goes to standard error. Never needs a server or a device. Specification: 0x01G; interface "Command
line".
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from loraplex.adapters.prepare import EXECUTABLE, check_card
from loraplex.artifact.card import read_card
from loraplex.artifact.checkpoint import CheckpointTensors
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.source import read_config as read_adapter_config
from loraplex.artifact.tensors import Dtype
from loraplex.artifact.verify import Verification, verify_artifact
from loraplex.build.base_model import base_identity, base_modules, hash_weights, read_config
from loraplex.build.base_text import read_base_facts
from loraplex.catalog.artifacts import DEFAULT_STORE_BYTES, ArtifactStore, artifacts_folder
from loraplex.catalog.sources import LocalSource, parse_source
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.layout import Geometry, PageGeometry
from loraplex.model.progress import terminal_progress
from loraplex.model.spec import spec_from_config
from loraplex.text.codec import load_tokenizer
from loraplex.text.codecs import Codecs, TextChoice


def verify_source(
    adapter: str,
    base: Path,
    dtype: str,
    page_tokens: int,
    *,
    strict_base: bool,
    text: str,
) -> Verification:
    """What a server would find in `adapter`, a folder or a remote source, over the base in the folder `base`.

    dtype, page_tokens: as the server would be started. strict_base: another base's name refuses. text: whose
    chat template and tokens its requests would use, "adapter" or "base". Raises the error with which a server
    would refuse it.
    """
    if page_tokens < 1:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--page-tokens must be at least 1, got {page_tokens}",
            param="page_tokens",
        )
    element = Dtype(dtype)
    spec = spec_from_config(read_config(base))
    modules = base_modules(spec)
    source = parse_source(adapter)
    with ExitStack() as stack:
        progress = stack.enter_context(terminal_progress())
        if isinstance(source, LocalSource):
            folder = source.folder
        else:
            store = ArtifactStore(artifacts_folder(), DEFAULT_STORE_BYTES)
            fetched = partial(progress, "Downloading the adapter")
            folder, _ = stack.enter_context(store.reading(source, progress=fetched))
        read_adapter_config(folder)  # A slip in the path costs nobody the time that hashing the base takes.
        progress("Hashing the weights of the base", 0, 1)
        weights = hash_weights(base)
        progress("Hashing the weights of the base", 1, 1)
        page_bytes = spec.kv_shape(element.itemsize, page_tokens).page_bytes
        codec = load_tokenizer(base)
        tensors = CheckpointTensors(base, modules)
        artifact = load_adapter(
            folder,
            modules,
            tensors,
            partial(progress, "Reading and hashing the adapter"),
            served=element,
            facts=replace(read_base_facts(base), strict=strict_base),
            token_id=None if codec is None else codec.token_id,
        )
        found = verify_artifact(
            folder,
            artifact,
            modules,
            base_identity(spec, modules, weights),
            PageGeometry(Geometry.RANK_ROWS, element.itemsize, row_page_bytes=page_bytes),
            element,
            base_tensors=tensors,
            supported=EXECUTABLE,
        )
        card = read_card(folder, activated=found.artifact.invocation_tokens is not None)
    if card is not None:
        check_card(card, found.artifact, codec)
    Codecs(codec, modules.vocab).of(found.artifact.companions, TextChoice(text))
    return found
