"""A server's life: listen, start the engine, register adapters, serve, drain, end. Owns signals and child processes.

It listens first, so that a taken port is found before weights are read, and so that `/health` answers at once; requests
are taken when the engine and every adapter of the command line are there. The first SIGTERM or SIGINT drains: new
requests are refused, open ones may finish within a bound and are then ended, typed. A second SIGINT ends it at once.

Specification: DESIGN 4 "Processes", "Start-up".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from loraplex.artifact.checkpoint import CheckpointTensors
from loraplex.artifact.tensors import Dtype
from loraplex.catalog.memory import AdapterCatalog, Revision
from loraplex.config import EngineConfig, ServeConfig
from loraplex.core.errors import CallerError, CapacityError, ErrorCode
from loraplex.model.spec import spec_from_config
from loraplex.runtime.adapters import AdapterService
from loraplex.runtime.base import BaseModel, base_modules, read_config
from loraplex.runtime.client import EngineClient
from loraplex.runtime.engine_process import BUILDER
from loraplex.runtime.images import ImageStore
from loraplex.runtime.prepare import PreparedAdapter
from loraplex.runtime.prepare_pool import PreparePool
from loraplex.runtime.supervisor import EngineSupervisor
from loraplex.runtime.text import load_tokenizer
from loraplex.server.announce import Announcer
from loraplex.server.listen import AsgiApp, Listener
from loraplex.server.service import Phase, Service

_log: Final = logging.getLogger(__name__)
ADAPTER_CONFIG: Final = "adapter_config.json"
FLUSH_S: Final = 5.0
"""How long answers may take to leave once every request has ended."""

CLOSE_S: Final = 0.5
"""How long connections without a request may take to close."""

Application = Callable[[Service], AsgiApp]


class Preparation:
    """Prepares adapters for the engine of the moment; set up when the engine has said what it is."""

    def __init__(self, folder: Path, engine: EngineConfig) -> None:
        self._folder = folder
        self._engine = engine
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
        )
        self._pool = PreparePool(base, self._engine.images_dir)

    async def __call__(self, source: str) -> PreparedAdapter:
        """Prepare the adapter in the folder `source`."""
        if self._pool is None:
            raise CapacityError(
                ErrorCode.ENGINE_UNAVAILABLE, "adapters can be loaded once the engine is ready"
            )
        return await self._pool(source)

    def close(self) -> None:
        """End the preparing process."""
        if self._pool is not None:
            self._pool.close()


def adapter_sources(config: ServeConfig) -> list[tuple[str, str, bool]]:
    """(alias, source, must be served) of the command line: each --adapter, then each subfolder of --adapter-dir."""
    sources = [(alias, source, True) for alias, source in config.adapters]
    taken = {alias for alias, _ in config.adapters}
    for name in config.adapter_dirs:
        folder = Path(name)
        if not folder.is_dir():
            raise CallerError(
                ErrorCode.CONFIG_INVALID, f"--adapter-dir {name} is not a folder", param="adapter_dir"
            )
        for path in sorted(folder.iterdir()):
            if (path / ADAPTER_CONFIG).is_file() and path.name not in taken:
                taken.add(path.name)
                sources.append((path.name, str(path.resolve()), False))
    return sources


async def register_adapters(service: Service, announcer: Announcer) -> None:
    """Register the command line's adapters. One named by --adapter must be served; of a folder, what can be."""
    for alias, source, required in adapter_sources(service.config):
        try:
            revision = await service.adapters.add(alias, source)
        except CallerError as error:
            if required:
                raise
            announcer.say(f"adapter {alias} is not served: {error}")
            _log.warning("adapter %s is not served: %s", alias, error)
        else:
            announcer.say(_adapter_line(revision))


def _adapter_line(revision: Revision) -> str:
    prepared = revision.prepared
    ranks = "/".join(map(str, prepared.ranks)) or "-"
    return f"adapter {revision.name}: {prepared.method}, rank {ranks}, {prepared.report}"


class Signals:
    """Turns signals into a wish to stop, while it is entered. A second SIGINT runs `at_once`."""

    def __init__(self, at_once: Callable[[], None]) -> None:
        self.stop = asyncio.Event()
        self._at_once = at_once
        self._interrupts = 0

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_signal_handler(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGINT)

    def _interrupt(self) -> None:
        self._interrupts += 1
        self.stop.set()
        if self._interrupts > 1:
            self._at_once()

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work`, or drop it when a stop is wished first. Whether it was finished; raises what it raises."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return True
            return False
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)


async def serve(
    config: ServeConfig,
    folder: Path,
    base_name: str,
    images: Path,
    application: Application,
    announcer: Announcer,
    builder: str = BUILDER,
) -> int:
    """Serve the model in `folder` until a signal; the process's exit status. Raises what keeps it from serving."""
    engine_config = config.engine(str(folder), str(images))
    client = EngineClient()
    supervisor = EngineSupervisor(
        engine_config, client, builder=builder, log_level=config.log_level, log_json=config.log_json
    )
    preparation = Preparation(folder, engine_config)
    store = ImageStore(images)
    adapters = AdapterService(client, AdapterCatalog(frozenset({base_name})), preparation, store.delete)
    supervisor.restore = lambda: _restore(adapters)
    service = Service(config, base_name, load_tokenizer(folder), client, supervisor, adapters)
    listener = Listener(application(service), config.host, config.port)

    def at_once() -> None:
        supervisor.kill()
        os._exit(130)

    async def open_up() -> None:
        await supervisor.start()
        preparation.begin(supervisor.info)
        for note in supervisor.info.get("notes", ()):
            announcer.say(str(note))
        await register_adapters(service, announcer)
        service.phase = Phase.OPEN

    with Signals(at_once) as signals:
        await listener.start()
        try:
            announcer.say(f"listening on {listener.url}; starting the engine for {base_name}")
            if await signals.unless_stopped(open_up()):
                aliases = [revision.alias for revision in adapters]
                chat = service.codec is not None and service.codec.has_chat_template
                announcer.ready(listener.url, base_name, aliases, chat)
                await signals.stop.wait()
            await _drain(service, listener, announcer)
        finally:
            service.phase = Phase.DRAINING
            await adapters.close()
            await supervisor.stop()
            await client.close()
            preparation.close()
    return 0


async def _restore(adapters: AdapterService) -> None:
    for alias, error in (await adapters.restore()).items():
        _log.error("adapter %s could not be given back to the engine: %s", alias, error)
        if error.code in (ErrorCode.ENGINE_DIED, ErrorCode.ENGINE_UNAVAILABLE):
            raise error


async def _drain(service: Service, listener: Listener, announcer: Announcer) -> None:
    """Refuse new requests, let open ones finish within the bound, end the rest, and let their answers leave."""
    service.drain()
    client, bound_s = service.client, service.config.drain_s
    if client.open_requests:
        announcer.say(f"stopping: {client.open_requests} open requests have {bound_s:g} s to finish")
    try:
        await asyncio.wait_for(client.drained(), bound_s)
    except TimeoutError:
        _log.warning("%d requests are ended after %g s", client.open_requests, bound_s)
        client.abort_all(
            CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down; try another one")
        )
    try:
        await asyncio.wait_for(service.quiet(), FLUSH_S)
    except TimeoutError:
        _log.warning("some answers were not taken within %g s", FLUSH_S)
    with contextlib.suppress(TimeoutError):  # a client that never finished its headers
        await asyncio.wait_for(listener.stop(), CLOSE_S)
