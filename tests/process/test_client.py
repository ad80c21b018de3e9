"""The client of an engine, in one process with the engine's mailbox: each request ends once, whoever
ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.engine.rig import sampling
from tests.waiting import run

from loraplex.core.errors import CallerError, CapacityError, ErrorCode, InternalFault, LoraplexError
from loraplex.core.messages import Abort, Ended, Finish, Inspect, Reply, Submit, ToEngine, Tokens
from loraplex.process.client import EngineClient, RequestGroup
from loraplex.process.transport import ZmqMailbox


def submit(name: str) -> Submit:
    return Submit(name, b"\1\0\0\0", sampling())


class Engine:
    """The engine's side of the wire, driven by hand."""

    def __init__(self, mailbox: ZmqMailbox) -> None:
        self.mailbox = mailbox

    async def take(self, count: int = 1) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while len(messages) < count:
            messages.extend(await asyncio.to_thread(self.mailbox.receive, True))
        return messages


@asynccontextmanager
async def connection(folder: Path, buffer_tokens: int = 8) -> AsyncIterator[tuple[EngineClient, Engine]]:
    context: zmq.Context[Any] = zmq.Context()
    endpoint = f"ipc://{folder / 's'}"
    mailbox = ZmqMailbox(endpoint, context=context)
    client = EngineClient(buffer_tokens)
    client.connect(endpoint)
    try:
        yield client, Engine(mailbox)
    finally:
        await client.close()
        mailbox.close()
        context.destroy(linger=0)


async def read_all(group: RequestGroup) -> list[tuple[int, Any]]:
    messages: list[tuple[int, Any]] = []
    while not group.done:
        messages.extend(await group.read())
    return messages


