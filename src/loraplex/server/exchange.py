"""One HTTP exchange over ASGI: headers, a bounded body, one response or one stream of server-sent events.

Knows nothing of models. Bodies above the limit are refused while they arrive, not after.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any, Final
from urllib.parse import unquote

from loraplex.core import limits
from loraplex.core.errors import CallerError, CapacityError, ErrorCode, LoraplexError
from loraplex.server.answers import encode, error_body
from loraplex.server.listen import Message, Receive, Send

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
RETRY_AFTER_S: Final = 1
JSON: Final = "application/json"


class Disconnected(Exception):
    """The client went away before its request was whole."""


class Exchange:
    """A request and the way to answer it.

    raw_path: path as it was sent, so that an escaped slash stays part of a name. request_id: the client's
    `x-request-id` if it is sane, else a fresh one. given_up: its client does not read. status: of the
    response once it began, 0 before.
    """

    def __init__(self, scope: Any, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        raw = scope.get("raw_path") or scope["path"].encode()
        self.query: bytes = scope.get("query_string", b"")
        self.raw_path: str = raw.partition(b"?")[0].decode("ascii", "replace")
        self._headers = [(name.lower(), value) for name, value in scope["headers"]]
        self._receive = receive
        self._send = send
        given = self.header("x-request-id")
        self.request_id = given if given and _SANE_ID.fullmatch(given) else secrets.token_hex(16)
        self.answer_headers: dict[str, str] = {"x-request-id": self.request_id}
        self.status = 0
        self.given_up = False
        self._patience: asyncio.Timeout | None = None
        self._hurried = False
        self._delivery: asyncio.Timeout | None = None
        self._delivered_at = 0.0
        self._look: asyncio.TimerHandle | None = None

    @property
    def path(self) -> str:
        """The path with escapes resolved."""
        return unquote(self.raw_path)

    @property
    def started(self) -> bool:
        """Whether the response has begun; then its status can no longer change."""
        return self.status != 0

    def header(self, name: str) -> str | None:
        """A request header, the last one of its name, or None."""
        values = self.headers(name)
        return values[-1].decode("latin-1") if values else None

    def headers(self, name: str) -> list[bytes]:
        """Every request header of a name, as they were sent."""
        wanted = name.encode()
        return [value for known, value in self._headers if known == wanted]

    async def body(self) -> bytes:
        """The JSON body's bytes.

        Raises `request_too_large`, `request_timeout`, and `invalid_request` for another content type.
        """
        self._require_json()
        return await self._arrived()

    async def body_or_none(self) -> bytes:
        """The body's bytes where there need be none, raising as `body` does where there is one.

        Waits for none that was not announced: a server that is ending still says how it is.
        """
        if self.header("transfer-encoding") is None and not (self.header("content-length") or "").strip("0"):
            return b""
        data = await self._arrived()
        if data:
            self._require_json()
        return data

    def _require_json(self) -> None:
        kind = (self.header("content-type") or "").partition(";")[0].strip().lower()
        if kind != JSON:
            raise CallerError(
                ErrorCode.INVALID_REQUEST,
                f"content-type is {kind or 'missing'}; send JSON as {JSON}",
                param="content-type",
            )

    async def _arrived(self) -> bytes:
        announced = self.header("content-length") or "0"
        if announced.isdecimal() and int(announced) > limits.MAX_BODY_BYTES:
            raise _too_large(int(announced))
        try:
            async with asyncio.timeout(0 if self._hurried else limits.BODY_TIMEOUT_S) as self._patience:
                return await self._whole_body()
        except TimeoutError as error:
            if self._hurried:
                raise CapacityError(
                    ErrorCode.SHUTTING_DOWN, "the server is shutting down; try another one"
                ) from error
            raise CallerError(
                ErrorCode.REQUEST_TIMEOUT,
                f"the body did not arrive within {limits.BODY_TIMEOUT_S:g} s; send it again",
            ) from error
        finally:
            self._patience = None

    def hurry(self) -> None:
        """Wait no longer for the body, and not much longer for who does not read: the server is ending."""
        self._hurried = True
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())
        if self._look is not None:
            self._look.cancel()
            self._look_later()

    async def _whole_body(self) -> bytes:
        data = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            data += message.get("body", b"")
            if len(data) > limits.MAX_BODY_BYTES:
                raise _too_large(len(data))
            if not message.get("more_body", False):
                return bytes(data)

    async def disconnected(self) -> None:
        """Wait until the client goes away. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(self, status: int, body: bytes, kind: str = JSON) -> None:
        """The whole response."""
        await self._start(status, kind, {"content-length": str(len(body))})
        await self._deliver({"type": "http.response.body", "body": body, "more_body": False})
        self.close()

    async def answer(self, value: Any, status: int = 200) -> None:
        """The whole response as JSON."""
        await self.respond(status, encode(value))

    async def refuse(self, error: LoraplexError) -> None:
        """The whole response, from a typed error."""
        if error.status in (429, 503):
            self.answer_headers["retry-after"] = str(RETRY_AFTER_S)
        if error.code is ErrorCode.UNAUTHENTICATED:
            self.answer_headers["www-authenticate"] = "Bearer"
        if error.code in (
            ErrorCode.REQUEST_TOO_LARGE,
            ErrorCode.REQUEST_TIMEOUT,
            ErrorCode.SHUTTING_DOWN,
            ErrorCode.ABORTED,
        ):
            self.answer_headers["connection"] = "close"  # the rest of the body is not read
        await self.answer(error_body(error), error.status)

    async def begin_events(self) -> None:
        """Start a stream of server-sent events."""
        await self._start(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})

    async def write(self, data: bytes) -> None:
        """Add to the stream; waits while the connection is full. Raises `slow_client` where that takes too
        long.
        """
        await self._deliver({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the stream."""
        await self._deliver({"type": "http.response.body", "body": b"", "more_body": False})
        self.close()

    def close(self) -> None:
        """Look no more after who does not read."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    async def _deliver(self, message: Message) -> None:
        """Send a part of the response, unless its client does not take it: then it is given up, for good."""
        if self.given_up:
            raise _unread()
        if self._look is None:
            self._look_later()
        self._delivered_at = asyncio.get_running_loop().time()
        try:
            # Without a time of its own: one look now and then costs a stream nothing, a timer for each token
            # would.
            async with asyncio.timeout(None) as self._delivery:
                await self._send(message)
        except TimeoutError as error:
            self.given_up = True
            self.close()
            raise _unread() from error
        finally:
            self._delivery = None

    @property
    def _write_timeout_s(self) -> float:
        return limits.DRAIN_WRITE_TIMEOUT_S if self._hurried else limits.WRITE_TIMEOUT_S

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time() if self._delivery is None else self._delivered_at
        self._look = loop.call_at(began + self._write_timeout_s, self._look_now)

    def _look_now(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._delivery is not None and now - self._delivered_at >= self._write_timeout_s:
            self._delivery.reschedule(now)
        else:
            self._look_later()

    async def _start(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self.status = status
        pairs = {"content-type": kind, **headers, **self.answer_headers}
        await self._deliver(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in pairs.items()],
            }
        )


def _unread() -> CallerError:
    return CallerError(
        ErrorCode.SLOW_CLIENT, "the client does not read its answer; the rest of it was given up"
    )


def _too_large(size: int) -> CallerError:
    return CallerError(
        ErrorCode.REQUEST_TOO_LARGE,
        f"the body has {size} bytes or more, the limit is {limits.MAX_BODY_BYTES}",
    )
