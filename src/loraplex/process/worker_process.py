"""The worker's process: builds a backend, runs the packed plans that its parent sends, answers with packed results.

Run as `python -m loraplex.process.worker_process` by `runtime.worker.ProcessBackend`, which sends one `WorkerStart`,
reads one `WorkerReport` and then plans' results. It sees nothing of the control plane but plans.

A thread does nothing but read: so plans are always taken, whatever a result waits for, and so the end of the parent is
noticed during a long step too. Specification: architecture "The plan", rulings "Processes".
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
from loraplex.core.errors import LoraplexError
from loraplex.core.ports import Backend
from loraplex.process.building import Failed, load_function
from loraplex.process.child import ChildGone, Parent

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

START_DECODER: Final[msgspec.msgpack.Decoder[WorkerStart]] = msgspec.msgpack.Decoder(WorkerStart)
REPORT_DECODER: Final[msgspec.msgpack.Decoder[WorkerReport]] = msgspec.msgpack.Decoder(WorkerReport)


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
    except ChildGone:
        os._exit(0)


def run(parent: Parent, start: WorkerStart) -> int:
    """Build, then run plans until the parent closes its pipe; the exit status when there is nothing to run."""
    plans: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(parent, plans), daemon=True, name="plans").start()
    try:
        backend = _build(start)
    except LoraplexError as error:
        parent.send(Failed.of(error))
        return 1
    except Exception as error:
        logging.getLogger(__name__).exception("the worker could not be built")
        parent.send(Failed.of(error))
        return 1
    parent.send(WorkerReady())
    while True:  # the reader ends the process
        backend.launch(plans.get())
        parent.send_bytes(backend.collect())


def main() -> int:
    """The child's entry."""
    parent = Parent(tied=False)
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s worker %(name)s: %(message)s"
    )
    try:
        start = parent.receive(START_DECODER)
    except ChildGone:
        return 1
    return run(parent, start)


if __name__ == "__main__":
    sys.exit(main())
