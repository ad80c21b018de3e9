"""Events from an engine to its server: in order, counted when they are lost, never waited for."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import zmq
from tests.process import engines
from tests.process.asking import read_all, submit
from tests.waiting import pid_of, run

from loraplex.config import EngineConfig
from loraplex.core.events import AnyEvent, Event, FirstToken, IterationCompleted, RequestFinished
from loraplex.process.client import EngineClient
from loraplex.process.event_stream import EventPublisher, EventReader
from loraplex.process.supervisor import EngineStatus, EngineSupervisor


class Seen:
    """What was observed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lost: list[int] = []
        self.changed = asyncio.Event()

    def observe(self, events: Sequence[Event], lost: int) -> None:
        self.events.extend(events)
        self.lost.append(lost)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()


Test = Callable[[Callable[[], EventReader], EventPublisher, Seen], Awaitable[None]]


def connected(folder: Path, test: Test, unsent: int = 4) -> None:
    """Run a test over a publisher whose server listens when it is told to."""

    async def whole() -> None:
        context: zmq.Context[Any] = zmq.Context()
        endpoint = f"ipc://{folder / 'e'}"
        publisher, seen, readers = EventPublisher(endpoint, context=context, unsent=unsent), Seen(), []

        def listen() -> EventReader:
            readers.append(EventReader(endpoint, seen.observe))
            return readers[-1]

        try:
            await test(listen, publisher, seen)
        finally:
            publisher.close()
            for reader in readers:
                await reader.close()
            context.destroy(linger=0)

    run(whole)


def test_every_kind_of_event_can_be_read() -> None:
    assert set(get_args(AnyEvent)) == set(Event.__subclasses__())


def test_events_arrive_in_order_a_step_in_a_frame(tmp_path: Path) -> None:
    async def test(listen: Callable[[], EventReader], publisher: EventPublisher, seen: Seen) -> None:
        listen()
        for number in range(50):
            publisher.emit(FirstToken(number, "a", 1))
            publisher.emit(FirstToken(number, "b", 1))
            publisher.flush()
            publisher.flush()  # nothing: no frame
            await seen.until(lambda number=number: len(seen.events) == 2 * (number + 1))
        assert [event.at_ns for event in seen.events] == sorted([*range(50), *range(50)])
        assert seen.lost == [0] * 50

    connected(tmp_path, test, unsent=50)


def test_what_a_server_does_not_read_is_forgotten_and_counted(tmp_path: Path) -> None:
    async def test(listen: Callable[[], EventReader], publisher: EventPublisher, seen: Seen) -> None:
        for number in range(100):
            publisher.emit(FirstToken(number, "a", 1))
            publisher.flush()
        listen()
        sent = 100
        # when room is known again is the transport's affair; whatever is lost until then is counted
        while not seen.events or seen.events[-1].at_ns < 100:
            publisher.emit(FirstToken(sent, "a", 1))
            publisher.flush()
            sent += 1
            await asyncio.sleep(0.01)
        numbers = [event.at_ns for event in seen.events]
        assert numbers == sorted(set(numbers))
        last = seen.events[-1].at_ns
        assert len(numbers) + sum(seen.lost) == last + 1
        assert 90 <= sum(seen.lost) <= last - 4
        for before, after, lost in zip([-1, *numbers], numbers, seen.lost, strict=False):
            assert after - before - 1 == lost

    connected(tmp_path, test)


def test_a_frame_that_cannot_be_read_is_reported_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(listen: Callable[[], EventReader], publisher: EventPublisher, seen: Seen) -> None:
        listen()
        publisher._socket.send(b"\xc1")
        publisher.emit(FirstToken(1, "a", 1))
        publisher.flush()
        await seen.until(lambda: bool(seen.events))

    with caplog.at_level(logging.ERROR):
        connected(tmp_path, test)
    assert "cannot be read" in caplog.text


def test_an_observer_that_fails_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(listen: Callable[[], EventReader], publisher: EventPublisher, seen: Seen) -> None:
        def fail(events: Sequence[Event], lost: int) -> None:
            raise ValueError("told to")

        seen.observe = fail  # type: ignore[method-assign]
        reader = listen()
        publisher.emit(FirstToken(1, "a", 1))
        publisher.flush()
        await asyncio.wait([reader._task])
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR):
        connected(tmp_path, test)
    assert "no longer observed" in caplog.text


def test_the_events_of_every_engine_reach_the_server(tmp_path: Path) -> None:
    async def test() -> None:
        client, seen = EngineClient(), Seen()
        config = EngineConfig(model="m", images_dir=str(tmp_path))
        supervisor = EngineSupervisor(
            config, client, builder=engines.VIRTUAL, log_level="critical", pause=lambda failures: 0.0
        )
        supervisor.observe = seen.observe

        def ended() -> list[str]:
            return [event.request_id for event in seen.events if isinstance(event, RequestFinished)]

        try:
            await supervisor.start()
            for group in [client.submit([submit(name, [1, 2])]) for name in "ab"]:
                await read_all(group)
            await seen.until(lambda: len(ended()) == 2)
            os.kill(pid_of(supervisor), signal.SIGKILL)
            await supervisor.until(EngineStatus.RESTARTING)
            await supervisor.until(EngineStatus.READY)
            await read_all(client.submit([submit("c", [1, 2])]))
            await seen.until(lambda: len(ended()) == 3)
        finally:
            await supervisor.stop()
            await client.close()
        assert ended() in (["a", "b", "c"], ["b", "a", "c"])
        iterations = [event for event in seen.events if isinstance(event, IterationCompleted)]
        # two prompts and the eight tokens of each: the last needs no row, a late stop's row is discarded
        assert sum(event.sampled for event in iterations) >= 24
        assert not any(seen.lost)

    run(test)
