"""Mailbox and event list for an engine under test: ports that remember what went through them."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.events import Event
from loraplex.core.messages import Ended, FromEngine, Reply, ToEngine, Tokens


class MemoryMailbox:
    """A mailbox in memory that also sorts what came back by request and call."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.pauses = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, list[Ended]] = {}
        self.replies: dict[int, Reply] = {}

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Everything put so far; never blocks."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def pause(self) -> None:
        """Count it; the clock is moved by others."""
        self.pauses += 1

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Record answers."""
        for message in messages:
            match message:
                case Tokens():
                    self.tokens.setdefault(message.request_id, []).extend(message.token_ids)
                case Ended():
                    self.ended.setdefault(message.request_id, []).append(message)
                case Reply():
                    self.replies[message.call_id] = message


class EventLog:
    """Every event, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Record one event."""
        self.events.append(event)
