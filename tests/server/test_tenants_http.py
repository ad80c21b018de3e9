"""Tenants over HTTP: their limits reach each engine, and each sees why its own requests wait."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.server.rig import BASE, Front, error_of, run

from loraplex.core.errors import CapacityError, ErrorCode
from loraplex.core.messages import Inspect, SetTenants, Submit
from loraplex.core.tenants import TenantLimits
from loraplex.server import auth

KEYS = {"operator": ("default", "admin"), "acme": ("acme", "admin"), "globex": ("globex", "user")}


def key_file(folder: Path, *limits: dict[str, Any]) -> str:
    keys = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "role": role}
        for key, (tenant, role) in KEYS.items()
    ]
    path = folder / "keys"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in [*keys, *limits]))
    return str(path)


async def get(front: Front, path: str, key: str) -> Any:
    return await front.http.get(path, headers={"authorization": f"Bearer {key}"})


async def complete(front: Front, key: str, request_id: str = "mine", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    return await front.http.post(
        "/v1/completions", json={"model": BASE, "prompt": "hello", **body}, headers=headers
    )


def test_limits_reach_the_engine_before_a_request_does_and_once(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await asyncio.gather(*(complete(front, "acme", f"r{n}") for n in range(3)))
        assert front.engine.of(SetTenants) == [SetTenants(0, (TenantLimits("acme", 3, 2),))]
        kinds = [type(message) for message in front.engine.sent if isinstance(message, (SetTenants, Submit))]
        assert kinds[0] is SetTenants

    run(tmp_path, test, api_key_file=key_file(tmp_path, {"tenant": "acme", "weight": 3, "max_running": 2}))


def test_a_changed_file_and_a_restarted_engine_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "LOOK_S", 0.0)

    async def test(front: Front) -> None:
        await complete(front, "acme")
        key_file(tmp_path, {"tenant": "acme", "weight": 10})
        await complete(front, "globex")
        front.supervisor.restarts += 1
        await complete(front, "globex")
        key_file(tmp_path)
        await complete(front, "globex")
        front.supervisor.restarts += 1
        await complete(front, "globex")
        told = [[given.weight for given in message.tenants] for message in front.engine.of(SetTenants)]
        assert told == [[2], [10], [10], []]  # a new engine without limits need not hear it

    run(tmp_path, test, api_key_file=key_file(tmp_path, {"tenant": "acme", "weight": 2}))


def test_an_engine_that_did_not_hear_is_told_again(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.refuse = CapacityError(ErrorCode.ENGINE_DIED, "gone")
        assert (await complete(front, "acme")).status_code == 200
        await complete(front, "acme")
        await complete(front, "acme")
        assert len(front.engine.of(SetTenants)) == 2

    run(tmp_path, test, api_key_file=key_file(tmp_path, {"tenant": "acme", "weight": 2}))


def test_without_limits_the_engine_hears_nothing(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await front.complete()
        assert not front.engine.of(SetTenants)

    run(tmp_path, test)


def sample(name: str, **changes: Any) -> dict[str, Any]:
    adapter = {
        "key": "k", "state": "loading", "residency": "loading", "on_host": True, "failures": 1, "leases": 9,
    }  # fmt: skip
    return {
        "request_id": name, "tenant": "acme", "stage": "waiting",
        "held_by": "ready", "reason": "adapter_loading", "held_ns": 1_500_000_000, "age_ns": 2_000_000_000,
        "priority": 0, "prompt_tokens": 5, "output_tokens": 0, "admissions": 0, "load_failures": 1,
        "adapter": adapter,
        **changes,
    }  # fmt: skip


def test_a_live_request_says_what_holds_each_sample_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(front: Front) -> None:
        front.engine.hold.clear()
        asking = asyncio.ensure_future(complete(front, "acme", n=2))
        await front.engine.submitted.wait()
        ids = [message.request_id for message in front.engine.of(Submit)]
        figures = front.engine.figures() | {"asked": [sample(ids[0])]}
        monkeypatch.setattr(front.engine, "figures", lambda: figures)
        for key in ("acme", "operator"):
            found = (await get(front, "/v1/requests/mine", key)).json()
            assert (found["request_id"], found["tenant"], found["model"]) == ("mine", "acme", BASE)
            held, ended = found["samples"]
            assert (held["stage"], held["held_by"], held["reason"]) == ("waiting", "ready", "adapter_loading")
            assert (held["held_s"], held["age_s"], held["load_failures"]) == (1.5, 2.0, 1)
            assert held["adapter"] == {
                "state": "loading",
                "residency": "loading",
                "on_host": True,
                "failures": 1,
            }
            assert (ended["index"], ended["stage"]) == (1, "ended")
        assert front.engine.of(Inspect)[-1] == Inspect(0, (), tuple(ids))
        hidden = await get(front, "/v1/requests/mine", "globex")
        assert error_of(hidden) == (404, "request_not_found", "request_id")
        front.engine.hold.set()
        assert (await asking).status_code == 200
        gone = await get(front, "/v1/requests/mine", "acme")
        assert error_of(gone)[:2] == (404, "request_not_found")

    run(tmp_path, test, api_key_file=key_file(tmp_path))


def test_one_id_of_two_tenants_is_two_requests(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.hold.clear()
        asking = []
        for key in ("acme", "globex", "acme"):
            front.engine.submitted.clear()
            asking.append(asyncio.ensure_future(complete(front, key, "same")))
            await front.engine.submitted.wait()
        counts = {}
        for key in KEYS:
            found = (await get(front, "/v1/requests/same", key)).json()
            counts[key] = [attempt["tenant"] for attempt in found["attempts"]]
        assert {key: sorted(tenants) for key, tenants in counts.items()} == {
            "operator": ["acme", "acme", "globex"], "acme": ["acme", "acme"], "globex": ["globex"],
        }  # fmt: skip
        front.engine.hold.set()
        await asyncio.gather(*asking)

    run(tmp_path, test, api_key_file=key_file(tmp_path))


def test_a_tenant_sees_its_own_account_and_the_operator_all(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for key in ("acme", "globex"):
            await complete(front, key)
        seen = {key: sorted((await get(front, "/v1/residency", key)).json()["tenants"]) for key in KEYS}
        assert seen == {"operator": ["acme", "globex"], "acme": ["acme"], "globex": ["globex"]}

    run(tmp_path, test, api_key_file=key_file(tmp_path))


def test_a_tenants_own_limit_is_429_with_retry_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(front: Front) -> None:
        front.engine.fail_after = (0, ErrorCode.TENANT_QUEUE_FULL)
        for stream in (False, True):
            answer = await complete(front, "acme", stream=stream)
            assert error_of(answer) == (429, "tenant_queue_full", None)
            assert int(answer.headers["retry-after"]) >= 1

    run(tmp_path, test, api_key_file=key_file(tmp_path))
