"""The adapters of a starting server: those of the command line, beside what its catalog already knows.

The command line is applied once: an alias that the catalog has never seen is added, one that the command line published
before is published again only when its source holds something else by now. What was swapped or removed since stays so
over a restart. Specification: rulings "Start-up", "Processes".
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from loraplex.artifact.source import read_config as read_adapter_config
from loraplex.catalog.records import DEFAULT_NAMESPACE, Revision, check_alias
from loraplex.catalog.sources import is_remote
from loraplex.config import ServeConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.server.announce import Announcer
from loraplex.server.service import Service

_log: Final = logging.getLogger(__name__)
ADAPTER_CONFIG: Final = "adapter_config.json"
COMMAND_LINE: Final = "command line"


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
    adapters = service.adapters
    store = adapters.catalog.store
    history = await adapters.off_loop(lambda: store.history(DEFAULT_NAMESPACE, alias))
    if not history:
        return await adapters.add(alias, source, actor=COMMAND_LINE)
    mine = next((revision for revision in history if revision.actor == COMMAND_LINE), None)
    if mine is None:
        return adapters.catalog.get(alias)
    return await adapters.put_unless(alias, source, mine, actor=COMMAND_LINE)


def _adapter_line(revision: Revision, source: str) -> str:
    artifact = revision.artifact
    ranks = "/".join(map(str, artifact.ranks)) or "-"
    carried = (
        f"{artifact.tensors_applied} of {artifact.tensors_total} tensors applied, {artifact.modules} modules"
    )
    other = "" if revision.source == source else f" (the catalog's, from {revision.source})"
    return f"adapter {revision.name}: {artifact.method}, rank {ranks}, {carried}{other}"
