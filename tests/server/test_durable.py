"""Servers as processes over a durable catalog: killed and started again, two at once, over SQLite and
PostgreSQL.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.catalog import postgres
from tests.server.processes import Running, started
from tests.server.tiny_server import write_adapter, write_model
from tests.text.tiny_text import byte_tokenizer, write_folder
from tests.waiting import pause, run

from loraplex import cli
from loraplex.catalog.database import Database
from loraplex.catalog.requests import RequestLog

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def server(tmp_path: Path, catalog: str, **fields: Any) -> AsyncIterator[Running]:
    """A server over the tiny model that takes adapters from `adapters/`."""
    if not (tmp_path / "tiny").exists():
        write_folder(write_model(tmp_path / "tiny"), byte_tokenizer())
        (tmp_path / "adapters").mkdir()
    roots = [str(tmp_path / "adapters")] if "adapter_dirs" not in fields else fields.pop("adapter_dirs")
    async with started(
        tmp_path, application="real", catalog=catalog, adapter_dirs=roots, **fields
    ) as running:
        yield running


def source(tmp_path: Path, name: str, seed: int) -> str:
    # Not listed by --adapter-dir: its subfolders are, theirs are not.
    return str(write_adapter(tmp_path / "adapters" / "kept" / name, seed=seed))


async def put(running: Running, alias: str, folder: str) -> dict[str, Any]:
    answer = await running.http.put(f"/v1/adapters/{alias}", json={"source": folder})
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json())


async def ask(running: Running, model: str) -> tuple[int, dict[str, Any], str]:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4}
    answer = await running.http.post("/v1/completions", json=body)
    return answer.status_code, answer.json(), answer.headers["x-request-id"]


def test_a_killed_server_comes_back_with_its_catalog(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = f"sqlite:///{tmp_path / 'catalog.db'}"

    async def test() -> None:
        write_adapter(tmp_path / "line", seed=9)
        async with server(tmp_path, catalog, adapters=[["line", str(tmp_path / "line")]]) as first:
            await first.until_said("ready on")
            await put(first, "a", source(tmp_path, "one", 1))
            second = await put(first, "a", source(tmp_path, "two", 2))
            await put(first, "gone", source(tmp_path, "three", 3))
            await first.http.delete("/v1/adapters/gone")
            await put(first, "line", source(tmp_path, "four", 4))
            status, answer, request_id = await ask(first, "a")
            assert status == 200
            # The record is written behind the answer: ask until the database has it, then kill.
            while not recorded(catalog, request_id):
                await pause()
            os.kill(first.process.pid, signal.SIGKILL)
            await first.process.wait()
        async with server(tmp_path, catalog, adapters=[["line", str(tmp_path / "line")]]) as again:
            await again.until_said("catalog at generation 6, 2 adapters")
            await again.until_said("ready on")
            models = [m["id"] for m in (await again.http.get("/v1/models")).json()["data"]]
            assert models == ["tiny", "a", "line"]
            status, same, _ = await ask(again, "a@2")
            assert (status, same["choices"]) == (200, answer["choices"])
            assert same["system_fingerprint"] == answer["system_fingerprint"]
            assert (await again.http.get("/v1/adapters/a")).json()["semantic_digest"] == second[
                "semantic_digest"
            ]
            assert (await again.http.get("/v1/adapters/line")).json()["revision"] == 2
            assert (await ask(again, "gone"))[0] == 404
            assert (await put(again, "gone", source(tmp_path, "five", 5)))["revision"] == 2
            record = (await again.http.get(f"/v1/requests/{request_id}/provenance")).json()
            assert (record["model"], record["semantic"]) == ("a@2", second["semantic_digest"])
            assert record["artifact"] == second["artifact_digest"]
            await asyncio.to_thread(cli.provenance, request_id, url=again.url)
            assert json.loads(capsys.readouterr().out) == record

    run(test)
    with pytest.raises(SystemExit) as ended:
        cli.main(["catalog", "check", "--catalog", catalog])
    assert ended.value.code == 0
    assert "0 problems" in capsys.readouterr().out


def recorded(catalog: str, request_id: str) -> bool:
    """Whether the catalog's database has the record of a request."""
    database = Database(catalog)
    try:
        return bool(RequestLog(database).find(request_id))
    finally:
        database.close()


def test_two_servers_on_one_postgresql_see_each_other(tmp_path: Path) -> None:
    async def test() -> None:
        with postgres.running() as url:
            async with server(tmp_path, url) as one, server(tmp_path, url) as two:
                await one.until_said("ready on")
                await two.until_said("ready on")
                first = await put(one, "a", source(tmp_path, "one", 1))
                status, answer, request_id = await ask(two, "a")
                assert status == 200
                assert answer["system_fingerprint"] == f"a@1:{first['semantic_digest'][:16]}"
                swapped = await put(two, "a", source(tmp_path, "two", 2))
                conflict = await one.http.put(
                    "/v1/adapters/a", json={"source": source(tmp_path, "three", 3), "expected_revision": 1}
                )
                assert conflict.status_code == 409
                served = ""
                while served != f"a@2:{swapped['semantic_digest'][:16]}":
                    await pause()
                    served = (await ask(one, "a"))[1]["system_fingerprint"]
                await one.http.delete("/v1/adapters/a")
                status = 200
                while status == 200:
                    await pause()
                    status = (await ask(two, "a"))[0]
                assert status == 404
                # A record is written by the server that answered and read by either.
                found = 404
                while found == 404:
                    await pause()
                    found = (await one.http.get(f"/v1/requests/{request_id}/provenance")).status_code
                assert found == 200

    run(test)
