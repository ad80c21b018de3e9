"""Pins, prefetch, revocation, limits and draining swaps over HTTP: what the engine is asked, and what callers
hear.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
from tests.server.rig import Front, error_of, run

from loraplex.core import limits
from loraplex.core.messages import LoadAdapter, PinAdapter, PrefetchAdapter, RevokeAdapter, SetLimits
from loraplex.server.app import ROUTES, routes_of
from loraplex.server.openapi import BODIES


async def registered(front: Front, *aliases: str) -> None:
    for alias in aliases:
        answer = await front.http.put(f"/v1/adapters/{alias}", json={"source": front.source(alias)})
        assert answer.status_code == 201, answer.text


def test_actions(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await registered(front, "a", "b")
        for action, kind in (("pin", PinAdapter), ("unpin", PinAdapter), ("prefetch", PrefetchAdapter)):
            answer = await front.http.post(f"/v1/adapters/a/{action}")
            assert answer.status_code == 200, answer.text
            assert answer.json()["alias"] == "a"
            assert len(front.engine.of(kind)) >= 1
        assert [m.pinned for m in front.engine.of(PinAdapter)] == [True, False]
        revoked = await front.http.post("/v1/adapters/a/revoke")
        assert revoked.json() == {"alias": "a", "revoked": ["a@1"]}
        assert len(front.engine.of(RevokeAdapter)) == 1
        assert error_of(await front.http.get("/v1/adapters/a"))[:2] == (404, "adapter_not_found")
        again = await front.http.put("/v1/adapters/a", json={"source": front.source("a")})
        assert error_of(again)[:2] == (410, "adapter_revoked")
        assert error_of(await front.complete(model="a"))[:2] == (404, "model_not_found")

    run(tmp_path, test)


BODILESS = [
    ("POST", "/v1/adapters/a/pin"), ("POST", "/v1/adapters/a/unpin"), ("POST", "/v1/adapters/a/prefetch"),
    ("POST", "/v1/adapters/a/revoke"), ("DELETE", "/v1/adapters/a"), ("GET", "/v1/adapters/a"),
    ("GET", "/v1/adapters"),
    ("GET", "/v1/models"), ("GET", "/v1/models/a"), ("GET", "/v1/residency"), ("GET", "/v1/limits"),
    ("GET", "/v1/requests/r"),
    ("GET", "/v1/requests/r/provenance"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"),
    ("GET", "/openapi.json"), ("OPTIONS", "/v1/adapters/a"), ("GET", "/ping"), ("POST", "/ping"),
    ("GET", "/load"),
    ("GET", "/version"), ("GET", "/ui"), ("GET", "/ui/page.js"), ("GET", "/ui/events"),
]  # fmt: skip
JSON = {"content-type": "application/json"}


def test_a_body_where_none_belongs_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    bodies = {
        b'{"pinned": true}': "pinned", b'{"a": 1, "a": 2}': "a", b"{": None, b"\xff": None, b" ": None,
        b"null": None,
        b"[]": None, b'""': None, b"{} {}": None, b"[" * 100_000: None,
    }  # fmt: skip

    async def test(front: Front) -> None:
        await registered(front, "a")
        before = len(front.engine.sent)
        for method, path in BODILESS:
            for body, param in bodies.items():
                answer = await front.http.request(method, path, content=body, headers=JSON)
                assert error_of(answer) == (400, "invalid_request", param), (method, path, body[:20])
            typed = await front.http.request(
                method, path, content=b"{}", headers={"content-type": "text/plain"}
            )
            assert error_of(typed) == (400, "invalid_request", "content-type"), (method, path)
            long = await front.http.request(
                method, path, content=b" " * (limits.MAX_BODY_BYTES + 1), headers=JSON
            )
            assert error_of(long)[:2] == (413, "request_too_large"), (method, path)
        assert len(front.engine.sent) == before
        assert (await front.http.get("/v1/adapters/a")).json()["pinned"] is False

    run(tmp_path, test)


def test_an_empty_object_is_as_good_as_no_body(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await registered(front, "a", "b")
        for action in ("pin", "unpin", "prefetch", "revoke"):
            answer = await front.http.post(f"/v1/adapters/a/{action}", json={})
            assert answer.status_code == 200, answer.text
        assert (await front.http.request("GET", "/v1/models", json={})).status_code == 200
        assert (await front.http.request("DELETE", "/v1/adapters/b", json={})).status_code == 200
        assert error_of(await front.http.get("/v1/adapters/b"))[:2] == (404, "adapter_not_found")

    run(tmp_path, test)


def test_every_route_without_a_body_is_among_them() -> None:
    served = {(method, route.path) for _, path in BODILESS for method, (route, _) in routes_of(path).items()}
    without = {(route.method, route.path) for route in ROUTES} - BODIES.keys()
    assert without <= served


def test_a_tenant_does_not_revoke_what_others_name(tmp_path: Path) -> None:
    tenants = {"blue-key": "blue", "red-key": "red", "key": "default"}
    lines = [
        json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "role": "admin"})
        for key, tenant in tenants.items()
    ]
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))

    async def test(front: Front) -> None:
        async def call(key: str, method: str, path: str, body: object = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await front.http.request(method, f"/v1/adapters/{path}", json=body, headers=headers)

        same, own = {"source": front.source("same")}, {"source": front.source("own")}
        for key, alias, body in (
            ("key", "all", same),
            ("blue-key", "mine", same),
            ("red-key", "hers", same),
            ("red-key", "own", own),
        ):
            assert (await call(key, "PUT", alias, body)).status_code == 201
        refused = await call("blue-key", "POST", "mine/revoke")
        assert error_of(refused)[:2] == (403, "forbidden")
        assert "hers" not in refused.text
        assert front.engine.of(RevokeAdapter) == []
        assert (await call("red-key", "GET", "hers")).status_code == 200
        assert (await call("red-key", "POST", "own/revoke")).json() == {"alias": "own", "revoked": ["own@1"]}
        again = await call("red-key", "PUT", "own", own)
        assert error_of(again)[:2] == (410, "adapter_revoked")  # to whom revoked it
        assert [message.key for message in front.engine.of(RevokeAdapter)] != []
        assert (await call("blue-key", "PUT", "other", own)).status_code == 201  # not to others
        assert (await call("blue-key", "GET", "other")).json()["state"] != "absent"
        assert (await call("key", "POST", "all/revoke")).json() == {"alias": "all", "revoked": ["all@1"]}
        for key, alias in (("blue-key", "mine"), ("red-key", "hers")):
            assert error_of(await call(key, "GET", alias))[:2] == (404, "adapter_not_found")

    run(tmp_path, test, api_key_file=str(file))


def test_a_swap_asks_for_a_shadow_copy_unless_it_drains(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await registered(front, "a")
        for name, drain in (("two", False), ("three", True)):
            body = {"source": front.source(name), "drain": drain}
            assert (await front.http.put("/v1/adapters/a", json=body)).status_code == 200
            assert len(front.engine.of(LoadAdapter)) == 1

    run(tmp_path, test)


def test_limits_are_shown_and_changed(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        shown = (await front.http.get("/v1/limits")).json()
        assert set(shown) == {
            "pool_share",
            "adapter_pages",
            "pool_pages",
            "resident_adapters",
            "host_bytes",
            "over",
        }
        changed = await front.http.put("/v1/limits", json={"pool_share": 0.5, "host_gb": 1})
        assert changed.status_code == 200, changed.text
        assert front.engine.of(SetLimits) == [SetLimits(0, 4, None, 1 << 30)]
        for body in ({"pool_share": 2}, {"resident_adapters": -1}, {"host_gb": -1}, {"pages": 3}):
            assert error_of(await front.http.put("/v1/limits", json=body))[0] == 400

    run(tmp_path, test)
