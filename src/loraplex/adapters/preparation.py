"""Preparing adapters for the engine of the moment, in the preparation processes, with room made in a full artifact store.

Never registers or publishes anything. Specification: rulings "Loading", "Start-up".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.prepare_pool import PreparePool
from loraplex.artifact.checkpoint import CheckpointTensors
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import BaseModel, base_modules, read_config
from loraplex.build.base_text import read_base_facts
from loraplex.catalog.artifacts import ArtifactStore
from loraplex.config import EngineConfig
from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.model.spec import spec_from_config

Named = Callable[[], Awaitable[tuple[set[str], set[str]]]]


async def _nothing() -> tuple[set[str], set[str]]:
    return set(), set()


class Preparation:
    """Prepares adapters for the engine of the moment; set up when the engine has said what it is.

    named: keys in the artifact store that (current, superseded) revisions name, asked for when the store is full.
    """

    def __init__(self, folder: Path, engine: EngineConfig, artifacts: ArtifactStore) -> None:
        self.named: Named = _nothing
        self._folder = folder
        self._engine = engine
        self._artifacts = artifacts
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
            None if dummy else CheckpointTensors(self._folder, modules),
            read_base_facts(self._folder),
        )
        self._pool = PreparePool(
            base, self._engine.images_dir, self._artifacts.root, self._artifacts.limit_bytes
        )

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        """Prepare the adapter in `source`. A full artifact store is first cleared of what no revision names, then of
        what only superseded revisions name.
        """
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

    def close(self) -> None:
        """End the preparing process."""
        if self._pool is not None:
            self._pool.close()
