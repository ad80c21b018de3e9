"""Requests as clients send them, recorded, and what each has to be answered with.

A file a client: `client` with the version that was recorded, and `requests`, each with what the model writes
(`model_says`) and what the answer must hold. Texts that the libraries bring along were replaced by ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.rig import Front, run
from tests.text.tools.tool_cases import HERMES_TEMPLATE

from loraplex.core.messages import Submit
from loraplex.text.chat_template import ChatTemplate

FIXTURES = sorted(Path(__file__).parent.glob("*.json"))
MODEL = "tools"


@dataclass
class Seen:
    """What a client reads of an answer, whatever its form. choices: how many there are."""

    text: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    end: str | None = None
    usage: bool = False
    logprobs: bool = False
    choices: int = 1


def read(response: httpx.Response, path: str, stream: bool) -> Seen:
    body = response.text
    if not stream:
        return read_items(response.json()) if path.endswith("responses") else read_choices([response.json()])
    events = [
        json.loads(line.removeprefix("data: "))
        for line in body.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if path.endswith("responses"):
        assert not body.endswith("[DONE]\n\n")
        return read_items(events[-1]["response"])
    assert body.endswith("data: [DONE]\n\n")
    return read_choices(events)


def read_choices(bodies: list[dict[str, Any]]) -> Seen:
    """The first choice of an answer, or of its chunks."""
    seen = Seen(choices=len({choice["index"] for body in bodies for choice in body["choices"]}))
    for body in bodies:
        seen.usage |= bool(body.get("usage"))
        for choice in body["choices"][:1]:
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            seen.text += said.get("content") or ""
            seen.end = choice["finish_reason"] or seen.end
            seen.logprobs |= choice.get("logprobs") is not None
            for call in said.get("tool_calls", ()):
                if call.get("id"):
                    seen.calls.append({"name": call["function"]["name"], "arguments": ""})
                seen.calls[-1]["arguments"] += call["function"]["arguments"]
    return seen


def read_items(response: dict[str, Any]) -> Seen:
    seen = Seen(end=response["status"], usage=response["usage"] is not None)
    for item in response["output"]:
        if item["type"] == "message":
            seen.text += "".join(part["text"] for part in item["content"])
        else:
            seen.calls.append({"name": item["name"], "arguments": item["arguments"]})
    return seen


async def send(front: Front, request: dict[str, Any]) -> httpx.Response:
    url = f"http://t{request['path']}"
    body = request.get("body")
    content = None if body is None else json.dumps(body)
    return await front.http.request(request["method"], url, headers=request["headers"], content=content)


async def check(front: Front, request: dict[str, Any]) -> None:
    expected, body = request["answer"], request.get("body")
    if body is None:
        assert (await send(front, request)).status_code == expected["status"]
        return
    front.say(request["model_says"])
    front.engine.sent.clear()
    response = await send(front, request)
    assert response.status_code == 200, response.text
    seen = read(response, request["path"], bool(body.get("stream")))
    calls = [[call["name"], json.loads(call["arguments"])] for call in seen.calls]
    found = {
        "text": seen.text,
        "calls": calls,
        "end": seen.end,
        "usage": seen.usage,
        "logprobs": seen.logprobs,
        "choices": seen.choices,
    }
    submits = front.engine.of(Submit)
    assert front.codec is not None
    prompt = front.codec.decode(list(memoryview(submits[0].prompt).cast("i")), skip_special=False)
    found["grammar"] = submits[0].grammar is not None
    found["prompt"] = [text for text in expected.get("prompt", ()) if text in prompt]
    assert expected
    assert {name: found[name] for name in expected} == expected, (request, response.text)


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda path: path.stem)
def test_a_client_s_requests_are_answered(tmp_path: Path, fixture: Path) -> None:
    recorded = json.loads(fixture.read_text(encoding="utf-8"))
    assert recorded["client"]

    async def test(front: Front) -> None:
        front.supervisor.info["max_model_len"] = 60_000
        assert front.codec is not None
        front.codec._template = ChatTemplate(HERMES_TEMPLATE, {})
        registered = await front.http.put(f"/v1/adapters/{MODEL}", json={"source": front.source(MODEL)})
        assert registered.status_code == 201
        for request in recorded["requests"]:
            await check(front, request)

    run(tmp_path, test)


def test_every_client_has_its_requests() -> None:
    assert len(FIXTURES) == 17
    assert all(json.loads(path.read_text(encoding="utf-8"))["requests"] for path in FIXTURES)
