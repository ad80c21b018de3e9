"""The event spine's way from an engine's process to the server's: a pipe that loses rather than waits.

The server binds one endpoint for its life; each engine connects to it, so that counts go on over a restart. A
frame carries one step's events and how many were lost before them: when the server does not read, the engine
forgets.

Owns no figures: who observes makes them.
Specification: 0x09K, rulings "The plan" (figures are computed in the server).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from loraplex.core import limits
from loraplex.core.events import AnyEvent, Event
from loraplex.process.tasks import reported

_log: Final = logging.getLogger(__name__)
LINGER_MS: Final = 200
"""How long an engine that ends may take to hand over its last events."""


class EventFrame(msgspec.Struct, frozen=True, array_like=True):
    """Events in order, and how many before them were lost."""

    lost: int
    events: list[AnyEvent]


_decoder: Final = msgspec.msgpack.Decoder(EventFrame)
_encoder: Final = msgspec.msgpack.Encoder()


Observe = Callable[[Sequence[AnyEvent], int], None]
"""Notes events in order, and how many are missing before the first."""


class EventPublisher:
    """`core.ports.EventSink` of an engine process. `flush` sends what one step emitted, and never blocks."""

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        unsent: int = limits.MAX_UNSENT_EVENT_FRAMES,
    ) -> None:
        """unsent: frames that may wait for the server."""
        self._socket = (zmq.Context.instance() if context is None else context).socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, unsent)
        self._socket.connect(endpoint)
        self._events: list[Event] = []
        self._lost = 0

    def emit(self, event: Event) -> None:
        """Keep one event for the next `flush`."""
        self._events.append(event)

    def flush(self) -> None:
        """Send what was emitted; where there is no room, forget it and say so in the next frame."""
        if not self._events:
            return
        events, self._events = self._events, []
        try:
            self._socket.send(_encoder.encode((self._lost, events)), zmq.NOBLOCK)
        except zmq.Again:
            self._lost += len(events)
        else:
            self._lost = 0

    def close(self) -> None:
        """Hand over what is left, within `LINGER_MS`."""
        self.flush()
        self._socket.close()


class EventReader:
    """The server's side: reads frames of the engine of the moment and hands them to an observer."""

    def __init__(self, endpoint: str, observe: Observe) -> None:
        """Bind `endpoint`. Must be called in the event loop."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, limits.MAX_UNSENT_EVENT_FRAMES)
        self._socket.bind(endpoint)
        self._observe = observe
        # An observer that fails ends the reading; requests go on without figures.
        reading = asyncio.get_running_loop().create_task(self._read(), name="engine-events")
        self._task = reported(reading, _log, "events are no longer observed")

    async def _read(self) -> None:
        while True:
            payload = await self._socket.recv()
            try:
                frame = _decoder.decode(payload)
            except msgspec.DecodeError:
                _log.exception("the engine sent events that cannot be read")
            else:
                self._observe(frame.events, frame.lost)
            await asyncio.sleep(0)  # receiving what is there does not yield, and streams come first

    async def close(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        self._context.term()
