"""The adapters of a starting server: those of the command line, beside what its catalog already knows.

The command line is applied once: an alias that the catalog has never seen is added, one that the command line
published before is published again only when its source holds something else by now. What was swapped or
removed since stays so over a restart. Specification: rulings "Start-up", "Processes".
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from loraplex.artifact.source import read_config as read_adapter_config
from loraplex.catalog.records import DEFAULT_NAMESPACE, AliasKey, Revision, check_alias
from loraplex.catalog.sources import is_remote
from loraplex.config import ServeConfig
from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.core.limits import MAX_ADAPTER_FOLDER_FILES, MAX_FOLDERS_BEFORE_READY
from loraplex.process.tasks import reported
from loraplex.server.announce import Announcer
from loraplex.server.service import Service

_log: Final = logging.getLogger(__name__)
ADAPTER_CONFIG: Final = "adapter_config.json"
COMMAND_LINE: Final = "command line"
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
"""An alias that is a folder's own name."""
Contents = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Named:
    """An adapter of the command line. required: the server does not start without it."""

    alias: str
    source: str
    required: bool = False


def adapter_sources(config: ServeConfig) -> tuple[list[Named], list[str]]:
    """The adapters of the command line, each --adapter and then what each --adapter-dir holds; and what is
    passed over.

    A folder of --adapter-dir is served under its own name, and so is one that is given as an --adapter-dir
    and is an adapter itself. A name is the first one's that has it.
    """
    sources = [
        Named(alias, source if is_remote(source) else str(Path(source).absolute()), required=True)
        for alias, source in config.adapters
    ]
    taken, notes = {named.alias: named.source for named in sources}, []
    for directory in config.adapter_dirs:
        if is_remote(directory):
            continue  # it permits sources; there is nothing to list
        itself = Path(directory).absolute()
        for path in [*([itself] if _is_adapter(itself) else []), *_subfolders(directory)]:
            if path != itself and not _is_adapter(path):
                notes += _passed_over(path)
                continue
            source = os.path.realpath(path)
            first = taken.get(path.name)
            if first is None:
                taken[path.name] = source
                sources.append(Named(path.name, source))
            elif first != source:
                notes.append(
                    f"adapter {path.name} in {path.parent} is not served: the name is taken by {first}; "
                    f"serve it as --adapter NAME={path}"
                )
    return sources, notes


def late_source(config: ServeConfig, alias: str) -> Named | None:
    """What --adapter-dir holds under a name now, by the rules of `adapter_sources`."""
    for directory in config.adapter_dirs:
        if is_remote(directory):
            continue
        itself = Path(directory).absolute()
        for path in (*([itself] if itself.name == alias else []), itself / alias):
            if _is_adapter(path):
                return Named(alias, os.path.realpath(path))
    return None


def _is_adapter(path: Path) -> bool:
    return os.path.isfile(path / ADAPTER_CONFIG)


def _passed_over(path: Path) -> list[str]:
    """Why a folder that is no adapter looks as if somebody meant it to be one; nothing where it does not."""
    try:
        names = sorted(entry.name for entry in islice(os.scandir(path), MAX_ADAPTER_FOLDER_FILES))
    except OSError:  # a file, or what cannot be read
        return []
    if ADAPTER_CONFIG in names:
        return [f"{path} is not served: its {ADAPTER_CONFIG} is no file that can be read"]
    if any(name.startswith("adapter_model.") for name in names):
        return [f"{path} is not served: it holds weights of an adapter and no {ADAPTER_CONFIG}"]
    inside = next((name for name in names if _is_adapter(path / name)), None)
    if inside is not None:
        what = f"it is no adapter but holds some, {inside} for one"
        return [f"{path} is not served: {what}; give --adapter-dir {path}"]
    return []


def _subfolders(name: str) -> list[Path]:
    """What lies in a folder of --adapter-dir, by name."""
    try:
        return sorted(Path(name).absolute().iterdir())
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
    for named in adapter_sources(config)[0]:
        if named.required:
            check_alias(named.alias)
            if not is_remote(named.source) and config.catalog is None:
                read_adapter_config(Path(named.source))


