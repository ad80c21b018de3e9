"""Adapter preparation in a process of its own, so that reading and hashing never hold up an event loop or a step.

Niced children, spawned on first use; they die with their parent and leave the terminal's interrupt to it. A child that
dies is replaced and the preparation in hand begun again, once; then it fails with a typed error.

One child reads what is on this machine. What must be downloaded has others, each with one preparation at a time, so that a
remote source that answers slowly, or never, holds up neither local folders nor, until there are many, other downloads.

Specification: rulings "Loading", "Processes".
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Collection
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Final

from loraplex.adapters.prepare import PreparedAdapter, prepare_source
from loraplex.build.base_model import BaseModel
from loraplex.catalog.artifacts import DEFAULT_STORE_BYTES, ArtifactStore, artifacts_folder, has_content
from loraplex.catalog.sources import is_remote
from loraplex.core.errors import CapacityError, ErrorCode, InternalFault
from loraplex.core.limits import MAX_DOWNLOADS
from loraplex.images.disk_store import ImageStore

_log: Final = logging.getLogger(__name__)
ATTEMPTS: Final = 2
"""Children that a preparation may cost: one that dies of something else is not the adapter's fault."""
_NICE = 10
_PR_SET_PDEATHSIG = 1

_base: BaseModel | None = None
_store: ImageStore | None = None
_artifacts: ArtifactStore | None = None


def _begin(base: BaseModel, images_dir: str, artifacts_dir: str, artifacts_bytes: int) -> None:
    """Runs once in the child: what every preparation needs lies in its globals."""
    global _base, _store, _artifacts
    for signum in (signal.SIGINT, signal.SIGTERM):  # to a whole group they are the parent's to act on
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICE)
    _base, _store, _artifacts = base, ImageStore(images_dir), ArtifactStore(artifacts_dir, artifacts_bytes)


def _prepare(source: str, content: str | None) -> PreparedAdapter:
    if _base is None or _store is None or _artifacts is None:
        raise InternalFault(ErrorCode.INTERNAL, "the preparation process was not set up")
    return prepare_source(source, _base, _store, _artifacts, content)


def _ending() -> CapacityError:
    return CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down; try another one")


class _Child:
    """One child process, which prepares one adapter after the other."""

    def __init__(self, arguments: tuple[BaseModel, str, str, int]) -> None:
        """arguments: of `_begin`."""
        self._arguments = arguments
        self._pool: ProcessPoolExecutor | None = None
        self._pid: Future[int] | None = None
        self._closed = False
        self.waiting = 0

    @property
    def pool(self) -> ProcessPoolExecutor | None:
        """Its executor, None before its first preparation."""
        return self._pool

    async def prepare(self, source: str, content: str | None) -> PreparedAdapter:
        """`prepare_source` in the child. Raises what it raises; `adapter_load_failed` when children died of it,
        `shutting_down` when it was closed.
        """
        self.waiting += 1
        try:
            return await self._prepare(source, content)
        finally:
            self.waiting -= 1

    async def _prepare(self, source: str, content: str | None) -> PreparedAdapter:
        for _ in range(ATTEMPTS):
            pool = self._spawned()
            try:
                return await self._in_child(pool, source, content)
            except BrokenProcessPool:
                if self._pool is pool:
                    self._pool = None
                pool.shutdown(wait=False)
                if self._closed:
                    raise _ending() from None
                _log.warning("the process that prepared %r died", source)
        raise InternalFault(
            ErrorCode.ADAPTER_LOAD_FAILED, f"the process that prepared {source!r} died; try again"
        )

    def _spawned(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=self._arguments,
            )
            self._pid = self._pool.submit(os.getpid)
        return self._pool

    async def _in_child(self, pool: ProcessPoolExecutor, source: str, content: str | None) -> PreparedAdapter:
        try:
            return await asyncio.wrap_future(pool.submit(_prepare, source, content))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _ending() from None  # `close` withdrew what the child had not begun

    def close(self) -> None:
        """End the child at once, with the preparation that it may have in hand; waits for nothing."""
        self._closed = True
        if self._pool is None:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._pid is not None and self._pid.done() and not self._pid.cancelled():
            with suppress(ProcessLookupError, BrokenProcessPool):
                os.kill(self._pid.result(), signal.SIGKILL)
        self._pool = None


class PreparePool:
    """Prepares adapters; callable with a source."""

    def __init__(
        self,
        base: BaseModel,
        images_dir: str | os.PathLike[str],
        artifacts_dir: str | os.PathLike[str] | None = None,
        artifacts_bytes: int = DEFAULT_STORE_BYTES,
    ) -> None:
        """images_dir: the image store that the engine reads. artifacts_*: store of downloads and its limit."""
        self._artifacts = (str(artifacts_dir or artifacts_folder()), artifacts_bytes)
        arguments = (base, str(Path(images_dir)), *self._artifacts)
        self._here = _Child(arguments)
        self._elsewhere = [_Child(arguments) for _ in range(MAX_DOWNLOADS)]

    async def __call__(self, source: str, content: str | None = None) -> PreparedAdapter:
        """`prepare_source` in a child. Raises what it raises; `adapter_load_failed` when children died of it."""
        if is_remote(source) and not (content is not None and has_content(self._artifacts[0], content)):
            child = min(self._elsewhere, key=lambda child: child.waiting)
        else:
            child = self._here
        return await child.prepare(source, content)

    async def reclaim(self, kept: Collection[str]) -> int:
        """Clear the artifact store of everything but these keys; bytes deleted. Off the event loop."""
        store = ArtifactStore(*self._artifacts)
        return await asyncio.to_thread(store.reclaim, kept, (), store.limit_bytes)

    def close(self) -> None:
        """End the children at once, with the preparations that they may have in hand; waits for nothing."""
        for child in (self._here, *self._elsewhere):
            child.close()
