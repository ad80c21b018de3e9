"""Who does not read his answer is given up after a bounded time: his requests end, and nothing of his keeps a
revision.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.names import named
from tests.process import engines
from tests.server.processes import started
from tests.server.rig import Front, run
from tests.server.tiny_server import write_adapter
from tests.waiting import pause
from tests.waiting import run as run_bounded

from loraplex.core import limits
from loraplex.core.messages import RemoveAdapter
from loraplex.process.logs import FIELDS


class Unread:
    """The application's side of a connection whose client sent a request and takes only the first
    messages.
    """

    def __init__(self, body: dict[str, Any], takes: int) -> None:
        self._request: list[dict[str, Any]] = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._takes = takes
        self.sent: list[dict[str, Any]] = []
        self.full = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if not self._request:
            await asyncio.Event().wait()
        return self._request.pop()

    async def send(self, message: dict[str, Any]) -> None:
        if len(self.sent) >= self._takes:
            self.full.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    async def served(self, front: Front) -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await front.app(scope, self.receive, self.send)


@pytest.mark.parametrize("takes", [0, 1, 3])
def test_a_stream_that_nobody_reads_is_given_up_and_lets_go_of_its_revision(
    takes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_S", 0.01)

    async def test(front: Front) -> None:
        revision = await front.adapters.add(named("a"), front.source("one"))
        front.engine.script = lambda _: front.ids("h" * 150)
        connection = Unread({"model": "a", "prompt": "x", "max_tokens": 150, "stream": True}, takes)
        serving = asyncio.ensure_future(connection.served(front))
        await connection.full.wait()
        await front.adapters.remove(named("a"))
        await serving
        await front.adapters.settled()
        assert len(connection.sent) == takes
        assert [message.key for message in front.engine.of(RemoveAdapter)] == [revision.key]
        assert not front.service.exchanges

    with caplog.at_level(logging.INFO, logger="loraplex.access"):
        run(tmp_path, test)
    (line,) = [getattr(record, FIELDS) for record in caplog.records if record.name == "loraplex.access"]
    assert (line["outcome"], line["code"]) == ("aborted", "slow_client")


@pytest.mark.e2e
def test_a_drain_does_not_wait_for_who_does_not_read(tmp_path: Path) -> None:
    """The engine has answered everything; most of it lies with a client that reads nothing."""

    async def test() -> None:
        write_adapter(tmp_path / "adapters" / "one")
        async with started(
            tmp_path,
            engines.ECHO,
            "real",
            drain_s=200,
            log_level="warning",
            adapter_dirs=[str(tmp_path / "adapters")],
        ) as server:
            await server.until_said("ready on")
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
                fields = {"model": "one", "prompt": [70], "max_tokens": 400, "n": 100, "stream": True}
                body = json.dumps(fields | {"return_token_ids": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
                client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
                assert await asyncio.to_thread(client.recv, 12) == b"HTTP/1.1 200"
                while (await server.http.get("/v1/residency")).json()["requests"]["live"]:
                    await pause()
                server.process.send_signal(signal.SIGTERM)
                assert await server.process.wait() == 0
                assert server.process.stderr is not None
                assert b"were not taken" not in await server.process.stderr.read()

    run_bounded(test)
