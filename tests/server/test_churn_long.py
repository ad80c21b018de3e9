"""Two hundred adapters over host memory for eighty and a pool for twenty, swapped, cancelled and asked for in
Zipf's proportions.

A whole server with the real engine over a tiny model. Every answer is compared with what its own revision
gives when it is served alone; every error is a typed refusal; pages return exactly. LORAPLEX_CHURN_S sets the
length.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.model.tiny import VOCAB, save
from tests.server.processes import Running, started
from tests.server.random_adapters import write_adapter
from tests.waiting import pause, run

from loraplex import LLM, SamplingParams
from loraplex.api import RequestOutput
from loraplex.core.limits import MAX_LISTED
from loraplex.process.engine_process import BUILDER

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

SECONDS = float(os.environ.get("LORAPLEX_CHURN_S", "20"))
ALIASES, SPARES, HOSTED, RESIDENT = 200, 40, 80, 20
CLIENTS = 12
LEAVING = 0.1
CLOSE = 1e-4
"""How near the two best tokens of a float32 model must be for a differing token to be a tie."""
REFUSALS = {"pool_exhausted", "queue_full", "adapter_load_failed", "host_memory_exhausted"}


class Churn:
    """What the clients did and saw. answers: (semantic digest, prompt, tokens), complete or not."""

    def __init__(self, server: Running, aliases: list[str], spares: list[Path]) -> None:
        self.server, self.aliases, self.spares = server, aliases, spares
        self.answers: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.ends: Counter[str] = Counter()
        self.swaps: Counter[str] = Counter()
        self.sources: dict[str, str] = {}
        self.over = False

    async def client(self, number: int) -> None:
        """Ask for adapters in Zipf's proportions until told to stop; leave some streams early."""
        chance = random.Random(number)
        rng = np.random.default_rng(number)
        while not self.over:
            alias = self.aliases[int(rng.zipf(1.2)) % len(self.aliases)]
            prompt = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 24))]
            count = chance.randrange(1, 20)
            leave = chance.randrange(0, count) if chance.random() < LEAVING else None
            await self.ask(alias, prompt, count, leave)

    async def ask(self, alias: str, prompt: list[int], count: int, leave_after: int | None) -> None:
        body = {
            "model": alias,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        seen: list[int] = []
        async with self.server.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                self.ends[error["code"]] += 1
                return
            digest = answer.headers["x-loraplex-semantic-digest"]
            ended = "left"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        ended = event["error"]["code"]
                        break
                    seen.extend(event["choices"][0]["token_ids"])
                    ended = event["choices"][0]["finish_reason"] or ended
                if leave_after is not None and len(seen) > leave_after:
                    break
        self.ends[ended] += 1
        assert ended != "length" or len(seen) == count
        self.answers.append((digest, tuple(prompt), tuple(seen)))

    async def swapper(self) -> None:
        """Swap an alias each second; what it stood for becomes another alias's next revision."""
        chance = random.Random(0)
        turn = 0
        while not self.over:
            alias = self.aliases[chance.randrange(20)]  # the popular ones
            source = self.spares[turn % len(self.spares)]
            turn += 1
            answer = await self.server.http.put(f"/v1/adapters/{alias}", json={"source": str(source)})
            value = answer.json()
            self.swaps["done" if answer.status_code == 200 else value["error"]["code"]] += 1
            if answer.status_code == 200:
                self.sources[value["semantic_digest"]] = str(source)
            await asyncio.sleep(1)

    async def run(self, seconds: float) -> None:
        work = [asyncio.ensure_future(self.client(k)) for k in range(CLIENTS)]
        work.append(asyncio.ensure_future(self.swapper()))
        await asyncio.sleep(seconds)
        self.over = True
        await asyncio.gather(*work)


def check_answer(output: RequestOutput, seen: tuple[int, ...]) -> None:
    """Equal up to ties: a differing token ends the comparison, and only where the two best are that close."""
    assert output.logprobs is not None
    for position, (token, wanted) in enumerate(zip(seen, output.token_ids, strict=False)):
        if token != wanted:
            scores = output.logprobs[position]
            assert token in scores, f"token {position}: {token}, expected one of {scores}"
            assert scores[wanted] - scores[token] < CLOSE
            return


def sizes(model: Path, folder: Path) -> tuple[float, float, int]:
    """GiB of a pool for RESIDENT adapters of the largest kind and 60 KV pages, GiB of HOSTED images; the
    pool's pages.
    """
    with LLM(model, {"a": folder}, dtype="float32", pool_gb=0.01) as llm:
        figures = llm.inspect()
    each, page_gb = (
        int(figures["adapters"][0]["page_count"]),
        float(figures["pages"]["page_bytes"]) / (1 << 30),
    )
    pages = 1 + RESIDENT * each + 60
    return (pages + 0.5) * page_gb, HOSTED * each * page_gb, pages - 1


async def figures_of(server: Running) -> dict[str, Any]:
    return dict((await server.http.get("/v1/residency")).json())


async def idle(server: Running) -> dict[str, Any]:
    while True:
        figures = await figures_of(server)
        loads = figures["loads"]
        if not figures["requests"]["live"] and not loads["under_way"] and not loads["wanted"]:
            return figures
        await pause()


def test_two_hundred_adapters_over_a_pool_of_twenty(tmp_path: Path) -> None:
    model = tmp_path / "base"
    save("llama", model)
    served, spare = tmp_path / "served", tmp_path / "served" / "spare"
    aliases = [f"a{k:03}" for k in range(ALIASES)]
    folders = [write_adapter(served / alias, seed) for seed, alias in enumerate(aliases)]
    spares = [write_adapter(spare / f"s{k}", 1000 + k) for k in range(SPARES)]
    pool, host, pages = sizes(model, folders[5])

    async def test() -> None:
        options = {
            "model": str(model),
            "dtype": "float32",
            "pool_gb": pool,
            "host_gb": host,
            "adapter_dirs": [str(served)],
        }
        async with started(tmp_path, BUILDER, "real", **options) as server:
            await server.until_said("ready on")
            churn = Churn(server, aliases, spares)
            listed: list[dict[str, Any]] = []
            while len(listed) < ALIASES:  # the start waits for the first folders alone
                await pause()
                listed = (await server.http.get(f"/v1/adapters?limit={MAX_LISTED}")).json()["data"]
            assert len(listed) == ALIASES
            churn.sources = {item["semantic_digest"]: item["source"] for item in listed}
            await churn.run(SECONDS)
            figures = await idle(server)
            print(
                json.dumps(
                    {
                        "answers": len(churn.answers),
                        "ends": churn.ends,
                        "swaps": churn.swaps,
                        "loads": figures["loads"],
                        "host": figures["host"],
                        "preemptions": figures["preemptions"],
                    }
                )
            )
            assert set(churn.ends) <= {"length", "left"} | REFUSALS
            assert churn.ends["length"] > 10 * SECONDS / 20
            assert set(churn.swaps) <= {"done"} | REFUSALS
            assert churn.swaps["done"]
            counts = figures["pages"]
            assert (counts["kv"], counts["reserved"], counts["total"]) == (0, 0, pages)
            resident = [a for a in figures["adapters"] if a["device_pages"]]
            held = sum(a["device_pages"] for a in resident) + figures["slabs"]["pages"]
            assert counts["free"] + counts["prefix"] + held == pages
            for alias in aliases:
                assert (await server.http.delete(f"/v1/adapters/{alias}")).status_code == 200
            while (await figures_of(server))["adapters"]:
                await pause()
            emptied = await figures_of(server)
            assert emptied["pages"]["free"] + emptied["pages"]["prefix"] == pages
            assert emptied["host"]["used_bytes"] == 0
            judge(churn)

    def judge(churn: Churn) -> None:
        by_digest: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for digest, prompt, seen in churn.answers:
            if seen:
                by_digest.setdefault(digest, []).append((prompt, seen))
        with LLM(model, {}, dtype="float32", pool_gb=0.05) as llm:
            for digest, asked in by_digest.items():
                added = llm.add_adapter("one", churn.sources[digest])
                assert added["semantic_digest"] == digest
                for prompt, seen in asked:
                    params = SamplingParams(
                        max_tokens=len(seen), temperature=0.0, ignore_eos=True, logprobs=3
                    )
                    [output] = llm.generate([list(prompt)], "one", params)
                    check_answer(output, seen)
                llm.remove_adapter("one")

    run(test, limit_s=600 + 12 * SECONDS)
