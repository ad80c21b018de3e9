"""The engine's mailbox over real sockets: order, ownership, clients that are slow or gone, frames that are
refused.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.engine.rig import sampling

from loraplex.core import limits
from loraplex.core.messages import Abort, Ended, Finish, Inspect, Reply, Submit, Tokens
from loraplex.process.local import LocalMailbox
from loraplex.process.transport import ZmqMailbox, decode_from_engine, encode_frame, unpack_sequence


class Peer:
    """A client as bare as the wire allows."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, receive_limit: int = 0) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 250_000)
        if receive_limit:
            self.socket.setsockopt(zmq.RCVHWM, receive_limit)
            self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(endpoint)

    def send(self, *messages: Any) -> None:
        self.socket.send(encode_frame(messages))

    def receive(self) -> tuple[int, list[Any]]:
        number, payload = self.socket.recv_multipart()
        return unpack_sequence(number), decode_from_engine(payload)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def connect(context: zmq.Context[Any], endpoint: str) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def open_peer(receive_limit: int = 0) -> Peer:
        peers.append(Peer(context, endpoint, receive_limit))
        return peers[-1]

    yield open_peer
    for peer in peers:
        peer.socket.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 's'}"


@pytest.fixture
def mailbox(context: zmq.Context[Any], endpoint: str) -> Iterator[ZmqMailbox]:
    mailbox = ZmqMailbox(endpoint, context=context, unsent=8)
    yield mailbox
    mailbox.close()


def submit(name: str, prompt: bytes = b"\1\0\0\0") -> Submit:
    return Submit(name, prompt, sampling())


def collect(mailbox: ZmqMailbox, count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        messages.extend(mailbox.receive(wait=True))
    return messages


def test_messages_arrive_in_order_and_answers_in_one_frame(
    connect: Callable[..., Peer], mailbox: ZmqMailbox
) -> None:
    peer = connect()
    peer.send(submit("a"), submit("b"))
    peer.send(Finish("a", 3))
    assert [type(m) for m in collect(mailbox, 3)] == [Submit, Submit, Finish]
    answers = [Tokens("a", (1,)), Tokens("b", (2,)), Ended("a", "stop")]
    mailbox.send(answers)
    assert peer.receive() == (0, answers)
    mailbox.send([Tokens("a", (9,)), Tokens("b", (3,))])  # a has ended: nobody waits for it
    assert peer.receive() == (1, [Tokens("b", (3,))])


def test_clients_have_ids_of_their_own(connect: Callable[..., Peer], mailbox: ZmqMailbox) -> None:
    one, two = connect(), connect()
    one.send(submit("r"), Inspect(7))
    first = collect(mailbox, 2)
    two.send(submit("r"), Abort("r"), Finish("r", 1), Inspect(7))
    second = collect(mailbox, 1)
    assert [type(m) for m in second] == [Inspect]  # a foreign request can be neither doubled nor ended
    assert two.receive()[1][0].code == "duplicate_request"
    assert first[1].call_id != second[0].call_id
    mailbox.send([Reply(second[0].call_id, body={"to": "two"}), Reply(first[1].call_id, body={"to": "one"})])
    mailbox.send([Tokens("r", (1,))])
    assert one.receive()[1] == [Reply(7, body={"to": "one"})]
    assert one.receive()[1] == [Tokens("r", (1,))]
    assert two.receive()[1] == [Reply(7, body={"to": "two"})]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", encode_frame([Tokens("x", (1,))]), encode_frame([submit("x")])[:-1]]
)
def test_a_frame_that_is_no_message_is_refused_and_costs_nothing(
    connect: Callable[..., Peer], mailbox: ZmqMailbox, payload: bytes
) -> None:
    peer = connect()
    peer.socket.send(payload)
    peer.send(submit("a"))
    assert [m.request_id for m in collect(mailbox, 1)] == ["a"]
    refusal = peer.receive()[1][0]
    assert (refusal.call_id, refusal.code) == (0, "invalid_request")


def test_half_a_token_is_refused(connect: Callable[..., Peer], mailbox: ZmqMailbox) -> None:
    peer = connect()
    peer.send(submit("a", b"\1\0\0\0\1"), submit("b"))
    assert [m.request_id for m in collect(mailbox, 1)] == ["b"]
    ended = peer.receive()[1][0]
    assert (ended.request_id, ended.code) == ("a", "invalid_request")


