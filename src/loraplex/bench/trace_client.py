"""One client process of `bench trace`: `python -m loraplex.bench.trace_client`, its orders as JSON on
standard input.

Requests come when the trace says, however many are open; each has a connection of its own and streams. A
refusal for want of capacity is an outcome; any other is wrong. What was seen goes to standard output as JSON.
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

from loraplex.bench.http_client import completion_request, read_stream
from loraplex.bench.traces import Arrival, Outcome, Seen

OVERLOAD: Final = (b" 429 ", b" 503 ")
OPEN: Final = "still_open"
"""Code of a request that was not answered when the client's patience ended."""


class Orders(msgspec.Struct, frozen=True):
    """What to do. start: on the monotonic clock, which all processes share. patience: seconds after it at
    which what is open is withdrawn. keys: of tenants. adapter: model name with the adapter's index for `{}`.
    vocab: ids of prompts.
    """

    port: int
    arrivals: list[Arrival]
    start: float
    patience: float
    keys: dict[str, str]
    adapter: str
    vocab: int
    seed: int


class Client:
    """Runs the orders."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self.seen = orders, Seen()
        self._rng = np.random.default_rng(orders.seed)

    async def run(self) -> Seen:
        """Until every request has its outcome."""
        orders = self._orders
        tasks = [asyncio.create_task(self._one(arrival)) for arrival in orders.arrivals]
        if tasks:
            left = orders.start + orders.patience - time.monotonic()
            _, late = await asyncio.wait(tasks, timeout=max(left, 0.0))
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.seen

    async def _one(self, arrival: Arrival) -> None:
        due = self._orders.start + arrival.at
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        prompt = self._rng.integers(0, self._orders.vocab, arrival.prompt).tolist()
        model = self._orders.adapter.format(arrival.adapter)
        request = completion_request(model, prompt, arrival.new, self._orders.keys.get(arrival.tenant))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._orders.port, limit=1 << 20)
        except OSError as error:
            self._wrong(str(error))
            return
        try:
            writer.write(request)
            first, times = await read_stream(reader)
            self._note(arrival, due, first, times)
        except OSError as error:
            self._wrong(str(error))
        except asyncio.CancelledError:
            self._end(Outcome(arrival.tenant, -1.0, [], 0, OPEN))
            raise
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _note(self, arrival: Arrival, due: float, first: bytes, times: list[tuple[float, int]]) -> None:
        status = first[:20]
        if b" 200 " in status and times and b'"error":' not in first:
            gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(times)]
            self._end(Outcome(arrival.tenant, times[0][0] - due, gaps, arrival.new))
        elif any(code in status for code in OVERLOAD) or (b" 200 " in status and b'"error":' in first):
            self._end(Outcome(arrival.tenant, -1.0, [], 0, _code(first)))
        else:
            self._wrong(first.decode("utf-8", "replace")[-300:])

    def _end(self, outcome: Outcome) -> None:
        self.seen.outcomes.append(outcome)
        self.seen.ended = max(self.seen.ended, time.monotonic() - self._orders.start)

    def _wrong(self, message: str) -> None:
        self.seen.wrong += 1
        self.seen.message = self.seen.message or message


def _code(answer: bytes) -> str:
    """The error code of a refusal."""
    begin, end = answer.find(b"{"), answer.rfind(b"}")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(answer[begin : end + 1])["error"]["code"])
    return "refused"


def main() -> int:
    """Read the orders, follow them, write what was seen."""
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(Client(orders).run())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
