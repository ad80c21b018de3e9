"""Listening: an ASGI application on granian, inside this process's event loop.

Signals and child processes stay with whoever runs this. Owns the address and the limits of the HTTP
connection: header size and time. Bodies are the application's.

Specification: rulings "Processes".
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

BACKLOG: Final = 1024


def check_address(host: str, port: int) -> None:
    """Raise `config_invalid` unless this process alone could listen on host:port.

    The server's own socket shares its port with whoever allows it; two servers must not share one unnoticed.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise CallerError(
            ErrorCode.CONFIG_INVALID,
            f"cannot listen on {host} port {port}: {reason}; choose another --port",
            param="port",
        ) from error


def connection_limit() -> int:
    """Connections that may be open at once: the limit, or what files are left for. Asks for as many files as
    it may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.MAX_CONNECTIONS + limits.RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return limits.MAX_CONNECTIONS
    return max(min(limits.MAX_CONNECTIONS, soft - limits.RESERVED_FILES), 16)


class Listener:
    """An application that is reachable from `start` to `stop`."""

    def __init__(self, app: AsgiApp, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._server = Server(
            app,
            address=host,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,  # the limits below are those of HTTP/1.1
            websockets=False,
            backlog=BACKLOG,
            backpressure=connection_limit(),
            log_enabled=False,
            http1_settings=HTTP1Settings(
                header_read_timeout=round(limits.HEADER_TIMEOUT_S * 1000),
                max_buffer_size=limits.MAX_HEADER_BYTES,
            ),
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Begin to accept connections. Raises `config_invalid` when the address cannot be had."""
        check_address(self.host, self.port)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(), name="http")
        while True:
            try:
                _, writer = await asyncio.open_connection(self.host, self.port)
            except OSError:
                if self._task.done():
                    await self._task  # raises why it does not listen
                    raise
                await asyncio.sleep(0.005)
            else:
                writer.close()
                return

    async def stop(self) -> None:
        """Accept no more connections and wait until the open ones have their answers."""
        if self._task is not None:
            self._server.stop()
            await asyncio.shield(self._task)  # it must see its own end: cancelled, it would fail at that
            self._task = None
