"""What handlers share: the parts of one server, and one request with its caller.

Specification: architecture "A request's way" (1).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.server.answers import DONE, error_body, event
from loraplex.server.auth import Caller, KeyFile
from loraplex.server.exchange import Exchange
from loraplex.server.generation.generate import Generation, Piece
from loraplex.server.metrics import Metrics, outcome_of
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
    """One request: who asks what of which site. rest: what follows the route's prefix, still escaped. created: seconds since 1970."""

    site: Site
    exchange: Exchange
    caller: Caller
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
        call.exchange.facts["outcome"] = "aborted"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not call.exchange.started:  # who closed only its own side may still read why there is no answer
        raise CallerError(ErrorCode.ABORTED, "the client went away before the answer began")


async def stream_pieces(
    call: Call,
    generation: Generation,
    opening: bytes,
    render: Callable[[Piece], bytes],
    closing: Callable[[], bytes],
) -> None:
    """Send pieces as events. The response begins with the first piece, so that a refusal still has its own status."""
    exchange = call.exchange
    pieces = await generation.read()
    await exchange.begin_events()
    data = opening
    try:
        while pieces:
            data += b"".join(map(render, pieces))
            if data:
                await exchange.write(data)
            data = b""
            pieces = await generation.read()
        data = closing()
    except LoraplexError as error:
        exchange.facts.update(outcome=outcome_of(error), code=error.code.value)
        data = event(error_body(error))
    await exchange.write(data + DONE)
    await exchange.end()
