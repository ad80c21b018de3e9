"""The operator's page: its files and their policy; its stream, which shows each viewer what it may see, asks
the engine once for all, and neither waits for nor keeps anything for who does not read.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.names import named
from tests.server.rig import Front, error_of, run
from tests.server.viewing import Viewer, named_rows, viewing, write_keys

from loraplex.catalog.records import AliasKey
from loraplex.core import limits
from loraplex.core.events import (
    AdapterRevoked,
    AdapterTransition,
    FirstToken,
    LoadFailed,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    ServiceDebited,
    StepFailed,
)
from loraplex.core.messages import Inspect
from loraplex.server.page import handlers
from loraplex.server.service import ServicePhase

KEYS = (("o", "default", "admin"), ("b", "blue", "admin"), ("u", "blue", "user"), ("r", "red", "admin"))
STATIC = Path(handlers.__file__).parent / "static"


def observe(front: Front, *events: Any) -> None:
    """The engine says what happened."""
    front.supervisor.observe(list(events), 0)  # type: ignore[attr-defined]


async def published(front: Front, tenant: str, alias: str) -> str:
    """The digest of a tenant's adapter."""
    return (await front.adapters.add(AliasKey(tenant, alias), front.source(f"{tenant}-{alias}"))).key


def test_the_page_and_its_files_are_whole_and_forbid_everything_from_elsewhere(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        page = await front.http.get("/ui")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}
        linked = {name.removeprefix("ui/") for name in re.findall(r'(?:href|src)="([^"#]+)"', page.text)}
        for script in STATIC.glob("*.js"):
            linked |= set(re.findall(r'from "\./([^"]+)"', script.read_text(encoding="utf-8")))
        assert linked == {file.name for file in STATIC.iterdir()} - {"index.html"}
        for name in linked:
            answer = await front.http.get(f"/ui/{name}")
            assert answer.status_code == 200, name
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), name
        for inline in (r"<script>", r"<style", r"\sstyle=", r"\son[a-z]+="):
            assert not re.search(inline, page.text)
        moved = await front.http.get("/ui/")
        assert (moved.status_code, moved.headers["location"]) == (308, "../ui")
        for absent in ("index.html", "../handlers.py", "%2e%2e/handlers.py", "page.js/x"):
            assert (await front.http.get(f"/ui/{absent}")).status_code == 404, absent

    run(tmp_path, test, api_key_file=write_keys(tmp_path / "keys", *KEYS))


