"""What handlers share: the parts of one server, and one request with its caller.

Specification: architecture "A request's way" (1).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.events import AnyEvent
from loraplex.server.access import Facts
from loraplex.server.auth import Caller, KeyFile
from loraplex.server.exchange import Exchange
from loraplex.server.metrics import Metrics
from loraplex.server.page.watch import Watch
from loraplex.server.service import Service
from loraplex.server.tenant_limits import TenantLimitsTold
from loraplex.server.wire import decode
from loraplex.text.codec import TextCodec

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class Site:
    """Everything that serves requests. told: limits of tenants that the engine knows. serial: tells engine
    requests apart when callers repeat their ids.
    """

    service: Service
    keys: KeyFile
    told: TenantLimitsTold
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    serial: Iterator[int] = field(default_factory=itertools.count)
    watchers: set[asyncio.Task[None]] = field(default_factory=set)
    watch_page: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch_page = Watch(self.service)

    def observe(self, events: Sequence[AnyEvent], lost: int) -> None:
        """Take the engine's events, for metrics and for the operator's page."""
        self.metrics.engine.observe(events, lost)
        self.watch_page.journal.observe(events, lost)

    def watch(self, exchange: Exchange) -> asyncio.Task[None]:
        """A task that ends when the client goes away, or when the answer has been sent.

        It is never cancelled: the listener would go on waiting inside, and hold up the end until the client
        closes.
        """
        task = asyncio.create_task(exchange.disconnected())
        self.watchers.add(task)
        task.add_done_callback(self.watchers.discard)
        return task


@dataclass(slots=True)
class Call:
    """One request: who asks what of which site. facts: noted for when it is over. rest: what follows the
    route's prefix, still escaped. created: seconds since 1970.
    """

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


async def read_body(call: Call, kind: type[T]) -> T:
    """The request's body. A long one is decoded outside the event loop. Raises what `Exchange.body` and
    `decode` raise.
    """
    body = await call.exchange.body()
    return await call.service.workers.run_if(len(body) > limits.SHORT_BODY_BYTES, lambda: decode(body, kind))


def require_fitting(codec: TextCodec, texts: Sequence[str], longest: int, param: str) -> None:
    """Raise `context_length_exceeded` for a text that no tokenising could make fit. longest: tokens that the
    context holds.
    """
    if any(codec.surely_exceeds(text, longest) for text in texts):
        raise CallerError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {longest} tokens; the text has {sum(map(len, texts))} "
            "characters, more "
            "than they can hold, so shorten it",
            param=param,
        )


def named_model(call: Call, model: str | None) -> str:
    """What a request is for: the base where it names nothing and there is one tenant, which can mean nothing
    else.
    """
    if model is not None:
        return model
    if not call.site.keys.one_tenant:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "model is missing; give the base's name or an adapter's", param="model"
        )
    return call.service.base_name


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
