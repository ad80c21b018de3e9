"""The engine's process: builds an engine, steps it until told to end, reports to its parent.

A child of the supervisor, which sends one `EngineStart` and then reads `EngineReport`s: that it is ready, and
what it failed of. One thread runs Python here.

Specification: rulings "Processes".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from loraplex.config import EngineConfig
from loraplex.core.ports import Clock, EventSink, Mailbox
from loraplex.process.child import END_SIGNAL
from loraplex.process.clock import MonotonicClock
from loraplex.process.event_stream import EventPublisher
from loraplex.process.heap import freeze_heap
from loraplex.process.local import NullSink
from loraplex.process.logs import configure_logging
from loraplex.process.parent import Parent, load_function, run_child
from loraplex.process.pipe import Failed
from loraplex.process.transport import ZmqMailbox

BUILDER = "loraplex.build.engine_build:build_engine"


class EngineStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine process is to do.

    endpoint: where its mailbox listens. builder: `module:function`. events: where its events are read, if
    anywhere.
    """

    config: EngineConfig
    endpoint: str
    builder: str = BUILDER
    log_level: str = "warning"
    log_json: bool = False
    events: str | None = None


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine steps. info: what clients need to know of it. build_s: how long it took to build."""

    info: dict[str, Any]
    build_s: float


EngineReport = EngineReady | Failed

REPORT_DECODER: Final[msgspec.msgpack.Decoder[EngineReport]] = msgspec.msgpack.Decoder(EngineReport)


class Stepping(Protocol):
    """The part of `engine.step.Engine` that its process drives."""

    def step(self, wait: bool = False) -> bool:
        """One iteration; with `wait`, blocks for a message when there is nothing to do."""
        ...


class Built(Protocol):
    """What a builder returns."""

    @property
    def engine(self) -> Stepping:
        """The engine."""
        ...

    @property
    def info(self) -> dict[str, Any]:
        """What clients need to know, as plain values."""
        ...

    @property
    def close(self) -> Callable[[], None]:
        """Lets go of devices and processes."""
        ...


Builder = Callable[[EngineConfig, Mailbox, Clock, EventSink], Built]


def run(parent: Parent, start: EngineStart) -> int:
    """Build and step until `END_SIGNAL`; the process's exit status. Raises what ends the engine otherwise."""
    configure_logging(start.log_level, as_json=start.log_json)
    mailbox = ZmqMailbox(start.endpoint)
    events = NullSink() if start.events is None else EventPublisher(start.events)
    mailbox.wake_on(END_SIGNAL)
    built: Built | None = None
    try:
        builder: Builder = load_function(start.builder)
        began = time.monotonic()
        built = builder(start.config, mailbox, MonotonicClock(), events)
        freeze_heap()
        parent.send(EngineReady(built.info, time.monotonic() - began))
        while not mailbox.closed:
            built.engine.step(wait=True)
            events.flush()
    finally:
        if built is not None:
            built.close()
        events.close()
        mailbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_child(EngineStart, run))
