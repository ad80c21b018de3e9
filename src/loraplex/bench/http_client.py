"""One client process of `bench http`: `python -m loraplex.bench.http_client`, its orders as JSON on standard
input.

Every request has a connection of its own and streams. What it saw goes to standard output as JSON. Requests
that are open when the time is over are withdrawn by closing their connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from typing import Final

import msgspec
import numpy as np

from loraplex.bench.traffic import Ask, Done, Seen, Traffic, draws

READ_BYTES: Final = 1 << 18


class Orders(msgspec.Struct, frozen=True):
    """What to do. start: on the monotonic clock, which all processes share. warm, seconds: before, and of the
    measured time. base, adapter: model names, the latter with the adapter's index in place of `{}`. vocab:
    ids of prompts.
    """

    port: int
    traffic: Traffic
    part: int
    parts: int
    seed: int
    start: float
    warm: float
    seconds: float
    base: str
    adapter: str
    vocab: int


def completion_request(model: str, prompt: object, new: int, key: str | None = None) -> bytes:
    """One streamed completion of `new` tokens, as it goes over a connection of its own. key: the caller's."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": new,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n"
    )
    caller = "" if key is None else f"authorization: Bearer {key}\r\n"
    return (head + caller + "\r\n").encode() + body


async def read_stream(reader: asyncio.StreamReader) -> tuple[bytes, list[tuple[float, int]]]:
    """The first part of an answer, and when how many chunks of it came, until the connection ends."""
    times: list[tuple[float, int]] = []
    tail, first = b"", b""
    while part := await reader.read(READ_BYTES):
        first = first or part
        chunks = (tail + part).count(b"data: {")
        if chunks:
            times.append((time.monotonic(), chunks))
        tail = part[-6:]
    return first, times


class Client:
    """Runs the orders."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self.seen = orders, Seen()
        self._failed = asyncio.Event()
        self._asks = draws(orders.traffic, orders.seed, orders.part, orders.parts)
        self._rng = np.random.default_rng((orders.seed, orders.part, 1))
        self._from, self._until = orders.start + orders.warm, orders.start + orders.warm + orders.seconds

    async def run(self) -> Seen:
        """From the start to the end of the measured time, or to the first request that fails."""
        orders, traffic = self._orders, self._orders.traffic
        await asyncio.sleep(max(0.0, orders.start - time.monotonic()))
        mine = len(range(orders.part, traffic.clients, orders.parts))
        works = [self._arrivals()] if traffic.rate else [self._loop() for _ in range(mine)]
        tasks = [asyncio.create_task(work) for work in works]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._until - time.monotonic())):
                await self._failed.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.seen

    async def _loop(self) -> None:
        while time.monotonic() < self._until:
            await self._one(next(self._asks))

    async def _arrivals(self) -> None:
        due, open_requests = time.monotonic(), set[asyncio.Task[None]]()
        try:
            while True:
                ask = next(self._asks)
                due += ask.after_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                task = asyncio.create_task(self._one(ask))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
        finally:
            for task in open_requests:
                task.cancel()

    async def _one(self, ask: Ask) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._orders.port, limit=1 << 20)
        try:
            born = time.monotonic()
            writer.write(self._request(ask))
            await self._read(reader, ask, born)
        except OSError as error:
            self._fail(str(error))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _request(self, ask: Ask) -> bytes:
        orders = self._orders
        ids = self._rng.integers(0, orders.vocab, ask.prompt).tolist()
        prompt: object = "".join(chr(97 + number % 26) for number in ids) if orders.traffic.text else ids
        model = orders.base if ask.adapter < 0 else orders.adapter.format(ask.adapter)
        return completion_request(model, prompt, ask.new)

    async def _read(self, reader: asyncio.StreamReader, ask: Ask, born: float) -> None:
        first, times = await read_stream(reader)
        if b" 200 " not in first[:20] or not times:
            self._fail(first.decode("utf-8", "replace")[-300:])
            return
        chunks = sum(count for _, count in times)
        inside = sum(count for at, count in times if self._from <= at < self._until)
        self.seen.tokens += ask.new * inside / chunks
        ended = times[-1][0]
        if self._from <= ended < self._until:
            gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(times)]
            tpot = (ended - times[0][0]) / (ask.new - 1) if ask.new > 1 else 0.0
            self.seen.done.append(Done(1e3 * (times[0][0] - born), 1e3 * tpot, 1e3 * max(gaps, default=0.0)))

    def _fail(self, message: str) -> None:
        self.seen.failed += 1
        self.seen.message = self.seen.message or message
        self._failed.set()


def main() -> int:
    """Read the orders, follow them, write what was seen."""
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(Client(orders).run())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
