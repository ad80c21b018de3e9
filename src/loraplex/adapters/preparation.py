"""Preparing adapters for the engine of the moment, in the preparation processes, with room made in a full
artifact store.

The server's way in. It hands the work to `prepare_pool.py`; `prepare.py` does it.

Never registers or publishes anything. Specification: rulings "Loading", "Start-up".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.prepare_pool import PreparePool
from loraplex.artifact.notes import NoteKind
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import BaseModel, base_modules, read_config
from loraplex.build.base_text import read_base_facts
from loraplex.catalog.artifacts import ArtifactStore
from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, CapacityError, ErrorCode
from loraplex.model.spec import spec_from_config

Contents = Callable[[], Awaitable[tuple[set[str], set[str]]]]


async def _nothing() -> tuple[set[str], set[str]]:
    return set(), set()


class Preparation:
    """Prepares adapters for the engine of the moment; set up when the engine has said what it is.

    named: keys in the artifact store that (current, superseded) revisions name, asked for when the store is
    full.
    """

    def __init__(
        self, folder: Path, engine: EngineConfig, artifacts: ArtifactStore, *, strict_base: bool = False
    ) -> None:
        self.named: Contents = _nothing
        self._folder = folder
        self._engine = engine
        self._artifacts = artifacts
        self._strict_base = strict_base
        self._pool: PreparePool | None = None

    def begin(self, info: dict[str, Any]) -> None:
        """info: the engine's own description of the base it loaded."""
        spec = spec_from_config(read_config(self._folder))
        dtype = Dtype(info["dtype"])
        modules = base_modules(spec)
        dummy = self._engine.load_format == "dummy"
        base = BaseModel(
            spec,
            modules,
            info["base_abi"],
            spec.kv_shape(dtype.itemsize, info["page_tokens"]),
            dtype,
            None if dummy else str(self._folder),
            read_base_facts(self._folder),
        )
        self._pool = PreparePool(
            base, self._engine.images_dir, self._artifacts.root, self._artifacts.limit_bytes
        )

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        """Prepare the adapter in `source`. A full artifact store is first cleared of what no revision names,
        then of what only superseded revisions name. Raises `adapter_base_mismatch` with `strict_base`, for
        another base's.
        """
        prepared = await self._prepared(source, content)
        if self._strict_base:
            require_own_base(prepared)
        return prepared

    async def _prepared(self, source: str, content: str | None) -> PreparedAdapter:
        if self._pool is None:
            raise CapacityError(
                ErrorCode.ENGINE_UNAVAILABLE, "adapters can be loaded once the engine is ready"
            )
        for keep_superseded in (True, False):
            try:
                return await self._pool(source, content)
            except CapacityError as error:
                if error.code is not ErrorCode.ARTIFACT_STORE_FULL:
                    raise
            current, superseded = await self.named()
            await self._pool.reclaim(current | superseded if keep_superseded else current)
        return await self._pool(source, content)

    def end(self) -> None:
        """End every preparation at once; none begins any more."""
        if self._pool is not None:
            self._pool.end()

    async def close(self) -> None:
        """End the preparing processes."""
        if self._pool is not None:
            await self._pool.close()


def require_own_base(prepared: PreparedAdapter) -> None:
    """Raise `adapter_base_mismatch` for an adapter that names another base model, or another
    revision of it.
    """
    for note in prepared.notes:
        if note.kind in (NoteKind.OTHER_BASE, NoteKind.OTHER_BASE_REVISION):
            raise CallerError(
                ErrorCode.ADAPTER_BASE_MISMATCH,
                f"{note.message}; serve it over its own base, or without --strict-base",
                param="source",
            )