def test_the_stream_wants_a_key_where_there_are_keys(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for key in (None, "nope"):
            async with viewing(front, key) as viewer:
                assert (await viewer.picture())["error"]["code"] == "unauthenticated"
                assert viewer.status == 401
        async with viewing(front, "u") as viewer:
            picture = await viewer.picture()
            assert picture["viewer"] == {"tenant": "blue", "role": "user", "operator": False}

    run(tmp_path, test, api_key_file=write_keys(tmp_path / "keys", *KEYS))


def test_a_tenant_sees_its_own_and_the_operator_everything(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        blue, red = await published(front, "blue", "mine"), await published(front, "red", "theirs")
        await published(front, "default", "shared")
        observe(
            front,
            *(AdapterTransition(1, key, 0, 0, "absent", "host_ready", 0, 8) for key in (blue, red)),
            RequestQueued(1, "one", blue, "blue", 10),
            RequestQueued(2, "two", red, "red", 20),
            RequestQueued(3, "three", None, "red", 30),
            RequestAdmitted(4, "three", 1, 1, 0),
            ServiceDebited(5, 1, (("blue", 4, 0, 1), ("red", 6, 0, 2)), ()),
            LoadFailed(6, blue, "request", "image_corrupt", 1, False),
            LoadFailed(7, red, "request", "image_corrupt", 1, False),
            StepFailed(8, 1, "internal", "", 1),
            RequestFinished(9, "gone", red, "red", "internal", 1, 0, 1),
        )
        async with (
            viewing(front, "o") as operator,
            viewing(front, "b") as tenant,
            viewing(front, "r") as other,
        ):
            whole, own, others = [await viewer.picture() for viewer in (operator, tenant, other)]
        assert named_rows(whole) == sorted([blue[:12], red[:12], "shared"])  # names are their tenants'
        assert named_rows(own) == ["mine", "shared"]
        assert named_rows(others) == ["shared", "theirs"]
        assert [row["tenant"] for row in own["tenants"]] == ["blue"]
        assert {row["tenant"] for row in whole["tenants"]} == {"blue", "red"}
        assert [item["id"] for item in own["queue"]["oldest"]] == ["one"]
        assert [item["id"] for item in whole["queue"]["oldest"]] == ["one", "two"]
        assert others["requests"] == {"running": 1, "waiting": 1}
        assert [item["kind"] for item in own["incidents"]] == ["load_failed"]
        assert [item["kind"] for item in others["incidents"]] == ["load_failed", "request_failed"]
        assert len(whole["incidents"]) == 4
        assert own["host"] is None
        assert own["adapters"]["states"] is None
        assert whole["host"] is not None
        assert {row["name"]: row["own"] for row in own["adapters"]["rows"]} == {"mine": True, "shared": False}
        assert red[:12] not in str(own)
        assert "red" not in str({name: own[name] for name in ("queue", "tenants", "incidents")})

    run(tmp_path, test, api_key_file=write_keys(tmp_path / "keys", *KEYS))


def test_the_engine_is_asked_once_for_all_viewers_and_not_while_nobody_looks(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await front.adapters.add(named("a"), front.source("a"))
        asked = len(front.engine.of(Inspect))
        async with AsyncExitStack() as stack:
            viewers = [await stack.enter_async_context(viewing(front)) for _ in range(5)]
            pictures = [await viewer.picture() for viewer in viewers]
        assert {picture["number"] for picture in pictures} == {1}
        assert len(front.engine.of(Inspect)) == asked + 1

    run(tmp_path, test)


def test_only_who_saw_the_picture_before_is_told_the_news_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAGE_EVERY_S", 0.001)

    async def test(front: Front) -> None:
        observe(front, StepFailed(1, 1, "internal", "", 1))
        async with viewing(front, takes=2) as viewer:
            first = await viewer.picture()
            assert (first["whole"], len(first["incidents"])) == (True, 1)
        async with viewing(front) as viewer:
            first = await viewer.picture()
            assert (first["whole"], len(first["incidents"])) == (True, 1)
            observe(front, AdapterRevoked(2, "k", 0))
            kinds: list[str] = []
            while not kinds:
                picture = await viewer.picture()
                assert not picture["whole"]
                kinds = [incident["kind"] for incident in picture["incidents"]]
            assert kinds == ["revoked"]

    run(tmp_path, test)


def test_viewers_are_bounded_and_tenants_cannot_keep_the_operator_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_VIEWERS_OF_TENANT", 2)
    monkeypatch.setattr(limits, "MAX_VIEWERS", 3)

    async def test(front: Front) -> None:
        async with AsyncExitStack() as stack:
            for key in ("b", "u", "r"):
                await (await stack.enter_async_context(viewing(front, key))).picture()
            for key in ("b", "r"):
                async with viewing(front, key) as refused:
                    assert (await refused.picture())["error"]["code"] == "too_many_viewers"
                    assert refused.status == 429
            await (await stack.enter_async_context(viewing(front, "o"))).picture()
        async with viewing(front, "b") as viewer:  # the places are free again
            assert "error" not in await viewer.picture()

    run(tmp_path, test, api_key_file=write_keys(tmp_path / "keys", *KEYS))


@pytest.mark.parametrize("takes", [0, 1, 2])
def test_a_viewer_that_does_not_read_is_given_up(
    takes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(limits, "PAGE_EVERY_S", 0.001)
    monkeypatch.setattr(limits, "MAX_VIEWERS_OF_TENANT", 1)

    async def test(front: Front) -> None:
        viewer = Viewer(takes)
        scope = {"type": "http", "method": "GET", "path": "/ui/events", "headers": []}
        await front.app(scope, viewer.receive, viewer.send)  # it ends, though the client never goes away
        assert viewer.full.is_set()
        async with viewing(front) as another:
            assert "error" not in await another.picture()

    run(tmp_path, test)


def test_a_key_that_is_taken_away_ends_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_EVERY_S", 0.001)
    monkeypatch.setattr("loraplex.server.auth.LOOK_S", 0.0)
    file = tmp_path / "keys"

    async def test(front: Front) -> None:
        async with viewing(front, "b") as viewer, viewing(front, "u") as changed:
            await viewer.picture()
            await changed.picture()
            write_keys(file, ("o", "default", "admin"), ("u", "blue", "admin"))
            for ended, code in ((viewer, "unauthenticated"), (changed, "forbidden")):
                assert await ended.failure() == code

    run(tmp_path, test, api_key_file=write_keys(file, *KEYS))


def test_a_stream_ends_when_the_server_drains_and_says_so_of_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PAGE_EVERY_S", 0.001)

    async def test(front: Front) -> None:
        front.supervisor.ready = False
        async with viewing(front) as viewer:
            picture = await viewer.picture()
            assert (picture["server"]["ready"], picture["server"]["answers"]) == (False, False)
            assert picture["pool"]["total"] == 0
            front.service.phase = ServicePhase.DRAINING
            await viewer.end()
            assert not viewer.gone.is_set()

    run(tmp_path, test)


def test_what_is_shown_follows_events_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_ROWS", 3)
    monkeypatch.setattr(limits, "PAGE_WAITING", 2)

    async def test(front: Front) -> None:
        keys = [await published(front, "default", f"a{number}") for number in range(5)]
        now = front.service.clock.now_ns() - 1_500_000_000
        observe(
            front,
            AdapterTransition(now, keys[4], 1, 1, "validated", "published", 1, 8),
            *(RequestQueued(now + n, f"r{n}", keys[4 - n % 2], "default", 5) for n in range(4)),
            RequestAdmitted(now, "r0", 1, 1, 0),
            FirstToken(now, "r0", 40_000_000),
            RequestQueued(now + 9, "old", "a digest that has no name and is nowhere", "default", 5),
            RequestFinished(now + 9, "old", None, "default", "stop", 5, 0, 1),
            ServiceDebited(now, 1, (("default", 5, 0, 7),), ()),
            RequestFinished(now, "r0", keys[4], "default", "stop", 5, 7, 1),
        )
        async with viewing(front) as viewer:
            picture = await viewer.picture()
        rows = picture["adapters"]["rows"]
        assert [row["name"] for row in rows] == ["a4", "a3", "a0"]  # on the device, then used, then by name
        assert picture["adapters"]["total"] == 5
        assert [(row["hits"], row["misses"]) for row in rows] == [(2, 0), (0, 2), (0, 0)]
        assert [item["id"] for item in picture["queue"]["oldest"]] == ["r1", "r2"]
        assert picture["queue"]["reasons"] == {"adapter_absent": 2, "turn": 1}
        (second,) = picture["seconds"]
        assert (second["tokens"], second["ended"], second["first_ms"]) == (7, 2, 40.0)
        (tenant,) = picture["tenants"]
        assert (tenant["waiting"], tenant["ended"], tenant["output_tokens"]) == (3, 2, 7)
        assert [item["name"] for item in picture["publications"]] != []

    run(tmp_path, test)


def test_the_stream_is_not_an_answer_to_head(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        answer = await front.http.head("/ui/events")
        assert (answer.status_code, answer.content) == (200, b"")
        assert error_of(await front.http.post("/ui/events"))[:2] == (405, "method_not_allowed")

    run(tmp_path, test)
