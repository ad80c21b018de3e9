"""A mailbox and an event sink within one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar, cast

from loraplex.core import limits
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import Event
from loraplex.core.messages import FromEngine, ToEngine

T = TypeVar("T")


class LocalMailbox:
    """`core.ports.Mailbox` between an engine and its callers. Any thread may post; who steps the engine does
    the rest.
    """

    def __init__(self) -> None:
        self._inbox: deque[ToEngine] = deque()
        self._outbox: list[FromEngine] = []

    @property
    def pending(self) -> bool:
        """Whether messages wait for the engine."""
        return bool(self._inbox)

    def post(self, message: ToEngine) -> None:
        """Put a message for the engine's next step."""
        self._inbox.append(message)

    def take(self) -> list[FromEngine]:
        """What the engine sent since the last call."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Everything posted. Never waits: nobody could post while this thread waits."""
        if wait and not self._inbox:
            raise InternalFault(
                ErrorCode.INTERNAL, "an engine in its caller's thread cannot wait for messages"
            )
        messages = []
        while self._inbox:  # one by one: another thread may post meanwhile
            messages.append(self._inbox.popleft())
        return messages

    def pause(self) -> None:
        """Leave the processor to whoever works for this thread's engine meanwhile."""
        if not self._inbox:
            time.sleep(limits.PAUSE_MS / 1000)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Keep messages for `take`."""
        self._outbox.extend(messages)


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose every wait is over at once, in the caller's thread and without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    work.close()
    raise InternalFault(ErrorCode.INTERNAL, "work in the caller's thread cannot wait for an event loop")


class NullSink:
    """An event sink that nobody reads."""

    def emit(self, event: Event) -> None:
        """Forget the event."""

    def flush(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
