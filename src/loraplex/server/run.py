"""A server's life: listen, start the engine, register adapters, serve, drain, end. Owns signals and child
processes.

It listens first, so that a taken port is found before weights are read, and so that `/health` says at once
what is missing; requests are taken when the engine, every --adapter and the first folders of --adapter-dir
are there. The first SIGTERM or SIGINT drains: new requests are refused, open ones may finish within a bound
and are then ended, typed. A second SIGINT ends it at once.

Specification: rulings "Processes", "Start-up".
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

from loraplex.adapters.adapter_catalog import AdapterCatalog
from loraplex.adapters.manager import AdapterService
from loraplex.adapters.preparation import Preparation
from loraplex.adapters.revision_texts import RevisionTexts
from loraplex.catalog.artifacts import ArtifactStore, artifacts_folder
from loraplex.catalog.database import IN_MEMORY
from loraplex.catalog.requests import RequestLog
from loraplex.catalog.store import CatalogStore
from loraplex.config import ServeConfig
from loraplex.core import limits
from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.images.disk_store import ImageStore
from loraplex.process.activity import Tell, activity
from loraplex.process.client import EngineClient
from loraplex.process.engine_process import BUILDER
from loraplex.process.heap import freeze_heap
from loraplex.process.supervisor import EngineSupervisor
from loraplex.server.administration.register import CommandLine
from loraplex.server.announce import Announcer
from loraplex.server.auth import DEFAULT_TENANT
from loraplex.server.listen import AsgiApp, Listener
from loraplex.server.provenance import Provenance
from loraplex.server.service import Service, ServicePhase
from loraplex.text.codec import load_tokenizer

_log: Final = logging.getLogger(__name__)
GIB: Final = 1 << 30
FLUSH_S: Final = 5.0
"""How long answers may take to leave once every request has ended."""

CLOSE_S: Final = 0.5
"""How long connections without a request may take to close."""

Application = Callable[[Service], AsgiApp]


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
        """Run `work`, or drop it when a stop is wished first. Whether it was finished; raises what
        it raises.
        """
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
    """Serve the model in `folder` until a signal; the process's exit status. Raises what keeps it from
    serving.
    """
    engine_config = config.engine(str(folder), str(images))
    client = EngineClient()
    supervisor = EngineSupervisor(
        engine_config, client, builder=builder, log_level=config.log_level, log_json=config.log_json
    )
    catalog = AdapterCatalog(frozenset({base_name}), CatalogStore.open(config.catalog or IN_MEMORY))
    artifacts = ArtifactStore(artifacts_folder(), int(config.store_gb * GIB))
    preparation = Preparation(folder, engine_config, artifacts, strict_base=config.strict_base)
    codec = load_tokenizer(folder)
    texts = RevisionTexts(codec, config.adapter_text)
    adapters = AdapterService(client, catalog, preparation, ImageStore(images).delete, texts)
    preparation.named = lambda: adapters.off_loop(catalog.store.contents)
    supervisor.restore = lambda: _restore(adapters)
    kept = limits.MAX_REQUEST_RECORDS if config.catalog else limits.MAX_REQUEST_RECORDS_IN_MEMORY
    provenance = Provenance(RequestLog(catalog.store.database, kept), adapters.off_loop)
    service = Service(config, base_name, codec, client, supervisor, adapters, provenance)
    command_line = CommandLine(service, announcer)
    listener = Listener(application(service), config.host, config.port)

    def at_once() -> None:
        supervisor.kill()
        os._exit(130)

    async def open_up() -> None:
        if config.log_json:  # who reads the log as JSON reads nothing else there
            await start_up(lambda _: None)
            return
        with activity(live=False) as tell:  # plain lines: the log goes to the same stream
            await start_up(tell)

    async def start_up(tell: Tell) -> None:
        tell("starting the engine")
        await supervisor.start()
        tell("registering adapters")
        preparation.begin(supervisor.info)
        texts.begin(supervisor.info["vocab_size"])
        for note in supervisor.info.get("notes", ()):
            announcer.say(str(note))
        await command_line.register()
        adapters.begin()
        command_line.begin()
        freeze_heap()
        service.phase = ServicePhase.OPEN

    with Signals(at_once) as signals:
        await listener.start()
        # The last one first; one that fails does not keep the rest.
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(service.workers.close)
            for close in (
                preparation.close,
                client.close,
                supervisor.stop,
                adapters.close,
                command_line.close,
                provenance.close,
            ):
                closing.push_async_callback(close)
            closing.callback(setattr, service, "phase", ServicePhase.DRAINING)
            announcer.say(f"listening on {listener.url}; starting the engine for {base_name}")
            if await signals.unless_stopped(open_up()):
                aliases = [name for name, _ in adapters.visible(DEFAULT_TENANT)]
                chat = service.codec is not None and service.codec.has_chat_template
                announcer.ready(listener.url, base_name, aliases, chat)
                await signals.stop.wait()
            await _drain(service, listener, announcer, preparation.end)
    return 0


async def _restore(adapters: AdapterService) -> None:
    for alias, error in (await adapters.restore()).items():
        _log.error("adapter %s could not be given back to the engine: %s", alias, error)
        if error.code in (ErrorCode.ENGINE_DIED, ErrorCode.ENGINE_UNAVAILABLE):
            raise error


async def _drain(
    service: Service, listener: Listener, announcer: Announcer, end_preparations: Callable[[], None]
) -> None:
    """Refuse new requests, let open ones finish within the bound, end the rest, and let their
    answers leave.
    """
    service.drain()
    client, bound_s = service.client, service.config.drain_s
    if client.open_requests:
        announcer.say(f"stopping: {client.open_requests} open requests have {bound_s:g} s to finish")
    try:
        async with asyncio.timeout(bound_s):
            await client.drained()
    except TimeoutError:
        _log.warning("%d requests are ended after %g s", client.open_requests, bound_s)
        client.abort_all(
            CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down; try another one")
        )
    try:
        async with asyncio.timeout(FLUSH_S):
            await service.quiet()
    except TimeoutError:
        end_preparations()  # a change that waits for a source's answer hears that it is not made
        try:
            async with asyncio.timeout(CLOSE_S):
                await service.quiet()
        except TimeoutError:
            _log.warning("some answers were not taken within %g s", FLUSH_S)
    with contextlib.suppress(TimeoutError):  # a client that never finished its headers
        async with asyncio.timeout(CLOSE_S):
            await listener.stop()
