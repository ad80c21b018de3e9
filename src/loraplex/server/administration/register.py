"""The adapters of a starting server: those of the command line, beside what its catalog already knows.

The command line is applied once: an alias that the catalog has never seen is added, one that the command line published
before is published again only when its source holds something else by now. What was swapped or removed since stays so
over a restart. Specification: rulings "Start-up", "Processes".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.prepare_pool import PreparePool
from loraplex.artifact.checkpoint import CheckpointTensors
from loraplex.artifact.source import read_config as read_adapter_config
from loraplex.artifact.tensors import Dtype
from loraplex.build.base_model import BaseModel, base_modules, read_config
from loraplex.build.base_text import read_base_facts
from loraplex.catalog.artifacts import ArtifactStore
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, Revision, check_alias
from loraplex.catalog.sources import is_remote
from loraplex.config import EngineConfig, ServeConfig
from loraplex.core.errors import CallerError, CapacityError, ErrorCode
from loraplex.model.spec import spec_from_config
from loraplex.server.announce import Announcer
from loraplex.server.service import Service

_log: Final = logging.getLogger(__name__)
ADAPTER_CONFIG: Final = "adapter_config.json"
COMMAND_LINE: Final = "command line"
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


def adapter_sources(config: ServeConfig) -> list[tuple[str, str, bool]]:
    """(alias, source, must be served) of the command line: each --adapter, then each subfolder of --adapter-dir."""
    sources = [
        (alias, source if is_remote(source) else str(Path(source).absolute()), True)
        for alias, source in config.adapters
    ]
    taken = {alias for alias, _ in config.adapters}
    for name in config.adapter_dirs:
        if is_remote(name):
            continue  # it permits sources; there is nothing to list
        for path in _subfolders(name):
            if os.path.isfile(path / ADAPTER_CONFIG) and path.name not in taken:
                taken.add(path.name)
                sources.append((path.name, str(path.resolve()), False))
    return sources


def _subfolders(name: str) -> list[Path]:
    """What lies in a folder of --adapter-dir, by name."""
    try:
        return sorted(Path(name).iterdir())
    except OSError as error:
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"--adapter-dir {name} is not a folder that can be read: {error.strerror}",
            param="adapter_dir",
        ) from error


def check_sources(config: ServeConfig) -> None:
    """Refuse what the command line names wrongly, before a model is loaded: aliases, folders, configurations.

    Where a catalog names a database, it may serve an alias of which the source is gone.
    """
    for alias, source, required in adapter_sources(config):
        if required:
            check_alias(alias)
            if not is_remote(source) and config.catalog is None:
                read_adapter_config(Path(source))


async def register_adapters(service: Service, announcer: Announcer) -> None:
    """Register the command line's adapters. One named by --adapter must be served; of a folder, what can be."""
    for alias, source, required in adapter_sources(service.config):
        try:
            revision = await _register(service, alias, source)
        except CallerError as error:
            if required:
                raise
            announcer.say(f"adapter {alias} is not served: {error}")
            _log.warning("adapter %s is not served: %s", alias, error)
            continue
        if revision is None:
            announcer.say(
                f"adapter {alias} was removed from the catalog and stays so; add it again to serve it"
            )
        else:
            announcer.say(_adapter_line(revision, source))
    known = sum(1 for _ in service.adapters)
    if service.config.catalog is not None:
        announcer.say(f"catalog at generation {service.adapters.generation}, {known} adapters")


async def _register(service: Service, alias: str, source: str) -> Revision | None:
    """The current revision of an alias once the command line has had its say; None when it was removed."""
    adapters, alias_key = service.adapters, AliasKey(DEFAULT_NAMESPACE, alias)
    store = adapters.catalog.store
    history = await adapters.off_loop(lambda: store.history(alias_key))
    if not history:
        return await adapters.add(alias_key, source, COMMAND_LINE)
    mine = next((revision for revision in history if revision.actor == COMMAND_LINE), None)
    if mine is None:
        return adapters.catalog.get(alias_key)
    return await adapters.put_unless(alias_key, source, mine, COMMAND_LINE)


def _adapter_line(revision: Revision, source: str) -> str:
    artifact = revision.artifact
    ranks = "/".join(map(str, artifact.ranks)) or "-"
    carried = (
        f"{artifact.tensors_applied} of {artifact.tensors_total} tensors applied, {artifact.modules} modules"
    )
    other = "" if revision.source == source else f" (the catalog's, from {revision.source})"
    return f"adapter {revision.name}: {artifact.method}, rank {ranks}, {carried}{other}"
