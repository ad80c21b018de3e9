"""Lists of adapters a page at a time, and what a tenant sees of an adapter that it shares by its bytes with
another.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.server.rig import Front, error_of, run

from loraplex.adapters.preparation import require_own_base
from loraplex.adapters.prepare import PreparedAdapter
from loraplex.artifact.notes import Note, NoteKind
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.messages import Inspect

KEYS = {"operator": ("default", "admin"), "acme": ("acme", "admin"), "globex": ("globex", "admin")}


def key_file(folder: Path) -> str:
    lines = [
        json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "role": role})
        for key, (tenant, role) in KEYS.items()
    ]
    path = folder / "keys"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_list_comes_in_pages_and_asks_the_engine_for_its_page_alone(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        names = [f"a{number}" for number in range(7)]
        for name in names:
            await front.http.put(f"/v1/adapters/{name}", json={"source": front.source(name)})
        front.engine.sent.clear()
        seen: list[str] = []
        query = "limit=3"
        while True:
            page = (await front.http.get(f"/v1/adapters?{query}")).json()
            seen += [item["alias"] for item in page["data"]]
            assert len(page["data"]) <= 3
            if not page["has_more"]:
                break
            query = f"limit=3&after={seen[-1]}"
        assert seen == names
        assert [len(message.keys) for message in front.engine.of(Inspect)] == [3, 3, 1]
        assert [m["id"] for m in (await front.http.get("/v1/models")).json()["data"]][1:] == names
        for wrong, param in (
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("limit=x", "limit"),
            ("limit=1&limit=2", "limit"),
            ("page=2", "page"),
            ("%ff", None),
            ("&&", None),
        ):
            assert error_of(await front.http.get(f"/v1/adapters?{wrong}")) == (400, "invalid_request", param)

    run(tmp_path, test)


def test_a_tenant_sees_its_own_pins_and_requests_of_what_it_shares(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        def headers(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        async def get(key: str, path: str) -> Any:
            return (await front.http.get(path, headers=headers(key))).json()

        source = front.source("same")
        for key in ("acme", "globex"):
            put = await front.http.put("/v1/adapters/a", json={"source": source}, headers=headers(key))
            assert put.status_code == 201
        await front.http.post("/v1/adapters/a/pin", headers=headers("globex"))
        figures = front.engine.figures

        def busy() -> dict[str, Any]:
            answer = figures()
            for entry in answer["adapters"]:
                entry |= {"state": "active", "leases": 3, "pinned": True, "pins": 1, "slot_leases": 3}
            return answer

        front.engine.figures = busy  # type: ignore[method-assign]
        async with front.adapters.serving("a", "globex"):
            mine, theirs = await get("acme", "/v1/adapters/a"), await get("globex", "/v1/adapters/a")
            assert (mine["state"], mine["leases"], mine["pinned"]) == ("idle", 0, False)
            assert (theirs["state"], theirs["leases"], theirs["pinned"]) == ("active", 1, True)
            (listed,) = (await get("acme", "/v1/adapters"))["data"]
            assert (listed["leases"], listed["pinned"]) == (0, False)
            residency = await get("acme", "/v1/residency")
            (entry,) = residency["adapters"]
            assert (entry["state"], entry["leases"], entry["pinned"]) == ("idle", 0, False)
            assert not {"pins", "slot_leases", "slot"} & set(entry)
            assert residency["requests"] == {"live": 0}
            assert set(residency) == {
                "pages",
                "limits",
                "requests",
                "tenants",
                "adapters",
                "catalog_generation",
            }
            assert (await get("globex", "/v1/residency"))["requests"] == {"live": 1}
            (entry,) = (await get("operator", "/v1/residency"))["adapters"]
            assert (entry["state"], entry["leases"], entry["pinned"]) == ("active", 3, True)

    run(tmp_path, test, api_key_file=key_file(tmp_path))


def test_what_an_adapter_is_served_in_spite_of_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = Note(NoteKind.OTHER_BASE, "its configuration names another model")

    async def test(front: Front) -> None:
        prepare = front.adapters._life._prepare
        notes: tuple[Note, ...] = (note,)

        async def noting(source: str, content: str | None = None) -> PreparedAdapter:
            return replace(await prepare(source), notes=notes)

        front.adapters._life._prepare = noting
        said = [{"kind": "other_base", "message": note.message}]
        put = await front.http.put("/v1/adapters/a", json={"source": front.source("a")})
        assert put.json()["notes"] == said
        assert (await front.http.get("/v1/adapters")).json()["data"][0]["notes"] == said
        assert note.message in caplog.text
        notes = ()
        again = await front.http.put("/v1/adapters/a", json={"source": front.source("a")})
        assert again.json()["notes"] == []

    run(tmp_path, test)


def test_a_strict_base_refuses_what_names_another_one(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        prepared = await front.adapters._life._prepare(front.source("a"))
        require_own_base(prepared)
        require_own_base(replace(prepared, notes=(Note(NoteKind.CHAT_TEMPLATE, "it has its own"),)))
        for kind in (NoteKind.OTHER_BASE, NoteKind.OTHER_BASE_REVISION):
            with pytest.raises(CallerError) as caught:
                require_own_base(replace(prepared, notes=(Note(kind, "it is another's"),)))
            assert caught.value.code is ErrorCode.ADAPTER_BASE_MISMATCH

    run(tmp_path, test)
