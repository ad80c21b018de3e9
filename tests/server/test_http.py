"""The HTTP exchange itself: methods, bodies that are too long or too slow, probes, and what stands in the
log.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.server.rig import BASE, Front, error_of, run

from loraplex.core import limits
from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.process.logs import FIELDS
from loraplex.server import probes
from loraplex.server.exchange import Exchange
from loraplex.server.service import ServicePhase


def test_methods_of_a_path(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for method, path, allow in (
            ("GET", "/v1/completions", "OPTIONS, POST"),
            ("POST", "/health", "GET, HEAD, OPTIONS"),
            ("PATCH", "/v1/adapters/a", "DELETE, GET, HEAD, OPTIONS, PUT"),
            ("BREW", "/v1/models", "GET, HEAD, OPTIONS"),
        ):
            response = await front.http.request(method, path)
            assert error_of(response)[:2] == (405, "method_not_allowed"), path
            assert response.headers["allow"] == allow
            options = await front.http.options(path)
            assert (options.status_code, options.headers["allow"], options.content) == (204, allow, b"")
        assert (await front.http.head("/health")).status_code == 200
        assert (await front.http.head("/v1/models/nobody")).status_code == 404
        for path in ("/", "/v1", "/v1//models", "/health//", "/HEALTH"):
            assert error_of(await front.http.get(path))[:2] == (404, "not_found"), path
        assert error_of(await front.http.options("/nothing"))[:2] == (404, "not_found")

    run(tmp_path, test)


async def exchange(front: Front, messages: list[dict[str, Any]], headers: list[tuple[bytes, bytes]]) -> Any:
    """An exchange whose body comes as `messages`, and then no more of it."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for message in messages:
        queue.put_nowait(message)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await front.app(scope, queue.get, send)
    return sent


def answer_of(sent: list[Any]) -> httpx.Response:
    return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=sent[1]["body"])


JSON = (b"content-type", b"application/json")


def test_health_says_whether_there_is_an_engine_that_lives(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.service.phase = ServicePhase.STARTING
        response = await front.http.get("/health")
        assert error_of(response)[:2] == (503, "engine_unavailable")
        assert "starting" in response.json()["error"]["message"]
        for phase in (ServicePhase.OPEN, ServicePhase.DRAINING):
            front.service.phase = phase
            assert (await front.http.get("/health")).json() == {"status": "ok"}
            front.supervisor.ready = False
            assert error_of(await front.http.get("/health"))[:2] == (503, "engine_unavailable")
            front.supervisor.ready = True

    run(tmp_path, test)


def test_who_is_not_known_is_no_tenant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = {"sha256": hashlib.sha256(b"key").hexdigest(), "tenant": "blue"}
    (tmp_path / "keys").write_text(json.dumps(entry))

    async def test(front: Front) -> None:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "Bearer key"}):
            await front.http.get("/v1/models", headers=headers)
        await front.http.get("/nothing")
        await front.http.get("/health")

    with caplog.at_level(logging.DEBUG, logger="loraplex.access"):
        run(tmp_path, test, api_key_file=str(tmp_path / "keys"))
    assert [line.get("tenant") for line in lines(caplog)] == [None, None, "blue", None, None]


def test_a_body_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.01)

    async def test(front: Front) -> None:
        part = {"type": "http.request", "body": b'{"model": ', "more_body": True}
        response = answer_of(await exchange(front, [part], [JSON]))
        assert error_of(response)[:2] == (408, "request_timeout")
        assert response.headers["connection"] == "close"

    run(tmp_path, test)


def test_a_body_that_is_too_long_is_refused_while_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 100)

    async def test(front: Front) -> None:
        part = {"type": "http.request", "body": b" " * 60, "more_body": True}
        for messages, headers in (
            ([part, part], [JSON]),
            ([], [JSON, (b"content-length", b"101")]),
            ([part, part], [JSON, (b"content-length", b"99999999999999999999999")]),
        ):
            response = answer_of(await exchange(front, messages, headers))
            assert error_of(response)[:2] == (413, "request_too_large")
            assert response.headers["connection"] == "close"

    run(tmp_path, test)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/jsonx", "application/x-www-form-urlencoded", "json"]
)
def test_other_content_types_are_refused(tmp_path: Path, kind: str) -> None:
    async def test(front: Front) -> None:
        headers = {"content-type": kind} if kind else {}
        response = await front.http.post("/v1/completions", content=b"{}", headers=headers)
        assert error_of(response) == (400, "invalid_request", "content-type")

    run(tmp_path, test)


