"""A mailbox and an event sink within one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.events import Event
from loraplex.core.messages import FromEngine, ToEngine


class LocalMailbox:
    """`core.ports.Mailbox` between an engine and its caller in the same thread."""

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
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Keep messages for `take`."""
        self._outbox.extend(messages)


class NullSink:
    """An event sink that nobody reads."""

    def emit(self, event: Event) -> None:
        """Forget the event."""
