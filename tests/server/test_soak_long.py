"""Many clients for a while, some of which leave in the middle: every answer is right, nothing is left, memory is flat."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import psutil
import pytest
from tests.server.processes import run
from tests.server.test_whole import BASE, Whole, whole

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

CLIENTS = 64
ROUNDS = 150
DROPPED = 0.05
GROWTH_BYTES = 24 << 20
"""Room for allocators and caches; a leak of one page of memory a request would be 38 MiB."""


async def one_client(client: Whole, number: int, rounds: int) -> int:
    """Ask again and again; leave a twentieth of the streams early. How many answers were complete."""
    chance = random.Random(number)
    complete = 0
    for _ in range(rounds):
        letters = [chance.randrange(70, 90) for _ in range(chance.randrange(1, 12))]
        count = chance.randrange(1, 120)
        leave_after = chance.randrange(1, count + 1) if chance.random() < DROPPED else None
        expected = [letters[k % len(letters)] for k in range(count)]
        seen: list[int] = []
        body = {
            "model": BASE,
            "prompt": letters,
            "max_tokens": count,
            "stream": True,
            "return_token_ids": True,
        }
        async with client.server.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    seen.extend(choice["token_ids"])
                if leave_after is not None and len(seen) >= leave_after:
                    break
        assert seen == expected[: len(seen)]
        if leave_after is None:
            assert seen == expected
            complete += 1
    return complete


def test_many_clients_some_of_which_leave(tmp_path: Path) -> None:
    async def test() -> None:
        async with whole(tmp_path) as client:
            server = psutil.Process(client.server.process.pid)
            engine = psutil.Process(client.engine)
            warm = await asyncio.gather(*(one_client(client, -1 - k, 10) for k in range(CLIENTS)))
            assert sum(warm) > 0
            before = server.memory_info().rss, engine.memory_info().rss
            complete = await asyncio.gather(*(one_client(client, k, ROUNDS) for k in range(CLIENTS)))
            assert sum(complete) > CLIENTS * ROUNDS * (1 - 2 * DROPPED)
            await client.idle()
            after = server.memory_info().rss, engine.memory_info().rss
            assert after[0] - before[0] < GROWTH_BYTES
            assert after[1] - before[1] < GROWTH_BYTES

    run(test, limit_s=800)
