"""Adapters over HTTP: vLLM's calls, our own, what is served under which name, and who may change it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.rig import BASE, Front, error_of, run

from loraplex.core.errors import CallerError, CapacityError, ErrorCode
from loraplex.core.messages import RegisterAdapter, RemoveAdapter, Submit
from loraplex.server.auth import read_keys

FIELDS = {
    "alias", "revision", "artifact_digest", "semantic_digest", "method", "ranks", "targets",
    "tensors_applied",
    "tensors_total", "state", "tier_bytes", "leases", "pinned", "generation", "source", "notes", "text",
    "chat_suffix",
    "invocation_tokens", "shares",
}  # fmt: skip


async def put(front: Front, alias: str, source: str, **more: Any) -> Any:
    return await front.http.put(f"/v1/adapters/{alias}", json={"source": source, **more})


def test_register_describe_serve_and_remove(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        response = await put(front, "a", front.source("one"))
        body = response.json()
        assert (response.status_code, set(body)) == (201, FIELDS)
        assert (body["alias"], body["revision"], body["state"]) == ("a", 1, "idle")
        assert body["tier_bytes"] == {"device": 8192, "host": 1000}
        assert (await front.http.get("/v1/adapters/a")).json() == body
        assert (await front.http.get("/v1/adapters")).json()["data"] == [body]
        for name in ("a", "a@1"):
            answer = await front.complete(model=name)
            assert answer.json()["system_fingerprint"] == f"a@1:{body['semantic_digest'][:16]}"
            assert answer.headers["x-loraplex-model"] == "a@1"
            assert answer.headers["x-loraplex-semantic-digest"] == body["semantic_digest"]
            assert front.engine.of(Submit)[-1].adapter == body["semantic_digest"]
        assert error_of(await front.complete(model="a@2")) == (404, "model_not_found", "model")
        residency = (await front.http.get("/v1/residency")).json()
        assert [entry["names"] for entry in residency["adapters"]] == [["a@1"]]
        assert (await front.http.delete("/v1/adapters/a")).json()["deleted"] is True
        assert error_of(await front.complete(model="a"))[:2] == (404, "model_not_found")
        assert error_of(await front.http.delete("/v1/adapters/a"))[:2] == (404, "adapter_not_found")
        await front.adapters.settled()
        assert front.engine.resident == {}

    run(tmp_path, test)


def test_models_have_parent_and_root(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        source = front.source("one")
        await put(front, "team%2Fa", source)
        models = await front.openai.models.list()
        shown = [(m.id, m.model_dump()["parent"], m.model_dump()["root"]) for m in models.data]
        assert shown == [(BASE, None, BASE), ("team/a", BASE, source)]
        assert (await front.openai.models.retrieve("team/a")).id == "team/a"
        assert (await front.http.get("/v1/models/team%2Fa@1")).json()["id"] == "team/a@1"
        assert (await front.http.get("/v1/adapters/team%2Fa")).json()["alias"] == "team/a"

    run(tmp_path, test)


def test_swap_by_compare_and_set(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await put(front, "a", front.source("one"))
        first = (await front.http.get("/v1/adapters/a")).json()
        response = await put(front, "a", front.source("two"), expected_revision=1)
        assert (response.status_code, response.json()["revision"]) == (200, 2)
        await front.adapters.settled()
        assert set(front.engine.resident) == {response.json()["semantic_digest"]}
        conflict = await put(front, "a", front.source("one"), expected_revision=1)
        assert error_of(conflict) == (409, "adapter_revision_conflict", "expected_revision")
        assert error_of(await put(front, "b", front.source("one"), expected_revision=1))[:2] == (
            404,
            "adapter_not_found",
        )
        assert front.engine.of(RemoveAdapter)[0].key == first["semantic_digest"]

    run(tmp_path, test)


def test_a_superseded_revision_is_served_by_its_number_as_long_as_its_source_has_it(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        source = front.source("one")
        first = (await put(front, "a", source)).json()
        second = (await put(front, "a", front.source("two"))).json()
        await front.adapters.settled()
        assert set(front.engine.resident) == {second["semantic_digest"]}
        for _ in range(2):
            answer = await front.complete(model="a@1")
            assert answer.status_code == 200
            assert answer.headers["x-loraplex-model"] == "a@1"
            assert answer.headers["x-loraplex-semantic-digest"] == first["semantic_digest"]
            await front.adapters.settled()  # it leaves with the last request that names it
            assert set(front.engine.resident) == {second["semantic_digest"]}
        assert (await front.http.get("/v1/models/a@1")).json()["id"] == "a@1"
        assert (await front.complete(model="a")).headers["x-loraplex-model"] == "a@2"
        for name in ("a@0", "a@3", "a@01", "a@-1", "a@1.0", "a@", "a@x", "a@" + "9" * 40, "b@1", "a@\u0661"):
            assert error_of(await front.complete(model=name))[:2] == (404, "model_not_found"), name
        assert front.source("one", "other bytes") == source
        assert error_of(await front.complete(model="a@1"))[1] == "adapter_source_changed"
        assert (await front.complete(model="a")).status_code == 200

    run(tmp_path, test)


def test_a_revision_that_was_revoked_or_removed_is_not_served_by_its_number(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for text in ("one", "two", "three"):
            await put(front, "a", front.source(text))
        await put(front, "b", front.source("one"))
        assert (await front.http.post("/v1/adapters/b/revoke")).status_code == 200
        assert error_of(await front.complete(model="a@1"))[1] == "adapter_revoked"
        assert (await front.complete(model="a@2")).status_code == 200
        await front.http.delete("/v1/adapters/a")
        assert error_of(await front.complete(model="a@2"))[:2] == (404, "model_not_found")
        assert (await put(front, "a", front.source("four"))).json()["revision"] == 4
        refused = await front.complete(
            model="a@2"
        )  # the removal took it away, also from the name that came back
        assert error_of(refused)[:2] == (404, "model_not_found")
        assert "superseded or removed" in refused.json()["error"]["message"]
        assert (await front.complete(model="a@4")).status_code == 200

    run(tmp_path, test)


def test_a_swap_waits_for_requests_bound_to_the_old_revision(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await put(front, "a", front.source("one"))
        front.engine.hold.clear()
        waiting = asyncio.ensure_future(front.complete(model="a"))
        await front.engine.submitted.wait()
        assert (await put(front, "a", front.source("two"))).status_code == 200
        assert front.engine.of(RemoveAdapter) == []
        front.engine.hold.set()
        answer = await waiting
        assert answer.json()["system_fingerprint"].startswith("a@1:")
        assert answer.json()["choices"][0]["text"] == "hello"
        await front.adapters.settled()
        assert len(front.engine.of(RemoveAdapter)) == 1

    run(tmp_path, test)


def test_a_failed_swap_leaves_the_old_one(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await put(front, "a", front.source("one"))
        front.engine.refuse = CapacityError(ErrorCode.POOL_EXHAUSTED, "no pages")
        refused = await put(front, "a", front.source("two"))
        assert error_of(refused)[:2] == (429, "pool_exhausted")
        assert "retry-after" in refused.headers
        missing = await put(front, "a", str(front.roots / "nothing"))
        assert error_of(missing) == (404, "adapter_source_missing", "source")
        assert (await front.complete(model="a")).json()["system_fingerprint"].startswith("a@1:")

    run(tmp_path, test)


def test_vllm_calls(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        load = {"lora_name": "a", "lora_path": front.source("one")}
        response = await front.http.post("/v1/load_lora_adapter", json=load)
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert error_of(await front.http.post("/v1/load_lora_adapter", json=load)) == (
            400,
            "adapter_exists",
            "lora_name",
        )
        assert error_of(await front.http.post("/v1/load_lora_adapter", json={**load, "lora_name": BASE}))[
            :2
        ] == (
            400,
            "adapter_exists",
        )
        assert error_of(await front.http.post("/v1/load_lora_adapter", json={"lora_name": "a"})) == (
            400,
            "invalid_request",
            "lora_path",
        )
        outside = {"lora_name": "b", "lora_path": "/etc"}
        assert error_of(await front.http.post("/v1/load_lora_adapter", json=outside)) == (
            403,
            "adapter_source_forbidden",
            "lora_path",
        )
        again = {**load, "lora_path": front.source("two"), "load_inplace": True}
        assert (await front.http.post("/v1/load_lora_adapter", json=again)).status_code == 200
        assert (await front.http.get("/v1/adapters/a")).json()["revision"] == 2
        response = await front.http.post(
            "/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": None}
        )
        assert (response.status_code, response.text) == (
            200,
            "Success: LoRA adapter 'a' removed successfully.",
        )
        assert error_of(await front.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})) == (
            404,
            "adapter_not_found",
            "lora_name",
        )

    run(tmp_path, test)


def test_sources_outside_the_roots_are_forbidden(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "weights").write_text("x")
        (front.roots / "link").symlink_to(outside)
        (tmp_path / "adapters-evil").mkdir()
        inside = front.source("one")
        (front.roots / "alias").symlink_to(inside)
        for source in (
            str(outside),
            str(front.roots / "link"),
            f"{inside}/../one",
            "one",
            str(tmp_path / "adapters-evil"),
            "/etc",
        ):
            assert error_of(await put(front, "a", source)) == (403, "adapter_source_forbidden", "source"), (
                source
            )
        assert error_of(await put(front, "a", "ftp://host/a"))[:2] == (400, "unsupported_option")
        assert error_of(await put(front, "a", "http://host/a"))[:2] == (403, "adapter_source_forbidden")
        assert (await put(front, "a", str(front.roots / "alias"))).json()["source"] == inside
        assert len(front.engine.of(RegisterAdapter)) == 1

    run(tmp_path, test)


def test_names_that_cannot_be(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert error_of(await front.http.post("/v1/adapters/b/pin"))[:2] == (404, "adapter_not_found")
        assert error_of(await front.http.post("/v1/adapters/b/sing"))[:2] == (404, "not_found")
        for name in ("a b", "a/", "a//b", "/a"):
            assert error_of(await put(front, name, front.source("one"))) == (
                400,
                "invalid_request",
                "alias",
            ), name

    run(tmp_path, test)


def test_keys_tenants_and_roles(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    rows = [("user-key", "blue", "user"), ("admin-key", "red", "admin")]
    file.write_text(
        "\n".join(
            json.dumps({"sha256": hashlib.sha256(k.encode()).hexdigest(), "tenant": t, "role": r})
            for k, t, r in rows
        )
    )

    async def test(front: Front) -> None:
        user, admin = ({"authorization": f"Bearer {key}"} for key in ("user-key", "admin-key"))
        response = await front.complete()
        assert error_of(response)[:2] == (401, "unauthenticated")
        assert response.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer nope", "Basic user-key", "user-key", ""):
            answer = await front.http.get("/v1/models", headers={"authorization": wrong})
            assert error_of(answer)[:2] == (401, "unauthenticated")
        body = {"model": BASE, "prompt": "hello"}
        assert (await front.http.post("/v1/completions", json=body, headers=user)).status_code == 200
        assert front.engine.of(Submit)[0].tenant == "blue"
        change = {"source": front.source("one")}
        assert error_of(await front.http.put("/v1/adapters/a", json=change, headers=user))[:2] == (
            403,
            "forbidden",
        )
        assert error_of(await front.http.delete("/v1/adapters/a", headers=user))[:2] == (403, "forbidden")
        assert (await front.http.put("/v1/adapters/a", json=change, headers=admin)).status_code == 201
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert (await front.http.get(path)).status_code == 200

    run(tmp_path, test, api_key_file=str(file))


def test_a_tenant_s_aliases_do_not_exist_for_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    rows = [("b", "blue", "admin"), ("u", "blue", "user"), ("r", "red", "admin"), ("o", "default", "admin")]
    file.write_text(
        "\n".join(
            json.dumps({"sha256": hashlib.sha256(k.encode()).hexdigest(), "tenant": t, "role": r})
            for k, t, r in rows
        )
    )

    async def test(front: Front) -> None:
        keys = {key: {"authorization": f"Bearer {key}"} for key in "buro"}

        async def ask(key: str, model: str) -> Any:
            body = {"model": model, "prompt": "hello"}
            return await front.http.post("/v1/completions", json=body, headers=keys[key])

        async def call(key: str, method: str, path: str, body: Any = None) -> Any:
            return await front.http.request(method, path, json=body, headers=keys[key])

        async def names(key: str) -> list[str]:
            data = (await call(key, "GET", "/v1/models")).json()["data"]
            listed = (await call(key, "GET", "/v1/adapters")).json()["data"]
            assert [entry["alias"] for entry in listed] == [entry["id"] for entry in data[1:]]
            return [entry["id"] for entry in data[1:]]

        assert (await call("o", "PUT", "/v1/adapters/all", {"source": front.source("0")})).status_code == 201
        assert (await call("b", "PUT", "/v1/adapters/mine", {"source": front.source("1")})).status_code == 201
        unknown = error_of(await ask("r", "nobody"))
        assert unknown[:2] == (404, "model_not_found")
        refused = await ask("r", "mine")
        assert error_of(refused)[:2] == (404, "model_not_found")
        message = (await ask("r", "mine@1")).json()["error"]["message"]
        assert message == "model 'mine@1' does not exist", "it must not say that somebody has one"
        for method, path, body in (
            ("GET", "/v1/adapters/mine", None),
            ("DELETE", "/v1/adapters/mine", None),
            ("POST", "/v1/adapters/mine/pin", None),
            ("PUT", "/v1/adapters/mine", {"source": front.source("1"), "expected_revision": 1}),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "mine"}),
        ):
            assert error_of(await call("r", method, path, body))[:2] == (404, "adapter_not_found"), path
        assert error_of(await call("r", "GET", "/v1/models/mine"))[:2] == (404, "model_not_found")
        assert [await names(key) for key in "buro"] == [["all", "mine"], ["all", "mine"], ["all"], ["all"]]
        residency = (await call("r", "GET", "/v1/residency")).json()["adapters"]
        assert [entry["names"] for entry in residency] == [["all@1"]]
        # One name, two tenants, two functions.
        made = await call("r", "PUT", "/v1/adapters/mine", {"source": front.source("2")})
        assert made.status_code == 201
        prints = [(await ask(key, "mine")).json()["system_fingerprint"] for key in "ur"]
        assert prints[0].startswith("mine@1:")
        assert prints[1] == f"mine@1:{made.json()['semantic_digest'][:16]}"
        assert prints[0] != prints[1]
        assert [(await ask(key, "all")).status_code for key in "buro"] == [200] * 4
        assert error_of(await call("r", "DELETE", "/v1/adapters/all"))[:2] == (403, "forbidden")
        assert error_of(await call("u", "DELETE", "/v1/adapters/mine"))[:2] == (403, "forbidden")
        assert (await call("r", "DELETE", "/v1/adapters/mine")).status_code == 200
        assert (await ask("u", "mine")).status_code == 200
        assert error_of(await ask("r", "mine"))[:2] == (404, "model_not_found")

    run(tmp_path, test, api_key_file=str(file))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"sha256": "' + "a" * 64 + '", "tenant": "a/b"}',
        "keys = 3",
        "[[keys]]\nsha256='ab'\ntenant='t'",
        '{"sha256": 1}',
        '{"x": 1}',
        "other = 1",
    ],
)
def test_bad_key_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(CallerError) as caught:
        read_keys(str(tmp_path / "keys"))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_toml_key_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    (tmp_path / "keys").write_text(f"[[keys]]\nsha256 = '{digest}'\ntenant = 't'\n")
    caller = read_keys(str(tmp_path / "keys")).identify([b"Bearer k"])
    assert (caller.tenant, caller.role) == ("t", "user")
    with pytest.raises(CallerError):
        read_keys(str(tmp_path / "missing"))


def test_a_key_is_its_bytes_and_is_sent_once(tmp_path: Path) -> None:
    keys = ("k", "ключ-é", "two words")
    lines = [f'{{"sha256": "{hashlib.sha256(key.encode()).hexdigest()}", "tenant": "t"}}' for key in keys]
    (tmp_path / "keys").write_text("\n".join(lines))
    ring = read_keys(str(tmp_path / "keys"))
    for key in keys:
        for scheme in (b"Bearer ", b"bearer ", b"BEARER  "):
            assert ring.identify([scheme + key.encode() + b" "]).tenant == "t"
    digest = hashlib.sha256(b"k").hexdigest().encode()
    for wrong in (
        [],
        [b""],
        [b"k"],
        [b"Bearer"],
        [b"Bearerk"],
        [b"Basic k"],
        [b"Bearer K"],
        [b"Bearer " + digest],
        [b"Bearer \xa0k\xa0"],
        [b"Bearer k\x85"],
        [b"Bearer \xff"],
        [b"Bearer k", b"Bearer k"],
        [b"Bearer x", b"Bearer k"],
    ):
        with pytest.raises(CallerError) as caught:
            ring.identify(wrong)
        assert caught.value.code is ErrorCode.UNAUTHENTICATED, wrong


def test_metrics_have_bounded_labels(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await put(front, "weird-name", front.source("one"))
        await front.complete(model="weird-name")
        await front.complete(foo=1)
        text = (await front.http.get("/metrics")).text
        assert 'loraplex_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
        assert 'loraplex_requests_total{endpoint="completions",outcome="refused"} 1.0' in text
        assert 'loraplex_pages{state="kv"} 2.0' in text
        assert "loraplex_output_tokens_total 2.0" in text
        assert "loraplex_time_to_first_token_seconds_count 1.0" in text
        assert "weird" not in text

    run(tmp_path, test)


def test_openapi_names_every_route(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        document = (await front.http.get("/openapi.json")).json()
        assert set(document["paths"]["/v1/adapters/{alias}"]) == {"get", "put", "delete"}
        assert "CompletionRequest" in document["components"]["schemas"]
        for path, operations in document["paths"].items():
            assert all(operation["summary"] for operation in operations.values()), path

    run(tmp_path, test)
