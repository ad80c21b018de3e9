"""Keeps one engine process alive: starts it, connects the client, watches it, restarts it with growing
pauses.

Owns the life of the engine's process and the private folder of its socket. While there is no ready engine,
requests are refused as `engine_unavailable`; when one dies, open requests end as `engine_died` at once. A
restarted engine is `ready` only after `restore` has given it back what it knew. One that lives but does not
answer is `stalled`: not ready, and ended if it stays so.

Never decides what an engine is made of. Specification: rulings "Processes".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from loraplex.config import EngineConfig
from loraplex.core.errors import CapacityError, ErrorCode, InternalFault, LoraplexError, Root
from loraplex.core.messages import Inspect
from loraplex.process.child import Child, describe_exit
from loraplex.process.client import EngineClient
from loraplex.process.engine_process import (
    BUILDER,
    REPORT_DECODER,
    EngineStart,
)
from loraplex.process.event_stream import EventReader, Observe
from loraplex.process.logs import fields
from loraplex.process.pipe import Failed, PipeClosed
from loraplex.process.tasks import reported
from loraplex.process.workdir import private_folder, temporary_root

_log: Final = logging.getLogger(__name__)
MODULE: Final = "loraplex.process.engine_process"
PATIENT_THREADS: Final = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads that wait asleep: a spinning one costs a step hundreds of milliseconds as soon as another
process wants its core (docs/notes/cpu-operators.md). An operator's own setting stands.
"""
STOP_GRACE_S: Final = 5.0
MAX_PAUSE_S: Final = 4.0
"""An engine that does not stay up is tried again this often: what a start costs, and no longer than a caller
retries.
"""
STEADY_S: Final = 60.0
"""An engine that lived this long was well: its death is not one in a row."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often the engine is asked whether it lives, how long it may take, and when it is given up. Seconds.

    A step is never this long: the longest is one chunk of prefill. Nothing compiles once an engine is ready.
    A restart does what the first start did, with warm caches: it may take `restart_times` as long, and
    `restart_least_s` at least.
    """

    ask_every_s: float = 5.0
    stalled_after_s: float = 30.0
    given_up_after_s: float = 300.0
    restart_least_s: float = 60.0
    restart_times: float = 10.0


