"""The worker's process: builds a backend, runs the packed plans that its parent sends, answers with packed
results.

A child of `process.worker.ProcessBackend`, which sends one `WorkerStart`, reads that it is ready or why it is
not, and then plans' results. It sees nothing of the control plane but plans.

A thread does nothing but read: so plans are always taken, whatever a result waits for, and so the end of the
parent is noticed during a long step too. Specification: architecture "The plan", rulings "Processes".
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from loraplex.config import EngineConfig
from loraplex.core.ports import Backend
from loraplex.process.heap import freeze_heap
from loraplex.process.parent import Parent, load_function, run_child
from loraplex.process.pipe import Failed, PipeClosed

RUNNER: Final = "loraplex.build.engine_build:build_runner"


class WorkerStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker is to run. builder: `module:function`, called with the configuration, returns a backend.

    base_abi: H_base, from the engine that hashed the weights; the worker does not hash them again.
    """

    config: EngineConfig
    builder: str = RUNNER
    base_abi: str | None = None


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker takes plans."""


WorkerReport = WorkerReady | Failed

REPORT_DECODER: Final[msgspec.msgpack.Decoder[WorkerReport]] = msgspec.msgpack.Decoder(WorkerReport)
_log: Final = logging.getLogger(__name__)


def _build(start: WorkerStart) -> Backend:
    builder: Callable[..., Backend] = load_function(start.builder)
    return builder(start.config) if start.base_abi is None else builder(start.config, start.base_abi)


def _read(parent: Parent, plans: queue.SimpleQueue[bytes]) -> None:
    """Take plans until there is no parent to take them from; then end this process.

    At once: nobody waits for the step in hand, and whoever comes next needs the device.
    """
    try:
        while True:
            plans.put(parent.receive_bytes())
    except PipeClosed:
        os._exit(0)


def run(parent: Parent, start: WorkerStart) -> int:
    """Build, then run plans until the parent closes its pipe; the exit status when there is nothing
    to run.
    """
    plans: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(parent, plans), daemon=True, name="plans").start()
    backend = _build(start)
    freeze_heap()
    parent.send(WorkerReady())
    try:
        while True:  # the reader ends the process
            backend.launch(plans.get())
            parent.send_bytes(backend.collect())
    except BrokenPipeError:
        return 0
    except Exception:  # noqa: BLE001 - the process's boundary: only results cross, so the log is told
        _log.exception("the worker could not run a plan")
        return 1


if __name__ == "__main__":
    sys.exit(run_child(WorkerStart, run))
