"""Many clients for a while, some of which leave in the middle: every answer is right, nothing is left, memory
is flat.

The engine is the real one over the virtual device, whose tokens prove history and adapter. LORAPLEX_SOAK_S
says for how many seconds; `python -m tests.server.test_soak_long` prints the figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from tests.process import engines
from tests.server.tiny_server import write_adapter
from tests.server.whole_server import BASE, Whole, whole
from tests.waiting import run

from loraplex.sim.tokens import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

SOAK_S = float(os.environ.get("LORAPLEX_SOAK_S", "60"))
CLIENTS = 64
DROPPED = 0.05
PROMPTS = 40
MOST = 120
GROWTH_BYTES = 24 << 20
"""Room for allocators and caches; a page of memory a request would be several times as much."""


def question(number: int) -> dict[str, Any]:
    """The `number`-th request: its own prompt and length, the base or one of two adapters."""
    chance = random.Random(number)
    letters = [chance.randrange(70, 90) for _ in range(chance.randrange(1, 60))]
    model = (BASE, "one", "two")[number % 3]
    return {
        "model": model,
        "prompt": letters,
        "max_tokens": chance.randrange(1, MOST),
        "stream": True,
        "return_token_ids": True,
        "temperature": 0,
        "ignore_eos": True,
    }


async def ask(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> list[int]:
    """The streamed tokens, all or the first few."""
    seen: list[int] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                seen.extend(choice["token_ids"])
            if leave_after is not None and len(seen) >= leave_after:
                break
    return seen


async def one_client(
    client: Whole, number: int, answers: list[list[int]], until: float, done: Counter[str]
) -> None:
    """Ask again and again until the time is over; leave a twentieth of the streams early."""
    chance = random.Random(number)
    while time.monotonic() < until:
        which = chance.randrange(PROMPTS)
        right = answers[which]
        leave_after = chance.randrange(1, len(right) + 1) if chance.random() < DROPPED else None
        seen = await ask(client.server.http, question(which), leave_after)
        assert seen == right[: len(seen)], f"client {number}, request {which}"
        if leave_after is None:
            assert len(seen) == len(right)
        done["complete" if leave_after is None else "left"] += 1
        done["tokens"] += len(seen)


async def soak(tmp_path: Path, seconds: float) -> dict[str, Any]:
    """Figures of a soak; asserts what must hold."""
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / "adapters" / name, seed=seed)
    async with whole(tmp_path, engines.VIRTUAL, adapter_dirs=[str(tmp_path / "adapters")]) as client:
        client.server.http = httpx.AsyncClient(
            base_url=client.server.url, timeout=120, limits=httpx.Limits(max_connections=2 * CLIENTS)
        )
        answers = [await ask(client.server.http, question(number)) for number in range(PROMPTS)]
        for number in range(0, PROMPTS, 3):  # those of the base are known from elsewhere
            body = question(number)
            prompt = np.array(body["prompt"], dtype=np.int32)
            assert answers[number] == expected_tokens(prompt, 0, body["max_tokens"], engines.VOCAB)
        server, engine = psutil.Process(client.server.process.pid), psutil.Process(client.engine)

        async def for_a_while(clients: int, span_s: float, done: Counter[str]) -> None:
            until = time.monotonic() + span_s
            await asyncio.gather(*(one_client(client, k, answers, until, done) for k in range(clients)))
            await client.idle()

        await for_a_while(CLIENTS, seconds / 5, Counter())
        pages = (await client.server.http.get("/v1/residency")).json()["pages"]
        before, began, done = (
            (server.memory_info().rss, engine.memory_info().rss),
            time.monotonic(),
            Counter[str](),
        )
        await for_a_while(CLIENTS, seconds, done)
        took = time.monotonic() - began
        after = server.memory_info().rss, engine.memory_info().rss
        figures = (await client.server.http.get("/v1/residency")).json()
        for seen in (
            pages,
            figures["pages"],
        ):  # a cached prefix is nobody's, and goes where room is asked for
            assert seen["kv"] == seen["reserved"] == 0
            seen["free"] += seen.pop("prefix")
        assert figures["pages"] == pages
        assert [entry["leases"] for entry in figures["adapters"]] == [0, 0]
        assert after[0] - before[0] < GROWTH_BYTES, (before, after)
        assert after[1] - before[1] < GROWTH_BYTES, (before, after)
        assert done["left"] > 0
        return {
            "seconds": round(took, 1),
            **done,
            "tokens_a_second": round(done["tokens"] / took),
            "server_mib": [round(before[0] / 2**20, 1), round(after[0] / 2**20, 1)],
            "engine_mib": [round(before[1] / 2**20, 1), round(after[1] / 2**20, 1)],
            "preemptions": figures["preemptions"],
        }


def test_many_clients_some_of_which_leave(tmp_path: Path) -> None:
    async def test() -> None:
        await soak(tmp_path, SOAK_S)

    run(test, limit_s=SOAK_S * 2 + 120)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(asyncio.run(soak(Path(folder), SOAK_S))) + "\n")
