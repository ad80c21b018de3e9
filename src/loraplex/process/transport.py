"""Messages between the engine's process and its clients', over a ZeroMQ socket in a private folder.

The engine's side is a ROUTER, each client a DEALER. One frame carries a list of messages, a step's answers to
one client in one frame. Frames to a client are numbered, so that a client that was given up notices what it
missed.

Owns who asked for what: two clients never see each other's answers, whatever ids they choose. Never blocks on
a client: one whose frames are not taken, or that is gone, loses its requests and nobody else waits.

Specification: rulings "Processes".
"""

from __future__ import annotations

import logging
import signal
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import msgspec
import zmq

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import (
    Abort,
    Ended,
    Finish,
    FromEngine,
    Reply,
    Submit,
    ToEngine,
    Tokens,
)

_log: Final = logging.getLogger(__name__)
_SEQUENCE: Final = struct.Struct("<Q")
_LOST_RETRY_MS: Final = 100
_PROMPT_ITEM_BYTES: Final = 4

_encoder: Final = msgspec.msgpack.Encoder()
_to_engine: Final = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine: Final = msgspec.msgpack.Decoder(list[FromEngine])


def encode_frame(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    """One frame's payload. Raises `invalid_request` for a number that has no place in a message."""
    try:
        return _encoder.encode(messages)
    except OverflowError as error:
        raise CallerError(
            ErrorCode.INVALID_REQUEST, "a number of the request does not fit into 64 bits; send a smaller one"
        ) from error


def decode_from_engine(payload: bytes) -> list[FromEngine]:
    """Messages of a frame that the engine sent; raises `msgspec.DecodeError`."""
    return _from_engine.decode(payload)


def pack_sequence(number: int) -> bytes:
    """A frame's number, as it travels."""
    return _SEQUENCE.pack(number)


def unpack_sequence(data: bytes) -> int:
    """The number of a frame."""
    number: int = _SEQUENCE.unpack(data)[0]
    return number


@dataclass(slots=True)
class _Peer:
    """One client process. sent: frames so far, lost ones included. lost: frames since the last that
    arrived.
    """

    identity: bytes
    sent: int = 0
    lost: bool = False
    requests: set[str] = field(default_factory=set)


class ZmqMailbox:
    """`core.ports.Mailbox` of an engine process. Its methods are called from one thread; `wake` also from
    signals.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        unsent: int = limits.MAX_UNSENT_FRAMES,
    ) -> None:
        """Bind `endpoint` (`ipc://...`). unsent: frames that may wait for one client."""
        self._context = zmq.Context.instance() if context is None else context
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, unsent)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_out.fileno(), zmq.POLLIN)
        self._peers: dict[bytes, _Peer] = {}
        self._owner: dict[str, _Peer] = {}
        self._calls: dict[int, tuple[_Peer, int]] = {}
        self._next_call = 0
        self._synthetic: deque[ToEngine] = deque()
        self._woken_by_signals = False
        self.closed = False

    def wake_on(self, number: signal.Signals) -> None:
        """Close the mailbox, and end a blocking `receive`, when a signal arrives. Called in the main thread.

        A handler alone is not enough: one whose signal arrives while the thread enters its poll waits for the
        poll to end. The byte that the system writes at once ends it.
        """

        def wake(signum: int, frame: FrameType | None) -> None:
            self.wake()

        signal.signal(number, wake)
        signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        self._woken_by_signals = True

    def wake(self) -> None:
        """Close the mailbox and end a blocking `receive`. May be called from a signal handler."""
        self.closed = True
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            return  # a wake-up is already under way

    def close(self) -> None:
        """Release the sockets."""
        self.closed = True
        if self._woken_by_signals:
            signal.set_wakeup_fd(-1)
        self._socket.close()
        self._wake_in.close()
        self._wake_out.close()

    def receive(self, wait: bool) -> Sequence[ToEngine]:
        """Messages that arrived, in order. wait: block until there is one or the mailbox closes."""
        while True:
            self._comfort_lost()
            messages = self._drain()
            if messages or not wait or self.closed:
                return messages
            lost = any(peer.lost for peer in self._peers.values())
            self._poller.poll(_LOST_RETRY_MS if lost else None)

    def pause(self) -> None:
        """Wait a few milliseconds, or until there is a message or the mailbox closes."""
        if not self._synthetic and not self.closed:
            self._poller.poll(limits.PAUSE_MS)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Deliver each message to the client that asked; what nobody waits for any more is dropped."""
        batches: dict[int, tuple[_Peer, list[FromEngine]]] = {}
        for message in messages:
            peer, addressed = self._address(message)
            if peer is not None and not peer.lost:
                batches.setdefault(id(peer), (peer, []))[1].append(addressed)
        for peer, batch in batches.values():
            self._send_frame(peer, batch)

    # Inbound

    def _drain(self) -> list[ToEngine]:
        messages: list[ToEngine] = list(self._synthetic)
        self._synthetic.clear()
        for _ in range(limits.MAX_FRAMES_PER_RECEIVE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            messages.extend(self._accept(frames))
        return messages

    def _accept(self, frames: list[bytes]) -> list[ToEngine]:
        identity = frames[0]
        peer = self._peers.setdefault(identity, _Peer(identity))
        try:
            if len(frames) != 2:
                raise msgspec.DecodeError(f"a frame has {len(frames) - 1} parts, expected 1")
            messages = _to_engine.decode(frames[1])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("refused a frame of %d bytes: %s", sum(map(len, frames[1:])), error)
            self._send_frame(
                peer, [Reply(0, ErrorCode.INVALID_REQUEST.value, f"the frame is refused: {error}")]
            )
            return []
        accepted = [self._claim(peer, message) for message in messages]
        return [message for message in accepted if message is not None]

    def _claim(self, peer: _Peer, message: ToEngine) -> ToEngine | None:
        """Note who asks; None when the message must not reach the engine."""
        match message:
            case Submit():
                return self._claim_request(peer, message)
            case Abort() | Finish():
                return message if self._owner.get(message.request_id) is peer else None
            case _:
                self._next_call += 1
                self._calls[self._next_call] = (peer, message.call_id)
                return msgspec.structs.replace(message, call_id=self._next_call)

    def _claim_request(self, peer: _Peer, message: Submit) -> Submit | None:
        request_id = message.request_id
        refusal = None
        if request_id in self._owner:
            refusal = Ended(
                request_id,
                code=ErrorCode.DUPLICATE_REQUEST.value,
                message=f"request id {request_id!r} is in use",
            )
        elif len(message.prompt) % _PROMPT_ITEM_BYTES:
            refusal = Ended(
                request_id,
                code=ErrorCode.INVALID_REQUEST.value,
                message=f"the prompt has {len(message.prompt)} bytes, expected whole 32-bit token ids",
            )
        if refusal is not None:
            self._send_frame(peer, [refusal])
            return None
        self._owner[request_id] = peer
        peer.requests.add(request_id)
        return message

    # Outbound

    def _address(self, message: FromEngine) -> tuple[_Peer | None, FromEngine]:
        match message:
            case Tokens():
                return self._owner.get(message.request_id), message
            case Ended():
                peer = self._owner.pop(message.request_id, None)
                if peer is not None:
                    peer.requests.discard(message.request_id)
                return peer, message
            case Reply():
                peer, call_id = self._calls.pop(message.call_id, (None, 0))
                return peer, msgspec.structs.replace(message, call_id=call_id)

    def _send_frame(self, peer: _Peer, messages: Sequence[FromEngine]) -> None:
        number = peer.sent
        peer.sent += 1
        try:
            self._socket.send_multipart(
                [peer.identity, pack_sequence(number), encode_frame(messages)], zmq.NOBLOCK
            )
        except zmq.Again:
            if not peer.lost:
                peer.lost = True
                self._abandon(peer, slow=True)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._abandon(peer, slow=False)
            self._peers.pop(
                peer.identity, None
            )  # a frame of it that came in time may be told twice that it is gone
        else:
            peer.lost = False

    def _abandon(self, peer: _Peer, *, slow: bool) -> None:
        """Withdraw everything that a client asked for; the engine hears of it with the next `receive`."""
        why = "it does not take its frames" if slow else "it is gone"
        _log.warning("a client process with %d open requests is given up: %s", len(peer.requests), why)
        for request_id in sorted(peer.requests):
            del self._owner[request_id]
            self._synthetic.append(Abort(request_id, slow=slow))
        peer.requests.clear()
        self._calls = {number: entry for number, entry in self._calls.items() if entry[0] is not peer}

    def _comfort_lost(self) -> None:
        """Tell clients that were given up, once they take frames again: an empty frame whose number shows the
        gap.
        """
        for peer in [peer for peer in self._peers.values() if peer.lost]:
            self._send_frame(peer, [])