def test_json_s_content_type_has_many_spellings(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        body = f'{{"model": "{BASE}", "prompt": "hello"}}'.encode()
        for kind in ("application/json; charset=utf-8", "Application/JSON", " application/json ;x=y"):
            response = await front.http.post("/v1/completions", content=body, headers={"content-type": kind})
            assert response.status_code == 200, kind

    run(tmp_path, test)


def test_metrics_do_not_wait_for_an_engine_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "INSPECT_S", 0.01)

    async def test(front: Front) -> None:
        async def call(message: Any) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(front.engine, "call", call)
        response = await front.http.get("/metrics")
        assert response.status_code == 200
        assert "loraplex_ready 1.0" in response.text

    run(tmp_path, test)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        {"level": record.levelname, **getattr(record, FIELDS)}
        for record in caplog.records
        if record.name == "loraplex.access"
    ]


def test_one_line_a_request_probes_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(front: Front) -> None:
        await front.complete(prompt="a secret")
        await front.chat(foo=1)
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            await front.http.get(path)

    with caplog.at_level(logging.DEBUG, logger="loraplex.access"):
        run(tmp_path, test)
    found = lines(caplog)
    assert [line["level"] for line in found] == ["INFO", "INFO", "DEBUG", "DEBUG", "DEBUG", "INFO"]
    first = found[0]
    assert (first["status"], first["outcome"], first["model"], first["tenant"]) == (
        200,
        "ok",
        BASE,
        "default",
    )
    assert (first["prompt_tokens"] > 0, first["output_tokens"] > 0, first["stream"]) == (True, True, False)
    assert first["request_id"]
    assert (found[1]["status"], found[1]["code"]) == (400, "invalid_request")
    assert "secret" not in str(found)


def test_a_request_has_its_line_also_where_nobody_takes_its_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(front: Front) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise ConnectionResetError("the client is gone")

        scope = {"type": "http", "method": "GET", "path": "/nothing", "headers": []}
        with pytest.raises(ConnectionResetError):
            await front.app(scope, receive, send)

    with caplog.at_level(logging.INFO, logger="loraplex.access"):
        run(tmp_path, test)
    (line,) = lines(caplog)
    assert (line["status"], line["code"], line["path"]) == (404, "not_found", "/nothing")


def test_prompts_are_logged_only_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(front: Front) -> None:
        await front.complete(prompt="a secret")
        await front.chat()

    monkeypatch.setattr(limits, "MAX_LOGGED_PROMPT_CHARS", 20)
    with caplog.at_level(logging.INFO, logger="loraplex.access"):
        run(tmp_path, test, log_prompts=True)
    found = [line["prompt"] for line in lines(caplog)]
    assert found[0] == '["a secret"]'
    assert found[1] == '[{"role":"user","con', "a long one is cut"


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")], [(b"Content-Length", b"00")]])
def test_no_body_is_waited_for_where_none_was_announced(headers: list[tuple[bytes, bytes]]) -> None:
    """A server that is ending waits for nobody's body, and still answers those who ask how it is."""

    async def never() -> dict[str, Any]:
        raise AssertionError("nothing comes")

    async def late() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    async def test() -> None:
        exchange = Exchange({"method": "GET", "path": "/health", "headers": headers}, never, AsyncMock())
        exchange.hurry()
        assert await exchange.body_or_none() == b""
        for announced in ((b"content-length", b"1"), (b"transfer-encoding", b"chunked")):
            scope = {"method": "GET", "path": "/health", "headers": [announced]}
            exchange = Exchange(scope, late, AsyncMock())
            exchange.hurry()
            with pytest.raises(CapacityError) as caught:
                await exchange.body_or_none()
            assert caught.value.code is ErrorCode.SHUTTING_DOWN

    asyncio.run(test())
