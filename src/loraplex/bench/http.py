"""Streaming through the server alone: chunks a second to many clients, beside a bare granian application in
the same run.

The load comes from this process, which counts chunks and parses nothing. The server is measured twice:
flooded, where it joins tokens that arrive faster than it can send them, and paced, where every token is a
chunk of its own. Beside the rate stands the processor time of the server's own process for a token, which
other work on the machine moves less.

Specification: rulings "Dependencies".
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from loraplex.bench.http_target import TARGET_ANSWERS, TargetOrder
from loraplex.bench.http_traffic import used_s
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.process.child import BlockingChild

MODULE: Final = "loraplex.bench.http_target"
STOP_GRACE_S: Final = 20.0
"""A whole server ends its engine first."""
PACE: Final = 40
"""Steps a second of the paced engine."""
_CASES: Final = {"bare": ("bare", None), "flooded": ("whole", None), "paced": ("whole", PACE)}


@dataclass(frozen=True, slots=True)
class Row:
    """One case's figures, medians over the rounds. token_us: processor time of the server's process for a
    token.
    """

    case: str
    clients: int
    tokens_a_second: float
    chunks_a_second: float
    token_us: float
    rss_mib: float


def run_http(clients: int, tokens: int, rounds: int, say: Callable[[str], object]) -> list[Row]:
    """All cases by turns. clients: streams at a time; tokens: of each stream."""
    if min(clients, tokens, rounds) < 1:
        raise CallerError(ErrorCode.CONFIG_INVALID, "clients, tokens and rounds must be at least 1")
    seen: dict[str, list[Row]] = {case: [] for case in _CASES}
    for number in range(1, rounds + 1):
        for case, (kind, pace) in _CASES.items():
            size = tokens if pace is None else min(tokens, 10 * pace)
            say(f"round {number} of {rounds}: starting the {case} server")
            with _server(kind, size, pace) as (port, pid):
                asyncio.run(_load(case, port, pid, clients, min(size, 50)))  # warms caches
                row = asyncio.run(_load(case, port, pid, clients, size))
            seen[case].append(row)
            say(f"round {number}, {case}: {row.tokens_a_second:,.0f} tokens/s, {row.token_us:.1f} us each")
    return [_median(case, clients, rows) for case, rows in seen.items()]


def _median(case: str, clients: int, rows: list[Row]) -> Row:
    def middle(name: str) -> float:
        return median(getattr(row, name) for row in rows)

    return Row(
        case,
        clients,
        middle("tokens_a_second"),
        middle("chunks_a_second"),
        middle("token_us"),
        middle("rss_mib"),
    )


@contextmanager
def _server(kind: str, tokens: int, pace: int | None) -> Iterator[tuple[int, int]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    child = BlockingChild.start(MODULE, "the measured server")
    try:
        child.greet(TargetOrder(kind, port, tokens, pace), TARGET_ANSWERS)
        yield port, child.pid
    finally:
        child.stop(STOP_GRACE_S)


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


async def _load(case: str, port: int, pid: int, clients: int, tokens: int) -> Row:
    body = json.dumps(
        {"model": "tiny", "prompt": [70, 71], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(head.encode() + body)
        chunks, tail = 0, b""
        while part := await reader.read(1 << 18):
            chunks += (tail + part).count(b"data: {")
            tail = part[-6:]
        writer.close()
        return chunks

    before, began = used_s(pid), time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(clients)))
    took, used = time.perf_counter() - began, used_s(pid) - before
    chunks = sum(counts)
    if chunks < clients:
        raise CallerError(ErrorCode.INVALID_REQUEST, f"{clients} clients got {chunks} chunks of {case}")
    sent = chunks if case == "bare" else clients * tokens
    return Row(case, clients, sent / took, chunks / took, used / sent * 1e6, _rss_mib(pid))
