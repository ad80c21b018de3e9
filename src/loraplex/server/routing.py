"""What handlers share: the parts of one server, and one request with its caller.

Specification: DESIGN 2 (step 1).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from loraplex.core.errors import CallerError, ErrorCode, LoraplexError
from loraplex.runtime.text import TextCodec
from loraplex.server.answers import DONE, error_body, event
from loraplex.server.auth import Caller, KeyRing
from loraplex.server.generate import Generation, Piece
from loraplex.server.http import Exchange
from loraplex.server.metrics import Metrics, outcome_of
from loraplex.server.service import Service

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenised in a thread, so that no other stream waits for them."""


@dataclass(slots=True)
class Site:
    """Everything that serves requests. serial: tells engine requests apart when callers repeat their ids."""

    service: Service
    keys: KeyRing
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    serial: Iterator[int] = field(default_factory=itertools.count)


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


async def encode_text(codec: TextCodec, text: str) -> list[int]:
    """Token ids of a prompt; a long one does not hold up the event loop."""
    if len(text) <= LONG_TEXT_CHARS:
        return codec.encode(text)
    return await asyncio.to_thread(codec.encode, text)


async def until_disconnect(call: Call, work: Awaitable[None]) -> None:
    """Do `work` unless the client goes away first; then it is cancelled, which withdraws its requests."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(call.exchange.disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task  # raises what it raised
            return
        call.exchange.facts["outcome"] = "aborted"
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
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
