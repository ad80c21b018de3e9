"""The ASGI application: routes, keys, errors, one access line a request.

A plain ASGI callable: a table of routes is all that is needed, and a disconnect must end the work at once,
which frameworks leave to the handler. Never touches the engine's state.

Specification: interface "HTTP".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from loraplex.core.errors import CallerError, ErrorCode, InternalFault, LoraplexError
from loraplex.process.logs import fields
from loraplex.server import probes
from loraplex.server.access import Facts, account
from loraplex.server.administration import endpoints
from loraplex.server.answers import failure
from loraplex.server.auth import NOBODY, KeyFile
from loraplex.server.exchange import Disconnected, Exchange
from loraplex.server.generation import tokenizing
from loraplex.server.generation.chat import chat_completions
from loraplex.server.generation.completions import completions
from loraplex.server.generation.responses import responses
from loraplex.server.listen import AsgiApp, Receive, Send
from loraplex.server.openapi import BODIES, openapi
from loraplex.server.page import handlers as page
from loraplex.server.routing import Call, Handler, Site
from loraplex.server.service import Service
from loraplex.server.tenant_limits import TenantLimitsTold
from loraplex.server.wire import NoFields, decode

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Route:
    """A path, or a prefix that ends in a name (`{alias}`, whatever follows). open: served without a key."""

    method: str
    path: str
    handler: Handler
    open: bool = False

    def rest_of(self, raw_path: str) -> str | None:
        """What follows the prefix, nothing for a fixed path; None when the route does not serve the path."""
        prefix, brace, names = self.path.partition("{")
        if not brace:
            return "" if raw_path == prefix else None
        rest = raw_path[len(prefix) :]
        served = raw_path.startswith(prefix) and rest and rest.count("/") >= names.count("/")
        return rest if served else None


async def _describe(call: Call) -> None:
    """This description."""
    api = (route for route in ROUTES if not route.path.startswith("/ui"))  # the page's are its own
    rows = [(r.method, r.path, (r.handler.__doc__ or "").partition("\n")[0]) for r in api]
    await call.exchange.answer(openapi(rows))


ROUTES: Final = (
    Route("POST", "/v1/completions", completions),
    Route("POST", "/v1/chat/completions", chat_completions),
    Route("POST", "/v1/responses", responses),
    Route("POST", "/tokenize", tokenizing.tokenize),
    Route("POST", "/detokenize", tokenizing.detokenize),
    Route("GET", "/v1/models", endpoints.list_models),
    Route("GET", "/v1/models/{model}", endpoints.get_model),
    Route("GET", "/v1/adapters", endpoints.list_adapters),
    Route("GET", "/v1/adapters/{alias}", endpoints.get_adapter),
    Route("PUT", "/v1/adapters/{alias}", endpoints.put_adapter),
    Route("DELETE", "/v1/adapters/{alias}", endpoints.delete_adapter),
    Route("POST", "/v1/adapters/{alias}/{action}", endpoints.adapter_action),
    Route("POST", "/v1/load_lora_adapter", endpoints.load_lora_adapter),
    Route("POST", "/v1/unload_lora_adapter", endpoints.unload_lora_adapter),
    Route("GET", "/v1/residency", endpoints.residency),
    Route("GET", "/v1/requests/{request_id}/provenance", endpoints.get_provenance),
    Route("GET", "/v1/requests/{request_id}", endpoints.get_request),
    Route("GET", "/v1/limits", endpoints.get_limits),
    Route("PUT", "/v1/limits", endpoints.put_limits),
    Route("GET", "/ui", page.show_page, open=True),
    Route("GET", "/ui/events", page.stream_pictures),
    Route("GET", "/ui/{asset}", page.show_asset, open=True),
    Route("GET", "/health", probes.health, open=True),
    Route("GET", "/ping", probes.health, open=True),
    Route("POST", "/ping", probes.health, open=True),
    Route("GET", "/ready", probes.ready, open=True),
    Route("GET", "/load", probes.load, open=True),
    Route("GET", "/version", probes.version, open=True),
    Route("GET", "/metrics", probes.metrics, open=True),
    Route("GET", "/openapi.json", _describe, open=True),
)


NOT_SERVED: Final[Mapping[str, str]] = {
    "/v1/embeddings": "embeddings are not served here; ask a server of an embedding model",
    "/v1/responses": "responses are not stored here; an answer is in the reply to POST /v1/responses alone",
}


def routes_of(raw_path: str) -> dict[str, tuple[Route, str]]:
    """By method: the route that serves a path, and the rest of the path. HEAD is a GET whose body
    stays away.
    """
    found: dict[str, tuple[Route, str]] = {}
    for route in ROUTES:
        rest = route.rest_of(raw_path)
        if rest is not None:
            found.setdefault(route.method, (route, rest))
    if "GET" in found:
        found["HEAD"] = found["GET"]
    return found


def find_route(exchange: Exchange) -> tuple[Route, str]:
    """The route of a request and the rest of its path. Raises `not_found` and `method_not_allowed`."""
    found = routes_of(exchange.raw_path)
    if not found and exchange.raw_path.endswith("/"):  # some clients join paths so
        found = routes_of(exchange.raw_path[:-1])
    if not found:
        raise CallerError(
            ErrorCode.NOT_FOUND,
            _not_served(exchange.path),
        )
    if exchange.method not in found:
        methods = ", ".join(sorted({*found, "OPTIONS"}))
        exchange.answer_headers["allow"] = methods
        if exchange.method == "OPTIONS":
            exchange.answer_headers["access-control-allow-methods"] = methods
            return Route("OPTIONS", exchange.raw_path, _options, open=True), ""
        raise CallerError(
            ErrorCode.METHOD_NOT_ALLOWED, f"{exchange.path} is called with {methods}, not {exchange.method}"
        )
    return found[exchange.method]


def _not_served(path: str) -> str:
    """Why a path is none, where that is known of it or of what lies above it."""
    known = (reason for above, reason in NOT_SERVED.items() if f"{path}/".startswith(f"{above}/"))
    return next(known, f"{path} is not served; see /openapi.json")


async def _options(call: Call) -> None:
    """Which methods a path has, in the header `allow`."""
    await call.exchange.respond(204, b"")


def create_app(service: Service) -> AsgiApp:
    """The application over a server's parts. Reads the key file; raises `config_invalid` when it cannot be
    used.
    """
    site = Site(service, KeyFile(service.config.api_key_file), TenantLimitsTold(service.client))
    service.supervisor.observe = site.observe

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            exchange = Exchange(scope, receive, send)
            with service.exchanging(exchange):
                await _exchange(site, exchange)

    return app


async def _exchange(site: Site, exchange: Exchange) -> None:
    """One request from its first byte to its access line."""
    begun = site.service.clock.now_ns()
    _allow_origin(exchange, site.service.config.cors_origins)
    error: LoraplexError | None = None
    caller, facts = NOBODY, Facts()
    try:
        route, rest = find_route(exchange)
        if not route.open:
            caller = site.keys.identify(exchange.headers("authorization"))
            if site.service.ready:
                await site.told.follow(site.keys.tenant_limits, site.service.supervisor.restarts)
        if (route.method, route.path) not in BODIES:
            await _no_body(exchange)
        await route.handler(Call(site, exchange, caller, facts, rest))
    except Disconnected:
        error = CallerError(ErrorCode.ABORTED, "the connection ended before the request was whole")
    except LoraplexError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001 - the last line of defence; it is logged and typed
        _log.exception("a request failed unexpectedly", extra=fields(request_id=exchange.request_id))
        error = InternalFault(
            ErrorCode.INTERNAL, f"the server failed on this request ({type(caught).__name__}); see its log"
        )
    try:
        if error is not None:
            facts.failed(error)
            await _report(exchange, error)
    finally:  # also when there is nobody left to hear of it
        account(site.service, site.metrics, exchange, caller, facts, begun)


def _allow_origin(exchange: Exchange, origins: Sequence[str]) -> None:
    """Let a browser's page of a permitted origin read the answer, and send the headers that clients send."""
    origin = exchange.header("origin")
    if origin is None or not {"*", origin} & set(origins):
        return
    exchange.answer_headers |= {
        "access-control-allow-origin": "*" if "*" in origins else origin,
        "access-control-allow-headers": exchange.header("access-control-request-headers")
        or "authorization, content-type",
        "access-control-expose-headers": "x-request-id, x-loraplex-model, x-loraplex-semantic-digest",
        "vary": "origin",
    }


async def _no_body(exchange: Exchange) -> None:
    """A call that takes no body may carry an empty one or an empty object: what it says beyond that would be
    ignored.
    """
    data = await exchange.body_or_none()
    if data:
        decode(data, NoFields)


async def _report(exchange: Exchange, error: LoraplexError) -> None:
    if exchange.given_up:
        return
    if not exchange.started:
        await exchange.refuse(error)
        return
    await exchange.write(failure(error))
    await exchange.end()
