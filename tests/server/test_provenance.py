"""What answered a request can be asked for by its id: digests, attempt, generations; by its tenant and by
admins.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.server.rig import BASE, BASE_ABI, Front, error_of, run

from loraplex.catalog.database import Database
from loraplex.catalog.requests import ProvenanceRecord, RequestLog
from loraplex.catalog.store import CatalogStore
from loraplex.core.errors import CapacityError, ErrorCode, InternalFault
from loraplex.core.messages import TokenBinding, Tokens
from loraplex.identity.binding import RequestBinding, SlotBinding
from loraplex.server import provenance
from loraplex.server.provenance import Attempts


async def ask(front: Front, request_id: str, **headers: str) -> Any:
    return await front.http.get(f"/v1/requests/{request_id}/provenance", headers=headers)


def test_an_adapter_answer_names_every_digest(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        adapter = (await front.http.put("/v1/adapters/a", json={"source": front.source("one")})).json()
        answer = await front.complete(model="a", n=2, seed=7)
        request_id = answer.headers["x-request-id"]
        found = (await ask(front, request_id)).json()
        assert found["base"] == BASE_ABI
        assert (found["artifact"], found["semantic"]) == (
            adapter["artifact_digest"],
            adapter["semantic_digest"],
        )
        assert found["kernel"] == adapter["semantic_digest"]  # the rig's adapters are their own images
        assert (found["model"], found["namespace"], found["tenant"]) == ("a@1", "default", "default")
        assert (found["attempt"], found["catalog_generation"], found["outcome"]) == (0, 1, "ok")
        assert (found["prompt_tokens"], found["output_tokens"]) == (
            answer.json()["usage"]["prompt_tokens"],
            answer.json()["usage"]["completion_tokens"],
        )
        assert [choice["finish_reason"] for choice in found["choices"]] == ["stop", "stop"]
        assert found["choices"][0]["seed"] == 7
        binding = RequestBinding(
            "default", request_id, 0, request_id, BASE_ABI, found["semantic"], found["policy"]
        )
        assert found["binding"] == binding.digest
        assert found["attempts"] == [{k: v for k, v in found.items() if k != "attempts"}]

    run(tmp_path, test)


def test_what_the_engine_bound_is_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = TokenBinding(5, 9, 3, 11, 40, 2, 0, 1)
    plain = Tokens

    def with_binding(*fields: Any) -> Tokens:
        return plain(*fields, binding=bound)

    monkeypatch.setattr("tests.server.rig.Tokens", with_binding)

    async def test(front: Front) -> None:
        await front.http.put("/v1/adapters/a", json={"source": front.source("one")})
        for model in ("a", BASE):
            answer = await front.complete(model=model)
            found = (await ask(front, answer.headers["x-request-id"])).json()
            (choice,) = found["choices"]
            assert choice["generations"] == {
                "catalog": "catalog:1",
                "request": "request:0",
                "slot": "slot:11",
                "pointer_table": "pointer_table:11",
                "plan": "plan:40",
                "cache": "cache:2",
                "rng": "rng:0",
            }
            slot = SlotBinding(0, "cpu", 3, 11, 11, found["semantic"] or "", found["kernel"] or "")
            assert choice["slot"] == (slot.digest if model == "a" else None)
            assert choice["admissions"] == 1

    run(tmp_path, test)


def test_attempts_streams_chats_and_failures(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        headers = {"x-request-id": "mine"}
        body = {"model": BASE, "prompt": "hi"}
        for _ in range(2):
            await front.http.post("/v1/completions", json=body, headers=headers)
        await front.http.post("/v1/completions", json=body | {"stream": True}, headers=headers)
        front.engine.fail_after = (0, ErrorCode.ENGINE_DIED)
        chat = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
        await front.http.post("/v1/chat/completions", json=chat, headers=headers)
        found = (await ask(front, "mine")).json()
        assert [record["attempt"] for record in found["attempts"]] == [3, 2, 1, 0]
        assert [record["outcome"] for record in found["attempts"]] == ["engine_died", "ok", "ok", "ok"]
        assert len({record["binding"] for record in found["attempts"]}) == 4
        assert (found["semantic"], found["artifact"], found["kernel"]) == (None, None, None)
        # What never reached the engine has no record.
        refused = await front.complete(model="nobody")
        missing = await ask(front, refused.headers["x-request-id"])
        assert error_of(missing) == (404, "request_not_found", "request_id")

    run(tmp_path, test)


def test_a_record_is_its_tenants_and_the_operators(tmp_path: Path) -> None:
    keys = {"acme": ("acme", "user"), "globex": ("globex", "admin"), "ops": ("default", "admin")}
    file = tmp_path / "keys"
    file.write_text(
        "\n".join(
            json.dumps({"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant, "role": role})
            for name, (tenant, role) in keys.items()
        )
    )

    async def test(front: Front) -> None:
        headers = {"authorization": "Bearer acme"}
        answer = await front.http.post(
            "/v1/completions", json={"model": BASE, "prompt": "hi"}, headers=headers
        )
        request_id = answer.headers["x-request-id"]
        for flushed in (False, True):
            if flushed:
                await front.provenance.flush()
            statuses = {
                name: (await ask(front, request_id, authorization=f"Bearer {name}")).status_code
                for name in keys
            }
            assert statuses == {"acme": 200, "globex": 404, "ops": 200}
        assert (await ask(front, request_id)).status_code == 401

    run(tmp_path, test, api_key_file=str(file))


def record(request_id: str, at_ms: int = 0) -> ProvenanceRecord:
    digest = "d" * 64
    return ProvenanceRecord(
        request_id,
        "default",
        0,
        at_ms,
        "m",
        None,
        digest,
        None,
        None,
        None,
        digest,
        digest,
        0,
        "ok",
        1,
        1,
        (),
    )


def test_records_are_bounded_by_age_and_number() -> None:
    log = RequestLog(Database(), max_records=5, max_age_s=10)
    log.write([record(f"r{n}", at_ms=n * 1000) for n in range(12)])
    assert log.prune(now_ms=19_000) == 9
    assert [n for n in range(12) if log.find(f"r{n}")] == [9, 10, 11]
    log.write([record("again", 20_000), record("again", 20_001)])
    assert [r.at_ms for r in log.find("again")] == [20_001, 20_000]
    assert log.prune(now_ms=19_000) == 0


def test_a_damaged_record_is_refused() -> None:
    database = CatalogStore.open().database
    log = RequestLog(database)
    for name, statement in (
        ("unsealed", "UPDATE requests SET seal = 'x' WHERE request_id = 'unsealed'"),
        ("changed", "UPDATE requests SET record = replace(record, 'ok', 'ko') WHERE request_id = 'changed'"),
        ("moved", "UPDATE requests SET request_id = 'elsewhere' WHERE request_id = 'moved'"),
    ):
        log.write([record(name)])
        with database.writing() as connection:
            connection.execute(text(statement))
        with pytest.raises(InternalFault) as caught:
            log.find("elsewhere" if name == "moved" else name)
        assert caught.value.code is ErrorCode.CATALOG_RECORD_INVALID


def test_a_catalog_that_does_not_answer_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(front: Front) -> None:
        broken = asyncio.Event()

        def refuse(records: Any) -> None:
            broken.set()
            raise CapacityError(ErrorCode.CATALOG_UNAVAILABLE, "the disk is full")

        write = front.provenance.log.write
        front.provenance.log.write = refuse  # type: ignore[method-assign]
        monkeypatch.setattr("loraplex.core.limits.MAX_UNWRITTEN_RECORDS", 2)
        answers = [await front.complete() for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        await broken.wait()
        assert front.provenance.lost == 2
        front.provenance.log.write = write  # type: ignore[method-assign]
        await front.provenance.close()
        for answer, kept in zip(answers, (True, True, False, False), strict=True):
            assert bool(front.provenance.log.find(answer.headers["x-request-id"])) is kept

    run(tmp_path, test)


def test_a_batch_that_is_being_written_at_the_end_is_written_once(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        loop, began, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        write = front.provenance.log.write

        def slow(records: Any) -> None:
            loop.call_soon_threadsafe(began.set)
            release.wait()
            write(records)

        front.provenance.log.write = slow  # type: ignore[method-assign]
        answer = await front.complete()
        await began.wait()
        closing = asyncio.ensure_future(front.provenance.close())
        for _ in range(5):
            await asyncio.sleep(0)
        release.set()
        await closing
        assert len(front.provenance.log.find(answer.headers["x-request-id"])) == 1

    run(tmp_path, test)


def test_the_number_of_attempts_remembered_is_bounded() -> None:
    attempts = Attempts(size=2)
    assert [attempts.next("t", name) for name in ("a", "a", "b", "c", "a")] == [0, 1, 0, 0, 0]
    assert attempts.next("other", "a") == 0
    assert provenance.BATCH > 1