def test_a_group_hears_of_its_requests_and_of_no_others(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            group, other = client.submit([submit("a"), submit("b")]), client.submit([submit("c")])
            assert await engine.take(3) == [submit("a"), submit("b"), submit("c")]
            engine.mailbox.send([Tokens("b", (5,)), Tokens("c", (7,)), Tokens("a", (6,)), Ended("b", "stop")])
            engine.mailbox.send([Ended("a", "length"), Ended("c", "stop")])
            assert await read_all(group) == [
                (1, Tokens("b", (5,))),
                (0, Tokens("a", (6,))),
                (1, Ended("b", "stop")),
                (0, Ended("a", "length")),
            ]
            assert await read_all(other) == [(0, Tokens("c", (7,))), (0, Ended("c", "stop"))]
            assert await group.read() == []
            assert client.open_requests == 0

    run(test)


def test_a_live_request_id_is_not_taken_twice(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            client.submit([submit("a")])
            for ids in (["b", "a"], ["c", "c"]):
                with pytest.raises(CallerError) as refused:
                    client.submit([submit(name) for name in ids])
                assert refused.value.code is ErrorCode.DUPLICATE_REQUEST
            assert client.open_requests == 1
            assert await engine.take() == [submit("a")]

    run(test)


def test_finish_and_abort_reach_the_engine_and_end_the_reading(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            group = client.submit([submit("a"), submit("b"), submit("c")])
            await engine.take(3)
            group.finish(0, 2)
            group.finish(0, 2)
            group.abort()
            assert await engine.take(3) == [Finish("a", 2), Abort("b"), Abort("c")]
            engine.mailbox.send([Tokens("b", (1,)), Ended("a", "stop"), Ended("b", code="aborted")])
            messages = await read_all(group)
            assert [(index, message.code) for index, message in messages] == [(1, "aborted"), (2, "aborted")]
            again = client.submit([submit("a")])  # the id is free once its request is over
            await engine.take()
            engine.mailbox.send([Ended("a", "stop")])
            assert await read_all(again) == [(0, Ended("a", "stop"))]

    run(test)


def test_a_reader_that_does_not_read_loses_its_request_and_no_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path, buffer_tokens=8) as (client, engine):
            slow, quick = client.submit([submit("s")]), client.submit([submit("q")])
            await engine.take(2)
            for token in range(9):
                engine.mailbox.send([Tokens("s", (token,)), Tokens("q", (token,))])
                assert await quick.read() == [(0, Tokens("q", (token,)))]
            assert await engine.take() == [Abort("s", slow=True)]
            ((index, ended),) = await read_all(slow)
            assert (index, ended.code) == (0, "slow_client")
            engine.mailbox.send([Tokens("s", (1,)), Ended("s", code="slow_client"), Ended("q", "stop")])
            assert await read_all(quick) == [(0, Ended("q", "stop"))]
            assert await slow.read() == []

    run(test)


def test_a_reader_that_keeps_up_is_never_slow(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path, buffer_tokens=8) as (client, engine):
            group = client.submit([submit("a")])
            await engine.take()
            seen = 0
            for _ in range(20):
                engine.mailbox.send([Tokens("a", (1,) * 8)])
                seen += sum(len(message.token_ids) for _, message in await group.read())
            assert seen == 160

    run(test)


def test_calls_are_answered_or_raise(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            first, second = (
                asyncio.ensure_future(client.call(Inspect(0))),
                asyncio.ensure_future(client.call(Inspect(0))),
            )
            calls = await engine.take(2)
            assert all(isinstance(call, Inspect) for call in calls)
            engine.mailbox.send([Reply(calls[1].call_id, "adapter_not_found", "none such")])  # type: ignore[union-attr]
            engine.mailbox.send([Reply(calls[0].call_id, body={"x": 1})])  # type: ignore[union-attr]
            assert await first == {"x": 1}
            with pytest.raises(CallerError) as refused:
                await second
            assert refused.value.code is ErrorCode.ADAPTER_NOT_FOUND

    run(test)


def test_a_lost_engine_ends_everything_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            group = client.submit([submit("a"), submit("b")])
            call = asyncio.ensure_future(client.call(Inspect(0)))
            await engine.take(3)
            drained = asyncio.ensure_future(client.drained())
            client.disconnect(CapacityError(ErrorCode.ENGINE_DIED, "gone"))
            assert [message.code for _, message in await read_all(group)] == ["engine_died"] * 2
            with pytest.raises(CapacityError) as died:
                await call
            assert died.value.code is ErrorCode.ENGINE_DIED
            await drained
            with pytest.raises(CapacityError) as unavailable:
                client.submit([submit("c")])
            assert unavailable.value.code is ErrorCode.ENGINE_UNAVAILABLE
            with pytest.raises(CapacityError) as unavailable:
                await client.call(Inspect(0))
            assert unavailable.value.code is ErrorCode.ENGINE_UNAVAILABLE

    run(test)


def test_withdrawing_everything_says_why(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            group = client.submit([submit("a")])
            await engine.take()
            client.abort_all(CapacityError(ErrorCode.SHUTTING_DOWN, "the server is shutting down"))
            assert [message.code for _, message in await read_all(group)] == ["shutting_down"]
            await client.drained()
            assert await engine.take() == [Abort("a")]

    run(test)


def test_a_gap_in_the_frames_ends_what_was_open(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            group = client.submit([submit("a")])
            await engine.take()
            (peer,) = engine.mailbox._peers.values()
            peer.sent += 1  # as if a frame had not fitted into the socket
            engine.mailbox.send([Tokens("a", (1,))])
            assert [message.code for _, message in await read_all(group)] == ["engine_unavailable"]
            assert await engine.take() == [Abort("a", slow=True)]
            fresh = client.submit([submit("b")])
            await engine.take()
            engine.mailbox.send([Ended("b", "stop")])
            assert await read_all(fresh) == [(0, Ended("b", "stop"))]

    run(test)


def test_an_answer_that_cannot_be_read_is_our_fault_and_not_a_hang(tmp_path: Path) -> None:
    async def test() -> None:
        async with connection(tmp_path) as (client, engine):
            call = asyncio.ensure_future(client.call(Inspect(0)))
            await engine.take()
            engine.mailbox.send([Reply(1, body={1: 2})])  # type: ignore[dict-item]  # keys must be strings
            with pytest.raises(LoraplexError) as fault:
                await call
            assert isinstance(fault.value, InternalFault)

    run(test)
