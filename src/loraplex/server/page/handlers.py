"""The operator's page over HTTP: its files, which anybody may have, and its stream, which shows what the
caller's key may see.

The page is static and takes nothing from elsewhere; its policy forbids scripts and styles that are not files
of this folder. It changes nothing by itself: its buttons call the endpoints of adapters and limits.

Specification: interface "HTTP" (`GET /ui`).
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from loraplex.core.errors import CallerError, ErrorCode
from loraplex.server.exchange import Exchange
from loraplex.server.routing import Call, until_disconnect
from loraplex.server.service import ServicePhase

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_HTML: Final = "text/html; charset=utf-8"
_SCRIPT: Final = "text/javascript; charset=utf-8"
_ASSETS: Final = {
    "page.css": "text/css; charset=utf-8",
    "page.js": _SCRIPT,
    "wire.js": _SCRIPT,
    "plots.js": _SCRIPT,
    "actions.js": _SCRIPT,
    "icon.svg": "image/svg+xml",
}


async def show_page(call: Call) -> None:
    """The operator's page."""
    if call.exchange.raw_path.endswith("/"):  # its links are relative to the path without
        call.exchange.answer_headers["location"] = "../ui"
        await call.exchange.respond(308, b"", _HTML)
        return
    await _respond(call.exchange, "index.html", _HTML)


async def show_asset(call: Call) -> None:
    """A file of the operator's page."""
    kind = _ASSETS.get(call.rest)
    if kind is None:
        raise CallerError(ErrorCode.NOT_FOUND, f"{call.exchange.path} is not served; the page is /ui")
    await _respond(call.exchange, call.rest, kind)


async def _respond(exchange: Exchange, name: str, kind: str) -> None:
    exchange.answer_headers |= _HEADERS
    await exchange.respond(200, files(__package__).joinpath("static", name).read_bytes(), kind)


async def stream_pictures(call: Call) -> None:
    """Server-sent events: what the page shows, once a second, as the caller may see it."""
    with call.site.watch_page.viewing(call.caller):
        await until_disconnect(call, _stream(call))


async def _stream(call: Call) -> None:
    """Send pictures until the server drains. Raises `unauthenticated` once the key is taken away, and
    `forbidden` once it means somebody else.
    """
    exchange, seen = call.exchange, 0
    await exchange.begin_events()
    while exchange.method != "HEAD" and call.service.phase is not ServicePhase.DRAINING:
        if call.site.keys.identify(exchange.headers("authorization")) != call.caller:
            raise CallerError(ErrorCode.FORBIDDEN, "the key means another tenant or role now; sign in again")
        seen, frame = await call.site.watch_page.frame(call.caller, seen)
        await exchange.write(frame)
    await exchange.end()
