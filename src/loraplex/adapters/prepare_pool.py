"""Adapter preparation in processes of its own, so that reading and hashing never hold up an event loop or a
step.

A child is started for its first preparation and prepares one adapter after the other. One that dies is
replaced and the preparation in hand begun again, once; then it fails with a typed error. A preparation that
takes longer than its bound, or whose caller is gone, ends with its child, and the next one starts another.

One child reads what is on this machine. What must be downloaded has others, each with one preparation at a
time, so that a remote source that answers slowly, or never, holds up neither local folders nor, until there
are many, other downloads.

Specification: rulings "Loading", "Processes".
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from loraplex.adapters.prepare import PreparedAdapter
from loraplex.adapters.prepare_process import PrepareAsk, PrepareDone, PrepareOrder, PrepareReady
from loraplex.build.base_model import BaseModel
from loraplex.catalog.artifacts import DEFAULT_STORE_BYTES, ArtifactStore, artifacts_folder, has_content
from loraplex.catalog.sources import is_remote
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault
from loraplex.core.limits import (
    MAX_DOWNLOADS,
    MAX_PREPARE_REMOTE_S,
    MAX_PREPARE_S,
    MIN_PREPARE_BYTES,
    PREPARE_MEMORY_SHARE,
)
from loraplex.process.child import Child
from loraplex.process.pipe import Failed, PipeClosed

_log: Final = logging.getLogger(__name__)
MODULE: Final = "loraplex.adapters.prepare_process"
ATTEMPTS: Final = 2
"""Children that a preparation may cost: one that dies of something else is not the adapter's fault."""
_greeting: Final[msgspec.msgpack.Decoder[PrepareReady | Failed]] = msgspec.msgpack.Decoder(
    PrepareReady | Failed
)
_answers: Final[msgspec.msgpack.Decoder[PrepareDone | Failed]] = msgspec.msgpack.Decoder(PrepareDone | Failed)


def _ending() -> CapacityError:
    return CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down; try another one")


def memory_bound() -> int:
    """Bytes that one preparation may hold on this machine."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(MIN_PREPARE_BYTES, int(machine * PREPARE_MEMORY_SHARE))


class _Preparer:
    """One child process, which prepares one adapter after the other."""

    def __init__(self, order: PrepareOrder, bound_s: float) -> None:
        """bound_s: how long one preparation may take."""
        self.bound_s = bound_s
        self.waiting = 0
        self._order = order
        self._child: Child | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before its first preparation and between two children."""
        return None if self._child is None else self._child.pid

    async def prepare(self, source: str, content: str | None) -> PreparedAdapter:
        """`prepare_source` in the child.

        Raises what it raises; `adapter_load_failed` when children died of it, `adapter_too_costly` when it
        took too long, `shutting_down` when it was closed.
        """
        self.waiting += 1
        try:
            async with self._turn:
                return await self._prepare(source, content)
        finally:
            self.waiting -= 1

    async def _prepare(self, source: str, content: str | None) -> PreparedAdapter:
        for _ in range(ATTEMPTS):
            if self._closed:
                raise _ending()
            try:
                async with asyncio.timeout(self.bound_s):
                    answer = await self._ask(PrepareAsk(os.fsencode(source), content))
            except PipeClosed:
                await self._drop()
                if not self._closed:
                    _log.warning("the process that prepared %r died", source)
            except TimeoutError:
                await self._drop()
                raise CallerError(
                    ErrorCode.ADAPTER_TOO_COSTLY,
                    f"{source!r} was not prepared within {self.bound_s:g} s, the limit, and its preparation "
                    "was ended; "
                    "give an adapter with fewer tensors, or try again when the machine is less busy",
                ) from None
            except BaseException:
                await self._drop()  # whoever asked is gone, or an answer cannot be read
                raise
            else:
                if isinstance(answer, Failed):
                    raise answer.error
                return answer
        if self._closed:
            raise _ending()
        raise InternalFault(
            ErrorCode.ADAPTER_LOAD_FAILED, f"the process that prepared {source!r} died; try again"
        )

    async def _ask(self, ask: PrepareAsk) -> PreparedAdapter | Failed:
        if self._child is None:
            await self._start()
        child = self._child
        if child is None:
            raise PipeClosed
        await child.send(ask)
        answer = await child.receive(_answers)
        return answer.adapter if isinstance(answer, PrepareDone) else answer

    async def _start(self) -> None:
        child = self._child = await Child.start(MODULE, "the preparation process")
        if self._closed:
            child.kill()
        await child.greet(self._order, _greeting)

    async def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.wait()

    def end(self) -> None:
        """Kill the child, with the preparation that it may have in hand; nothing is prepared any more."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        """`end`, and wait for it."""
        self.end()
        await self._drop()


class PreparePool:
    """Prepares adapters; callable with a source."""

    def __init__(
        self,
        base: BaseModel,
        images_dir: str | os.PathLike[str],
        artifacts_dir: str | os.PathLike[str] | None = None,
        artifacts_bytes: int = DEFAULT_STORE_BYTES,
    ) -> None:
        """images_dir: the image store that the engine reads. artifacts_*: store of downloads and its
        limit.
        """
        self._artifacts = (str(artifacts_dir or artifacts_folder()), artifacts_bytes)
        order = PrepareOrder(base, str(Path(images_dir)), *self._artifacts, memory_bound())
        self._here = _Preparer(order, MAX_PREPARE_S)
        self._elsewhere = [_Preparer(order, MAX_PREPARE_REMOTE_S) for _ in range(MAX_DOWNLOADS)]

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        """`prepare_source` in a child. Raises what it raises; `adapter_load_failed` when children
        died of it.
        """
        if is_remote(source) and not (content is not None and has_content(self._artifacts[0], content)):
            child = min(self._elsewhere, key=lambda child: child.waiting)
        else:
            child = self._here
        return await child.prepare(source, content)

    async def reclaim(self, kept: Collection[str]) -> int:
        """Clear the artifact store of everything but these keys; bytes deleted. Off the event loop."""
        store = ArtifactStore(*self._artifacts)
        return await asyncio.to_thread(store.reclaim, kept, (), store.limit_bytes)

    def end(self) -> None:
        """End every preparation at once; none begins any more."""
        for child in (self._here, *self._elsewhere):
            child.end()

    async def close(self) -> None:
        """`end`, and wait for it."""
        for child in (self._here, *self._elsewhere):
            await child.close()