class EngineStatus(StrEnum):
    """Where the engine is in its life."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    STOPPED = "stopped"


def pause_s(failures: int) -> float:
    """Pause before the restart that follows `failures` deaths in a row: at once, then half a second, then
    doubling.
    """
    pause = 0.0 if failures <= 1 else 0.5
    for _ in range(failures - 2):
        if pause >= MAX_PAUSE_S:
            break
        pause *= 2
    return min(pause, MAX_PAUSE_S)


async def _nothing() -> None:
    return None


class EngineSupervisor:
    """Owns the engine process of one server."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        *,
        builder: str = BUILDER,
        log_level: str = "warning",
        log_json: bool = False,
        restore: Callable[[], Awaitable[object]] = _nothing,
        pause: Callable[[int], float] = pause_s,
        patience: Patience = Patience(),
    ) -> None:
        """restore: run with a connected client before a restarted engine counts as ready. pause: by failures
        in a row.

        `observe`, set before `start`, gets every engine's events in order, and how many are missing before
        them.
        """
        self.state = EngineStatus.STOPPED
        self.restore = restore
        self.observe: Observe | None = None
        self.restarts = 0
        self.info: dict[str, Any] = {}
        self._config = config
        self._client = client
        self._builder = builder
        self._log_level = log_level
        self._log_json = log_json
        self._pause = pause
        self._patience = patience
        self._child: Child | None = None
        self._folder: Path | None = None
        self._private = contextlib.ExitStack()
        self._incarnation = 0
        self._first_start_s = 0.0
        self._build_s = 0.0
        self._events: EventReader | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether requests can be sent."""
        return self.state is EngineStatus.READY

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return None if self._child is None else self._child.pid

    def require_ready(self) -> None:
        """Raise `engine_unavailable` unless requests can be sent."""
        if not self.ready:
            raise CapacityError(
                ErrorCode.ENGINE_UNAVAILABLE, f"the engine is {self.state.value}; try again in a moment"
            )

    async def until(self, state: EngineStatus) -> None:
        """Wait for a state."""
        while self.state is not state:
            self._changed.clear()
            await self._changed.wait()

    async def start(self) -> None:
        """Start the first engine; raises the typed error with which it refused to start."""
        self._folder = self._private.enter_context(private_folder(temporary_root()))
        self._move(EngineStatus.STARTING)
        try:
            if self.observe is not None:
                self._events = EventReader(self._events_endpoint(self._folder), self.observe)
            began = time.monotonic()
            child = await self._launch()
            self._first_start_s = time.monotonic() - began
        except BaseException:
            await self.stop()
            raise
        self._move(EngineStatus.READY)
        watcher = asyncio.get_running_loop().create_task(self._watch(child), name="engine-supervisor")
        self._watcher = reported(watcher, _log, "the engine is no longer watched")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the engine for good. What is open ends as `shutting_down`."""
        self._move(EngineStatus.STOPPED)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        self._client.disconnect(CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
        if self._child is not None:
            await self._child.stop(grace_s)
            self._child = None
        if self._events is not None:
            await self._events.close()
            self._events = None
        self._private.close()
        self._folder = None

    def kill(self) -> None:
        """End the engine's process at once and wait for nothing."""
        if self._child is not None:
            self._child.kill()

    def _move(self, state: EngineStatus) -> None:
        self.state = state
        self._changed.set()

    @staticmethod
    def _events_endpoint(folder: Path) -> str:
        return f"ipc://{folder / 'events.sock'}"

    async def _launch(self) -> Child:
        """Start one process and connect to it; raises the typed error of one that fails before it is
        ready.
        """
        if self._folder is None:
            raise InternalFault(ErrorCode.INTERNAL, "the supervisor was not started")
        self._incarnation += 1
        # A socket of its own for each: nothing that was meant for the dead reaches the living.
        endpoint = f"ipc://{self._folder / f'engine-{self._incarnation}.sock'}"
        child = self._child = await Child.start(MODULE, "the engine's process", defaults=PATIENT_THREADS)
        order = EngineStart(
            self._config,
            endpoint,
            self._builder,
            self._log_level,
            self._log_json,
            None if self._events is None else self._events_endpoint(self._folder),
        )
        ready = await child.greet(order, REPORT_DECODER)
        self.info, self._build_s = ready.info, ready.build_s
        self._client.connect(endpoint)
        return child

    async def _watch(self, child: Child) -> None:
        """Wait for deaths and answer them, until cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            why = await self._death_watched(child)
            failures = 1 if time.monotonic() - began > STEADY_S else failures + 1
            self._bury(why)
            died = time.monotonic()
            while True:
                await asyncio.sleep(self._pause(failures))
                try:
                    child = await self._restart(died)
                except LoraplexError as error:
                    failures += 1
                    await self._discard(error)
                else:
                    break
            self._move(EngineStatus.READY)

    async def _restart(self, died: float) -> Child:
        """Start another engine and give it back what it knew; says where the time since `died` went."""
        began = time.monotonic()
        bound_s = max(self._patience.restart_least_s, self._patience.restart_times * self._first_start_s)
        try:
            async with asyncio.timeout(bound_s):
                child = await self._launch()
        except TimeoutError:
            raise InternalFault(
                ErrorCode.BACKEND_FAILED,
                f"the engine's process was not ready within {bound_s:.0f} s, the limit of a restart; it is "
                "ended",
            ) from None
        started = time.monotonic()
        await self._restore(child)
        ready = time.monotonic()
        self.restarts += 1
        times = {
            "down_s": ready - died,
            "before_s": began - died,
            "process_s": started - began - self._build_s,
            "build_s": self._build_s,
            "restore_s": ready - started,
        }
        _log.warning(
            "the engine is ready again after restart %d",
            self.restarts,
            extra=fields(**{name: round(value, 2) for name, value in times.items()}),
        )
        return child

    async def _restore(self, child: Child) -> None:
        """Run `restore`, unless `child` dies meanwhile."""
        restore = asyncio.ensure_future(self.restore())
        death = asyncio.ensure_future(child.wait())
        asking = asyncio.ensure_future(self._end_if_silent(child))
        try:
            await asyncio.wait({restore, death}, return_when=asyncio.FIRST_COMPLETED)
            if not restore.done():
                raise InternalFault(ErrorCode.BACKEND_FAILED, "the engine died before its adapters were back")
            await restore
        finally:
            for task in (restore, death, asking):
                task.cancel()
            await asyncio.gather(restore, death, asking, return_exceptions=True)

    async def _end_if_silent(self, child: Child) -> None:
        """Kill an engine that answers nothing while it is given back what it knew."""
        patience = self._patience
        while True:
            await asyncio.sleep(patience.ask_every_s)
            if not await self._answers(patience.stalled_after_s + patience.given_up_after_s):
                break
        _log.error("the engine answers nothing while it gets its adapters back; it is ended")
        child.kill()

    async def _death_watched(self, child: Child) -> str:
        """Wait until `child` is dead, by itself or because it no longer answers; why."""
        asking = asyncio.ensure_future(self._keep_asking(child))
        try:
            return await self._death(child)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _keep_asking(self, child: Child) -> None:
        """Ask the engine for its figures now and then; end it when it answers nothing for too long."""
        patience = self._patience
        while True:
            await asyncio.sleep(patience.ask_every_s)
            if await self._answers(patience.stalled_after_s):
                continue
            _log.error("the engine has not answered for %g s", patience.stalled_after_s)
            self._move(EngineStatus.STALLED)
            if not await self._answers(patience.given_up_after_s):
                _log.error(
                    "the engine has not answered for %g s more; it is ended", patience.given_up_after_s
                )
                child.kill()
                return
            _log.warning("the engine answers again")
            self._move(EngineStatus.READY)

    async def _answers(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):  # `wait_for` may forget that it was cancelled
                await self._client.call(Inspect(0))
        except TimeoutError:
            return False
        except LoraplexError:  # it answered frames that this server lost: it lives
            return True
        return True

    async def _death(self, child: Child) -> str:
        """Wait until `child` is dead; why, as far as it said."""
        said = ""
        with contextlib.suppress(PipeClosed):
            while True:
                report = await child.receive(REPORT_DECODER)
                if isinstance(report, Failed):
                    said = f": {report.message} [{report.code}]"
        return f"{describe_exit(await child.wait())}{said}"

    def _bury(self, why: str) -> None:
        _log.error("the engine died (%s); starting another", why)
        self._child = None
        self._move(EngineStatus.RESTARTING)
        self._client.disconnect(
            CapacityError(ErrorCode.ENGINE_DIED, "the engine died while it served the request; try again")
        )

    async def _discard(self, error: LoraplexError) -> None:
        """A restart failed: note it, and leave nothing of it behind."""
        level = logging.ERROR if error.root is Root.OURS else logging.WARNING
        _log.log(level, "the engine could not be restarted: %s", error)
        self._client.disconnect(error)
        if self._child is not None:
            self._child.kill()
            await self._child.wait()
            self._child = None