def test_a_client_that_takes_nothing_loses_its_requests_and_learns_of_the_gap(
    connect: Callable[..., Peer], mailbox: ZmqMailbox
) -> None:
    slow, quick = connect(receive_limit=1), connect()
    slow.send(submit("s"), Inspect(1))
    quick.send(submit("q"))
    collect(mailbox, 3)
    sent = 0
    aborted: list[Any] = []
    while not aborted:  # until what the sockets hold between them is full
        mailbox.send([Tokens("s", tuple(range(4096))), Tokens("q", (sent,))])
        assert quick.receive()[1] == [Tokens("q", (sent,))]  # nobody else waits
        aborted = list(mailbox.receive(wait=False))
        sent += 1
        assert sent < 100_000
    assert aborted == [Abort("s", slow=True)]
    numbers: list[int] = []
    messages: list[Any] = [None]
    while messages:  # until the empty frame that says that something is missing
        # When the sockets have room again is the transport's affair: try until then.
        mailbox.receive(wait=False)
        if slow.socket.poll(5):
            number, messages = slow.receive()
            numbers.append(number)
    assert numbers[:-1] == list(range(len(numbers) - 1))
    assert numbers[-1] > len(numbers) - 1
    slow.send(submit("again"))
    collect(mailbox, 1)
    mailbox.send([Tokens("again", (1,))])
    assert slow.receive()[1] == [Tokens("again", (1,))]


def test_a_client_that_is_gone_loses_its_requests(connect: Callable[..., Peer], mailbox: ZmqMailbox) -> None:
    gone, witness = connect(), connect()
    gone.send(submit("g"), submit("h"))
    collect(mailbox, 2)
    gone.socket.close()
    messages: list[Any] = []
    while not messages:
        mailbox.send([Tokens("g", (1,))])
        messages = list(mailbox.receive(wait=False))
    # Whether the kernel has told of the end yet or its queue is full first: both are withdrawn.
    assert [(type(m), m.request_id) for m in messages] == [(Abort, "g"), (Abort, "h")]
    witness.send(submit("g"))
    assert collect(mailbox, 1)[0].request_id == "g"


def test_a_client_that_vanishes_while_its_frame_is_read_costs_nobody_else(
    connect: Callable[..., Peer], mailbox: ZmqMailbox
) -> None:
    """The first message of a frame is refused, which shows that the client is gone; the second one was
    accepted.
    """
    frame = encode_frame([submit("a", b"\1\0\0"), submit("b")])
    accepted = mailbox._accept([b"a client that the socket does not know", frame])
    assert [m.request_id for m in accepted if isinstance(m, Submit)] == ["b"]
    witness = connect()
    witness.send(submit("w"))
    collect(mailbox, 1)
    mailbox.send([Tokens("b", (1,)), Tokens("w", (2,))])
    assert witness.receive()[1] == [Tokens("w", (2,))]
    assert mailbox.receive(wait=False) == [Abort("b")]


def test_waking_ends_a_wait(mailbox: ZmqMailbox) -> None:
    received: list[Any] = []
    waiter = threading.Thread(target=lambda: received.append(mailbox.receive(wait=True)))
    waiter.start()
    mailbox.wake()
    mailbox.wake()
    waiter.join()
    assert received == [[]]
    assert mailbox.closed


def test_a_signal_ends_a_wait_that_it_does_not_interrupt(mailbox: ZmqMailbox) -> None:
    """One that another thread takes, or that comes as this one enters its poll, runs its handler
    only later.
    """
    before, late = signal.getsignal(signal.SIGUSR1), threading.Event()

    def elsewhere() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if waited.wait(60):
            return
        late.set()
        mailbox.wake()

    waited, sender = threading.Event(), threading.Timer(0.1, elsewhere)
    try:
        mailbox.wake_on(signal.SIGUSR1)
        sender.start()
        assert mailbox.receive(wait=True) == []
        waited.set()
        sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert mailbox.closed
    assert not late.is_set()


def test_a_pause_ends_with_a_message_or_by_itself(
    connect: Callable[..., Peer], mailbox: ZmqMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox.pause()
    assert not mailbox.receive(wait=False)
    monkeypatch.setattr(limits, "PAUSE_MS", 1 << 30)  # by itself it would not end any more
    connect().send(Inspect(1))
    mailbox.pause()
    assert [type(m) for m in mailbox.receive(wait=False)] == [Inspect]
    mailbox.wake()
    mailbox.pause()
    assert mailbox.closed


def test_a_pause_in_the_callers_thread_leaves_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("loraplex.process.local.time.sleep", slept.append)
    mailbox = LocalMailbox()
    mailbox.pause()
    assert slept == [limits.PAUSE_MS / 1000]
    mailbox.post(Inspect(1))
    mailbox.pause()
    assert len(slept) == 1
