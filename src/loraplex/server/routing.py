"""What handlers share: the parts of one server, and one request with its caller.

Specification: architecture "A request's way" (1).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.server.access import Facts
from loraplex.server.auth import Caller, KeyFile
from loraplex.server.exchange import Exchange
from loraplex.server.metrics import Metrics
from loraplex.server.service import Service
from loraplex.text.codec import SHORT_TEXT_CHARS, TextCodec


@dataclass(slots=True)
class Site:
    """Everything that serves requests. serial: tells engine requests apart when callers repeat their ids."""

    service: Service
    keys: KeyFile
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    serial: Iterator[int] = field(default_factory=itertools.count)
    watchers: set[asyncio.Task[None]] = field(default_factory=set)

    def watch(self, exchange: Exchange) -> asyncio.Task[None]:
        """A task that ends when the client goes away, or when the answer has been sent.

        It is never cancelled: the listener would go on waiting inside, and hold up the end until the client closes.
        """
        task = asyncio.create_task(exchange.disconnected())
        self.watchers.add(task)
        task.add_done_callback(self.watchers.discard)
        return task


@dataclass(slots=True)
class Call:
    """One request: who asks what of which site. facts: noted for when it is over. rest: what follows the route's prefix, still escaped. created: seconds since 1970."""

    site: Site
    exchange: Exchange
    caller: Caller
    facts: Facts
    rest: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def service(self) -> Service:
        """The server's parts."""
        return self.site.service


Handler = Callable[[Call], Awaitable[None]]


async def encode_text(
    codec: TextCodec, texts: Sequence[str], encode: Callable[[], list[int]], longest: int, param: str
) -> list[int]:
    """Token ids that `encode` makes of texts; long ones do not hold up the event loop.

    longest: tokens that the context holds. Raises `context_too_long` for a text that no tokenising could make fit.
    """
    length = sum(map(len, texts))
    if length <= SHORT_TEXT_CHARS:
        return encode()
    if any(codec.surely_exceeds(text, longest) for text in texts):
        raise CallerError(
            ErrorCode.CONTEXT_TOO_LONG,
            f"the text has {length} characters, more than the context of {longest} tokens can hold; shorten it",
            param=param,
        )
    return await asyncio.to_thread(encode)


async def until_disconnect(call: Call, work: Awaitable[None]) -> None:
    """Do `work` unless the client goes away first; then it is cancelled, which withdraws its requests."""
    task = asyncio.ensure_future(work)
    gone = call.site.watch(call.exchange)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task  # raises what it raised
            return
        call.facts.outcome = "aborted"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not call.exchange.started:  # who closed only its own side may still read why there is no answer
        raise CallerError(ErrorCode.ABORTED, "the client went away before the answer began")
