"""The ports through which the control plane touches the world; everything else it does is deterministic.

Real ones live in `process`, `images`, `model` and `text`, virtual ones in `sim`. A method may block only
where it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from loraplex.core.events import Event
from loraplex.core.layout import AdapterImage
from loraplex.core.messages import FromEngine, ToEngine
from loraplex.core.packed import I32


class Clock(Protocol):
    """Monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin, never decreasing."""
        ...


class Backend(Protocol):
    """Runs packed plans in order. It obeys: it never chooses pages, slots or victims.

    At most one plan more than the pipeline depth is outstanding. A plan's `copies` start copies; a copy is
    reported in the result of any plan, that one or a later one, once. While copies are under way the engine
    sends plans without rows; the collection of such a result may wait a little for a copy to end.
    """

    def launch(self, plan: bytes) -> None:
        """Start a packed plan; may return before it has run."""
        ...

    def collect(self) -> bytes:
        """Packed result of the oldest plan that has not been collected; blocks until it is there."""
        ...


class Mailbox(Protocol):
    """Messages between the engine and its clients."""

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Messages that arrived, in order; with `wait`, blocks until there is one or the mailbox closes."""
        ...

    def pause(self) -> None:
        """What is open waits for something that no message brings: return after a few milliseconds, or with a
        message.
        """
        ...

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Deliver; never blocks on a slow client."""
        ...


class EventSink(Protocol):
    """Where the event spine goes."""

    def emit(self, event: Event) -> None:
        """Record one event; must not block."""
        ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """The end of one fetch: the image lies verified in host memory, or an error's code and message say why
    not.
    """

    kernel_digest: str
    code: str | None = None
    message: str = ""


class Loader(Protocol):
    """Brings adapter images from the disk store into host memory, outside of this process."""

    def fetch(self, kernel_digest: str) -> None:
        """Begin to bring and verify an image; never blocks. Ends in one `Fetched`, also when the
        loader dies.
        """
        ...

    def drop(self, kernel_digest: str) -> None:
        """Let go of a host image; what has it open keeps it."""
        ...

    def poll(self, wait: bool) -> Sequence[Fetched]:
        """What ended since the last call. wait: there is nothing else to do; may wait a few milliseconds."""
        ...


class ImageSource(Protocol):
    """Verified adapter images by kernel digest, read by a backend when a plan tells it to copy one."""

    def open(self, kernel_digest: str) -> AdapterImage:
        """The image; raises `adapter_load_failed` when it is not there."""
        ...


class Constraint(Protocol):
    """What the output of one request may go on with: a grammar, and how far the output has come in it."""

    def accept(self, token: int) -> bool:
        """Move on by a token; whether the output is complete with it. Raises `schema_unsupported`."""
        ...


class Grammars(Protocol):
    """Grammars of constrained requests. Compiling one never holds up a step."""

    def open(self, grammar: str, own_ends: Sequence[int] = ()) -> Constraint | None:
        """A constraint at its beginning; None while the grammar is being compiled: ask again. own_ends: may
        stand wherever the model's end tokens may.

        Raises `schema_unsupported` for one that cannot be enforced, `unsupported_option` where none can.
        """
        ...

    def masks(self, constraints: Sequence[Constraint]) -> tuple[I32, Sequence[str]]:
        """Which tokens may come next, int32 [n, ceil(vocabulary / 32)]: bit t of word t // 32 is token t.

        And why a row allows none, [n]: empty where it allows some.
        """
        ...
