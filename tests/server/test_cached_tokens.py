"""How much of a prompt was reused is in every usage and in the record; whose prefixes are found, in the
request.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.server.rig import Front, run

from loraplex.core.messages import Submit


def cached(usage: dict[str, Any]) -> int:
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


def test_every_usage_says_what_was_reused(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert cached((await front.complete()).json()["usage"]) == 0  # an engine that says nothing
        front.engine.reused = lambda _: 4
        assert cached((await front.complete()).json()["usage"]) == 4
        assert cached((await front.chat()).json()["usage"]) == 4
        options = {"include_usage": True}
        events = await front.events("/v1/completions", prompt="hello", stream_options=options)
        assert cached(events[-1]["usage"]) == 4
        said = [{"role": "user", "content": "hello"}]
        events = await front.events("/v1/chat/completions", messages=said, stream_options=options)
        assert cached(events[-1]["usage"]) == 4
        parsed = await front.openai.completions.create(model="base-model", prompt="hello")
        assert parsed.usage is not None
        assert parsed.usage.prompt_tokens_details is not None
        assert parsed.usage.prompt_tokens_details.cached_tokens == 4

    run(tmp_path, test)


def test_a_prompt_is_cached_as_far_as_no_sample_computed_it(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        found = {"0": 0, "1": 4, "2": 4, "3": 8}
        front.engine.reused = lambda submit: found[submit.request_id.rpartition(".")[2]]
        answer = (await front.complete(prompt=["hello", "hello hello hello"], n=2)).json()
        assert cached(answer["usage"]) == 0 + 4
        assert cached(answer["usage"]) <= answer["usage"]["prompt_tokens"]

    run(tmp_path, test)


def test_the_record_says_what_was_reused(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.engine.reused = lambda _: 4
        answer = await front.complete()
        request_id = answer.headers["x-request-id"]
        found = (await front.http.get(f"/v1/requests/{request_id}/provenance")).json()
        assert [choice["reused_tokens"] for choice in found["choices"]] == [4]

    run(tmp_path, test)


def test_tenants_share_prefixes_only_where_the_operator_says_so(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    tenants = ("acme", "globex", "initech")
    lines = [
        json.dumps({"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name}) for name in tenants
    ]
    file.write_text("\n".join(lines))

    async def namespaces(front: Front) -> dict[str, Submit]:
        for name in tenants:
            headers = {"authorization": f"Bearer {name}"}
            body = {"model": "base-model", "prompt": "hello hello"}
            answer = await front.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        return dict(zip(tenants, front.engine.of(Submit)[-3:], strict=True))

    async def apart(front: Front) -> None:
        sent = await namespaces(front)
        assert {name: submit.namespace for name, submit in sent.items()} == {name: name for name in tenants}
        assert len({submit.block_keys for submit in sent.values()}) == 3

    async def together(front: Front) -> None:
        sent = await namespaces(front)
        assert sent["acme"].namespace == sent["globex"].namespace not in tenants
        assert sent["acme"].block_keys == sent["globex"].block_keys != sent["initech"].block_keys
        assert sent["initech"].namespace == "initech"

    run(tmp_path, apart, api_key_file=str(file))
    run(tmp_path, together, api_key_file=str(file), share_prefixes=("acme", "globex"))