class CommandLine:
    """Registers the adapters of the command line: before requests are taken, behind them, and when a name is
    asked for.

    One named by --adapter must be served; of a folder, what can be, whatever is wrong with the rest. A start
    waits for the first `MAX_FOLDERS_BEFORE_READY` folders; the others follow while it serves, and one that is
    asked for at once.
    """

    def __init__(self, service: Service, announcer: Announcer) -> None:
        self._service = service
        self._announcer = announcer
        self._waiting: dict[str, Named] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, Contents] = {}
        self._behind: asyncio.Task[None] | None = None

    async def register(self) -> None:
        """What a start waits for. Raises what is wrong with an --adapter, and that the engine is gone."""
        sources, notes = adapter_sources(self._service.config)
        for note in notes:
            self._say(note)
        folders = [named for named in sources if not named.required]
        self._waiting = {named.alias: named for named in folders}
        for named in sources:
            if named.required:
                await self._register(named)
        for named in folders[:MAX_FOLDERS_BEFORE_READY]:
            await self._take(named)
        if self._waiting:
            self._announcer.say(
                f"{len(self._waiting)} more adapters are registered while requests are served"
            )
        known = sum(1 for _ in self._service.adapters)
        if self._service.config.catalog is not None:
            generation = self._service.adapters.generation
            self._announcer.say(f"catalog at generation {generation}, {known} adapters")

    def begin(self) -> None:
        """Register the rest in the background, and whatever is asked for at once."""
        self._service.adapters.missing = self.look_for
        if self._waiting:
            self._behind = reported(
                asyncio.create_task(self._register_rest()),
                _log,
                "adapters of --adapter-dir are not registered any more",
            )

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = [*self._under_way.values(), *([] if self._behind is None else [self._behind])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look_for(self, alias: str) -> None:
        """Register what --adapter-dir holds under a name that nobody knows, once for however many ask."""
        named = self._waiting.get(alias)
        if named is None and self._service.config.adapter_dir_late and _ALIAS.fullmatch(alias):
            named = late_source(self._service.config, alias)
            if named is not None and self._refused.get(named.source) == _contents(named.source):
                return  # it was refused, and is what it was
        task = self._under_way.get(alias)
        if task is None and named is not None:
            task = self._under_way[alias] = asyncio.create_task(self._take(named))
            task.add_done_callback(lambda _: self._under_way.pop(alias, None))
        if task is not None:
            await asyncio.shield(task)

    async def _register_rest(self) -> None:
        while self._waiting:
            await self.look_for(next(iter(self._waiting)))

    async def _take(self, named: Named) -> None:
        """Register a folder; what is wrong with it is said."""
        seen = _contents(named.source)
        try:
            await self._register(named)
        except LoraplexError as error:
            if error.code in (ErrorCode.ENGINE_DIED, ErrorCode.ENGINE_UNAVAILABLE, ErrorCode.SHUTTING_DOWN):
                raise
            self._refused[named.source] = seen
            self._say(f"adapter {named.alias} is not served: {error}")
        except Exception as error:  # noqa: BLE001 - no folder stops a start; it is logged and said
            self._refused[named.source] = seen
            _log.exception("adapter %s in %s could not be read", named.alias, named.source)
            self._say(f"adapter {named.alias} is not served: it could not be read ({type(error).__name__})")
        self._waiting.pop(named.alias, None)

    async def _register(self, named: Named) -> None:
        revision = await _register(self._service, named.alias, named.source)
        if revision is None:
            self._announcer.say(
                f"adapter {named.alias} was removed from the catalog and stays so; add it again to serve it"
            )
        else:
            self._announcer.say(_adapter_line(revision, named.source))

    def _say(self, text: str) -> None:
        self._announcer.say(text)
        _log.warning("%s", text)


def _contents(source: str) -> Contents:
    """What a folder holds: name, size and time of each entry, so that one that is still being copied has
    changed when it is whole. Empty where there is none.
    """
    found = []
    try:
        with os.scandir(source) as entries:
            for entry in islice(entries, MAX_ADAPTER_FOLDER_FILES):
                status = entry.stat()
                found.append((entry.name, status.st_size, status.st_mtime_ns))
    except OSError:
        return ()
    return tuple(sorted(found))


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
