"""Files of a folder on a web server, by plain requests that never go anywhere else.

A server would fetch what it is told from inside its own network, so an address is only what it says: a
redirection is refused, never followed, and the proxy of the environment is used as everywhere. Each request
ends within a bound, however slowly the other side speaks, and reads no more bytes than it asked for. Runs in
the preparation process, in plain calls.

Specification: architecture "Names and what they stand for", rulings "Tenants".
"""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import IO, Any, Final, TypeVar
from urllib.parse import quote

REQUEST_S: Final = 60.0
"""From the first byte of a request to the last of its answer: a range of 8 MiB at 140 KB/s."""
CONNECT_S: Final = 5.0
ATTEMPTS: Final = 3
"""Of a request that a connection or a server in trouble left without an answer."""
PAUSE_S: Final = 0.2
"""Before the second attempt; doubled before the third."""
_BLOCK: Final = 1 << 20
_SAFE: Final = "%/:[]~!$&'()*+,;="
"""What stays in an address as it is; a letter that no address carries is escaped."""
_GONE: Final = (404, 410)
T = TypeVar("T")


class WebError(Exception):
    """No usable answer. again: whether another attempt may have one. refused: the server says that we may
    not.
    """

    def __init__(self, message: str, *, again: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.again, self.refused = again, refused


class WebChanged(Exception):
    """The file is not the version that was asked for."""


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """What came back. size: of the whole file; tag: its entity tag, if the server gives one."""

    size: int
    tag: str | None
    data: bytes


class WebFolder:
    """The files directly under a URL."""

    def __init__(self, url: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._url = quote(url.rstrip("/"), safe=_SAFE)
        self._now_s = now_s
        self._socket: socket.socket | None = None
        self._over = False
        self._opener = urllib.request.build_opener(_Http(self._connected), _Https(self._connected), _Stay)

    def look(self, name: str) -> WebAnswer | None:
        """Size and tag of a file; None when it is not there. Raises `WebError`."""
        return self._tried(lambda: self._head(name))

    def read(self, name: str, tag: str | None, start: int, end: int) -> WebAnswer:
        """Bytes [start, end) of a file with that tag. Raises `WebChanged` for another version, else
        `WebError`.
        """
        return self._tried(lambda: self._get(name, tag, start, end))

    def _tried(self, ask: Callable[[], T]) -> T:
        for attempt in range(1, ATTEMPTS):
            try:
                return ask()
            except WebError as error:
                if not error.again:
                    raise
            time.sleep(PAUSE_S * attempt)
        return ask()

    def _connected(self, connection: socket.socket) -> None:
        self._socket = connection
        if self._over:  # it took so long to connect that nobody cuts what comes now
            raise TimeoutError("the request's time was over before it was connected")

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Cut the connection when the request's time is over, also where bytes keep coming one by one."""
        self._socket, self._over = None, False
        watch = threading.Timer(REQUEST_S, self._cut)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _cut(self) -> None:
        self._over = True
        if self._socket is not None:
            with suppress(OSError):  # it has ended meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)

    def _head(self, name: str) -> WebAnswer | None:
        try:
            with self._bounded(), self._open(name, "HEAD", {}) as answer:
                return WebAnswer(_size(answer.headers.get("content-length")), answer.headers.get("etag"), b"")
        except _Status as status:
            if status.code in _GONE:
                return None
            raise status.error() from None

    def _get(self, name: str, tag: str | None, start: int, end: int) -> WebAnswer:
        headers = {"range": f"bytes={start}-{end - 1}"}
        if tag is not None and not tag.startswith("W/"):
            headers["if-match"] = tag
        begun = self._now_s()
        try:
            with self._bounded(), self._open(name, "GET", headers) as answer:
                if answer.status != 206:
                    raise WebError("the server does not answer with the range of bytes that was asked for")
                place, _, size = (answer.headers.get("content-range") or "").partition("/")
                if place.strip() != f"bytes {start}-{end - 1}":
                    raise WebChanged
                data = self._body(answer, end - start, begun)
                return WebAnswer(_size(size), answer.headers.get("etag"), data)
        except _Status as status:
            if status.code in (*_GONE, 412, 416):
                raise WebChanged from None
            raise status.error() from None

    def _body(self, answer: Any, wanted: int, begun: float) -> bytes:
        """The body, which must have `wanted` bytes; one more is asked for, never all that the other side may
        send.
        """
        data = bytearray()
        try:
            while len(data) <= wanted and (part := answer.read1(min(_BLOCK, wanted + 1 - len(data)))):
                data += part
        except (OSError, HTTPException) as error:
            late = self._now_s() - begun >= REQUEST_S
            raise WebError(f"it did not arrive whole ({_reason(error)})", again=not late) from error
        if len(data) < wanted:
            late = self._now_s() - begun >= REQUEST_S
            raise WebError(f"{len(data)} of {wanted} bytes arrived", again=not late)
        if len(data) > wanted:
            raise WebError(f"more than the {wanted} bytes arrived that were asked for")
        return bytes(data)

    def _open(self, name: str, method: str, headers: dict[str, str]) -> Any:
        url = f"{self._url}/{quote(name)}"
        request = urllib.request.Request(url, headers=headers, method=method)
        begun = self._now_s()
        try:
            return self._opener.open(request, timeout=REQUEST_S)
        except urllib.error.HTTPError as error:
            with error:
                raise _Status(error.code, error.headers.get("location")) from None
        except (OSError, HTTPException, ValueError) as error:
            reason = _reason(getattr(error, "reason", error))
            late = self._over or self._now_s() - begun >= REQUEST_S
            raise WebError(reason, again=not late and not isinstance(error, ValueError)) from error


class _Status(Exception):
    """An answer other than success."""

    def __init__(self, code: int, location: str | None) -> None:
        super().__init__(code)
        self.code, self.location = code, location

    def error(self) -> WebError:
        if self.code in (401, 403):
            return WebError(f"status {self.code}", refused=True)
        if self.location is not None:
            return WebError(
                f"status {self.code} leads to {self.location[:80]!r}, which is not followed", refused=True
            )
        return WebError(f"status {self.code}", again=self.code >= 500 or self.code in (408, 429))


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows nothing: an address that leads elsewhere is not the one that was permitted."""

    def redirect_request(
        self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """None: the answer is an error, which says where it leads."""


class _Connection(HTTPConnection):
    """A connection that is made soon or not at all, and whose socket its owner knows."""

    connected: Callable[[socket.socket], None]

    def connect(self) -> None:
        """Connect, and tell."""
        self.timeout = CONNECT_S
        super().connect()
        self.sock.settimeout(REQUEST_S)
        self.connected(self.sock)


class _TlsConnection(_Connection, HTTPSConnection):
    """The same, encrypted, with the certificates of the system."""


class _Http(urllib.request.HTTPHandler):
    def __init__(self, connected: Callable[[socket.socket], None]) -> None:
        super().__init__()
        self._connected = connected

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_telling(_Connection, self._connected), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, connected: Callable[[socket.socket], None]) -> None:
        super().__init__()
        self._connected = connected

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_telling(_TlsConnection, self._connected), req)


def _telling(kind: type[_Connection], connected: Callable[[socket.socket], None]) -> Any:
    """What makes a connection that tells of its socket."""

    def make(host: str, **options: Any) -> _Connection:
        made = kind(host, **options)
        made.connected = connected
        return made

    return make


def _size(text: str | None) -> int:
    digits = (text or "").strip()
    if not digits.isascii() or not digits.isdigit() or len(digits) > 19:
        raise WebError("the server does not say how long the file is")
    return int(digits)


def _reason(error: object) -> str:
    return f"{type(error).__name__}: {error}"[:120]
