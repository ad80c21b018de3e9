"""How the server is, for machines that ask every few seconds: health, readiness, metrics.

Specification: interface "HTTP".
"""

from __future__ import annotations

import asyncio
from typing import Any

from loraplex import __version__
from loraplex.core.errors import LoraplexError
from loraplex.core.messages import Inspect
from loraplex.server.metrics import CONTENT_TYPE
from loraplex.server.routing import Call

INSPECT_S = 2.0
"""How long `/metrics` waits for the engine: less than a scraper does."""


async def health(call: Call) -> None:
    """Whether there is an engine that lives; 503 with the reason otherwise."""
    call.service.require_engine()
    await call.exchange.answer({"status": "ok"})


async def ready(call: Call) -> None:
    """Whether requests are taken; 503 with the reason otherwise."""
    call.service.require_ready()
    await call.exchange.answer({"status": "ready"})


async def version(call: Call) -> None:
    """The version of the program."""
    await call.exchange.answer({"version": __version__})


async def load(call: Call) -> None:
    """Requests that are under way, for balancers: `server_load`."""
    await call.exchange.answer({"server_load": call.service.client.open_requests})


async def metrics(call: Call) -> None:
    """Prometheus exposition."""
    service = call.service
    figures = await _figures_soon(call) if service.ready else None
    await call.exchange.respond(200, call.site.metrics.render(service.ready, figures), CONTENT_TYPE)


async def _figures_soon(call: Call) -> dict[str, Any] | None:
    """The engine's figures, or None when it does not answer soon: whoever scrapes must hear of an engine that
    hangs.
    """
    try:
        async with asyncio.timeout(INSPECT_S):
            return await call.service.client.call(Inspect(0))
    except (TimeoutError, LoraplexError):
        return None
