"""The asynchronous client of an engine: requests out, tokens in, calls answered. One for each client process.

Owns what is open. Every request ends exactly once: by the engine, by its reader, by its buffer's limit, or
because the connection was lost; then its reader hears a typed error at once. Never waits for a reader and
never tokenises.

Specification: rulings "Processes", "Text".
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from loraplex.core import limits
from loraplex.core.errors import (
    CallerError,
    CapacityError,
    ErrorCode,
    InternalFault,
    LoraplexError,
    error_for,
)
from loraplex.core.messages import (
    Abort,
    Ended,
    EngineCall,
    Finish,
    FromEngine,
    Reply,
    Submit,
    ToEngine,
    Tokens,
)
from loraplex.process.tasks import reported
from loraplex.process.transport import decode_from_engine, encode_frame, unpack_sequence

_log: Final = logging.getLogger(__name__)

_FRAMES_PER_TURN: Final = 16


@dataclass(slots=True)
class _Route:
    """Where a request's messages go. unread: tokens that its reader has not taken."""

    group: RequestGroup
    index: int
    unread: int = 0


class RequestGroup:
    """Requests that one reader follows together: the samples of one caller's request.

    Messages are (index, message); an index's last one is its `Ended`.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._ids = tuple(request_ids)
        self._open = set(range(len(self._ids)))
        self._arrived: deque[tuple[int, Tokens | Ended]] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether every request has ended and everything was read."""
        return not self._open and not self._arrived

    async def read(self) -> list[tuple[int, Tokens | Ended]]:
        """Everything that arrived, waiting for the first; empty when the group is done."""
        while not self._arrived and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived = list(self._arrived)
        self._arrived.clear()
        for index in {index for index, _ in arrived}:
            self._client._taken(self._ids[index])
        return arrived

    def finish(self, index: int, tokens: int) -> None:
        """A stop string was found: request `index` is over as if token `tokens` had been its last."""
        if index in self._open:
            self._open.discard(index)
            self._drop(index)
            self._client._forget(self._ids[index], Finish(self._ids[index], tokens))

    def abort(self, error: LoraplexError | None = None) -> None:
        """Withdraw what is still open; a reader hears `error`, or `aborted`."""
        error = error or CallerError(ErrorCode.ABORTED, "the client withdrew the request")
        slow = error.code is ErrorCode.SLOW_CLIENT
        for index in sorted(self._open):
            self._client._forget(self._ids[index], Abort(self._ids[index], slow=slow))
            self._drop(index)
            self._put(index, Ended(self._ids[index], code=error.code.value, message=error.message))

    def _drop(self, index: int) -> None:
        """Forget unread messages of one request."""
        self._arrived = deque(item for item in self._arrived if item[0] != index)

    def _put(self, index: int, message: Tokens | Ended) -> None:
        self._arrived.append((index, message))
        if isinstance(message, Ended):
            self._open.discard(index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Connection to the engine of the moment; a restarted engine is another endpoint and another
    connection.
    """

    def __init__(self, buffer_tokens: int = limits.MAX_BUFFERED_TOKENS) -> None:
        """buffer_tokens: tokens of one request that may wait for its reader."""
        self._buffer_tokens = buffer_tokens
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._routes: dict[str, _Route] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_call = 0
        self._expected = 0
        self._ended: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether there is an engine to talk to."""
        return self._socket is not None

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    def connect(self, endpoint: str) -> None:
        """Talk to the engine at `endpoint` from now on. Must be called in the event loop."""
        if self._socket is not None:
            raise InternalFault(ErrorCode.INTERNAL, "the engine client is already connected")
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, b"c" + secrets.token_bytes(16))
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, limits.MAX_UNSENT_FRAMES)
        sock.connect(endpoint)
        self._socket, self._expected = sock, 0
        reader = asyncio.get_running_loop().create_task(self._read(sock), name="engine-client")
        self._reader = reported(reader, _log, "the engine's answers are no longer read")

    def disconnect(self, error: LoraplexError) -> None:
        """The engine is gone: whatever is open ends with `error`, now."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        self._fail_all(error)

    async def close(self) -> None:
        """Disconnect for good."""
        reader = self._reader
        self.disconnect(CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
        if reader is not None:
            with suppress(asyncio.CancelledError):
                await reader
        self._context.term()

    def submit(self, submits: Sequence[Submit]) -> RequestGroup:
        """Send requests that one reader follows. Raises `duplicate_request`, `engine_unavailable`; then none
        was sent.
        """
        self._require_connection()
        ids = [submit.request_id for submit in submits]
        for request_id in ids:
            if request_id in self._routes or ids.count(request_id) > 1:
                raise CallerError(
                    ErrorCode.DUPLICATE_REQUEST,
                    f"request id {request_id!r} is already in use; choose another",
                )
        payload = encode_frame(submits)  # before anything is noted: what cannot be sent leaves no trace
        group = RequestGroup(self, ids)
        for index, request_id in enumerate(ids):
            self._routes[request_id] = _Route(group, index)
        self._send_payload(payload)
        return group

    async def call(self, message: EngineCall) -> dict[str, Any]:
        """Send a call (its id is chosen here) and return the reply's body, or raise the reply's
        typed error.
        """
        self._require_connection()
        self._next_call += 1
        number = self._next_call
        payload = encode_frame([msgspec.structs.replace(message, call_id=number)])
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._send_payload(payload)
        try:
            return await future
        finally:
            self._calls.pop(number, None)

    def abort_all(self, error: LoraplexError) -> None:
        """Withdraw every open request; their readers hear `error`."""
        for group in {id(route.group): route.group for route in self._routes.values()}.values():
            group.abort(error)

    async def drained(self) -> None:
        """Wait until no request is open."""
        while self._routes:
            self._ended = self._ended or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._ended)

    # What groups need

    def _taken(self, request_id: str) -> None:
        route = self._routes.get(request_id)
        if route is not None:
            route.unread = 0

    def _forget(self, request_id: str, farewell: Abort | Finish) -> None:
        """The reader's side ended a request; what the engine still sends for it is dropped."""
        if self._remove(request_id) and self._socket is not None:
            self._send([farewell])

    # Connection

    def _require_connection(self) -> None:
        if self._socket is None:
            raise CapacityError(
                ErrorCode.ENGINE_UNAVAILABLE, "the engine is not ready; try again in a moment"
            )

    def _send(self, messages: Sequence[ToEngine]) -> None:
        self._send_payload(encode_frame(messages))

    def _send_payload(self, payload: bytes) -> None:
        if self._socket is not None:
            # Completes at once: nothing bounds what waits for the engine, which drains it every step.
            self._socket.send(payload)

    async def _read(self, sock: zmq.asyncio.Socket) -> None:
        for count in itertools.count(1):
            number, payload = await sock.recv_multipart()
            if (
                count % _FRAMES_PER_TURN == 0
            ):  # receiving what is there does not yield, and readers must have a turn
                await asyncio.sleep(0)
            try:
                self._take(unpack_sequence(number), payload)
            except msgspec.DecodeError as error:
                _log.exception("the engine sent a frame that cannot be read")
                self._fail_all(
                    InternalFault(ErrorCode.INTERNAL, f"the engine's answer cannot be read: {error}")
                )

    def _take(self, number: int, payload: bytes) -> None:
        if number != self._expected:
            _log.error("frames %d to %d of the engine were lost", self._expected, number - 1)
            for request_id in list(self._routes):
                self._send([Abort(request_id, slow=True)])
            self._fail_all(
                CapacityError(
                    ErrorCode.ENGINE_UNAVAILABLE, "this server could not keep up; try again in a moment"
                )
            )
        self._expected = number + 1
        for message in decode_from_engine(payload):
            self._deliver(message)

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                self._deliver_tokens(message)
            case Ended():
                route = self._remove(message.request_id)
                if route is not None:
                    route.group._put(route.index, message)
            case Reply():
                self._deliver_reply(message)

    def _deliver_tokens(self, message: Tokens) -> None:
        route = self._routes.get(message.request_id)
        if route is None:
            return
        route.unread += len(message.token_ids) + len(message.prompt_logprobs)
        if route.unread <= self._buffer_tokens:
            route.group._put(route.index, message)
            return
        self._forget(message.request_id, Abort(message.request_id, slow=True))
        route.group._drop(route.index)
        text = f"{self._buffer_tokens} tokens wait to be read, the limit; the request was ended"
        route.group._put(
            route.index, Ended(message.request_id, code=ErrorCode.SLOW_CLIENT.value, message=text)
        )

    def _deliver_reply(self, message: Reply) -> None:
        future = self._calls.get(message.call_id)
        if future is None or future.done():
            if message.code is not None:
                _log.error("the engine refused a message: %s (%s)", message.message, message.code)
            return
        if message.code is None:
            future.set_result(message.body)
        else:
            future.set_exception(error_for(ErrorCode(message.code), message.message))

    def _remove(self, request_id: str) -> _Route | None:
        route = self._routes.pop(request_id, None)
        if not self._routes and self._ended is not None:
            self._ended.set_result(None)
            self._ended = None
        return route

    def _fail_all(self, error: LoraplexError) -> None:
        for request_id in list(self._routes):
            route = self._remove(request_id)
            if route is not None:
                route.group._put(route.index, Ended(request_id, code=error.code.value, message=error.message))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error_for(error.code, error.message))
        self._calls.clear()
