"""Bodies that would become too many objects are refused by name before they are decoded; legitimate long ones
are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.rig import BASE, Front, error_of, run

from loraplex.core import limits
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.server import wire
from loraplex.server.body_size import check_body
from loraplex.server.responses_wire import ResponsesRequest
from loraplex.server.wire import ChatRequest, CompletionRequest, PutAdapter, decode

MANY = limits.MAX_BODY_BYTES - 4096
MESSAGE, PART = b'{"role":"user","content":""}', b'{"type":"text","text":""}'


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """As many items as a body holds."""
    return before + b",".join([item] * ((MANY - len(before) - len(after)) // (len(item) + 1))) + after


HOSTILE: list[tuple[bytes, Any, str]] = [
    (filled(b'{"model":"m","messages":[', MESSAGE, b"]}"), ChatRequest, "messages"),
    (filled(b'{"model":"m","messages":[', b'{ \n"role":"user","content":""}', b"]}"), ChatRequest,
    "messages"),
    (filled(b'{"model":"m","messages":[{"role":"user","content":[', PART, b"]}]}"), ChatRequest, "messages"),
    (filled(b'{"model":"m","input":[', b'{"role":"user","content":""}', b"]}"), ResponsesRequest, "input"),
    (filled(b'{"model":"m","messages":[],"tools":[', b"[]", b"]}"), ChatRequest, "tools"),
    (filled(b'{"model":"m","messages":[],"stop":[', b'"ab"', b"]}"), ChatRequest, "stop"),
    (filled(b'{"model":"m","prompt":[', b"[]", b"]}"), CompletionRequest, "prompt"),
    (filled(b'{"model":"m","prompt":[', b'""', b"]}"), CompletionRequest, "prompt"),
    (filled(b'{"model":"m","prompt":[', b'"\\\\"', b"]}"), CompletionRequest, "prompt"),
    (filled(b'{"model":"m","prompt":["",', b"[]", b"]}"), CompletionRequest, "prompt"),
    (filled(b'{"model":"m","prompt":[', b"{}", b"]}"), CompletionRequest, "prompt"),
    (filled(b'{"model":"m","prompt":[', b"1", b"]}"), CompletionRequest, "prompt"),
    (filled(b'{"model":"m","prompt":"","logit_bias":{', b'"1":1', b"}}"), CompletionRequest, "logit_bias"),
    (
        filled(
            b'{"model":"m","prompt":"","response_format":{"type":"json_schema","json_schema":{"schema":[',
            b"[]", b"]}}}",
        ),
        CompletionRequest, "response_format",
    ),
    (filled(b'{"source":"a","more":[', b"[]", b"]}"), PutAdapter, "more"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_a_body_of_many_small_things_is_refused_before_it_is_decoded(
    case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, kind, param = HOSTILE[case]
    assert limits.MAX_BODY_BYTES - 8192 < len(body) <= limits.MAX_BODY_BYTES
    decoded: list[Any] = []
    real = msgspec.json.decode

    def counting(data: bytes, *, type: Any) -> Any:  # noqa: A002 - the library's name
        decoded.append(type)
        return real(data, type=type)

    monkeypatch.setattr(msgspec.json, "decode", counting)
    with pytest.raises(CallerError) as raised:
        decode(body, kind)
    assert raised.value.code is ErrorCode.INVALID_REQUEST
    assert raised.value.param == param
    assert kind not in decoded


def test_what_a_message_holds_beyond_its_texts_is_never_decoded() -> None:
    body = filled(b'{"model":"m","messages":[{"role":"user","content":"","tool_calls":[', b"[]", b"]}]}")
    with pytest.raises(CallerError) as raised:
        decode(body, ChatRequest)
    assert (raised.value.code, raised.value.param) == (
        ErrorCode.INVALID_REQUEST,
        "messages[0].tool_calls[0]",
    )


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": [{"role": "user", "content": 'if {"a": [[], {}]} {' * 30_000}]},
        {"model": "m", "messages": [{"role": "user", "content": "{"}] * limits.MAX_MESSAGES},
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "{"}] * limits.MAX_CONTENT_PARTS}
            ],
        },
    ],
)
def test_long_conversations_within_the_limits_are_taken(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert len(data) > limits.SHORT_BODY_BYTES
    assert len(decode(data, ChatRequest).messages) == len(body["messages"])


@pytest.mark.parametrize(
    "prompt",
    [
        '["' * 100_000,
        ['say "[[{}]]", \\' * 2_000] * limits.MAX_CHOICES,
        list(range(100_000)),
        [[7] * (limits.MAX_PROMPT_TOKENS // limits.MAX_CHOICES)] * limits.MAX_CHOICES,
    ],
)
def test_long_prompts_within_the_limits_are_taken(prompt: Any) -> None:
    data = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert len(data) > limits.SHORT_BODY_BYTES
    assert decode(data, CompletionRequest).prompt == prompt


def test_limits_hold_for_short_bodies_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONTENT_PARTS", 3)
    monkeypatch.setattr(limits, "MAX_SUBMITTED_TOKENS", 50)
    part = {"type": "text", "text": "a"}

    async def test(front: Front) -> None:
        messages = [{"role": "user", "content": [part] * 2}] * 2
        assert error_of(await front.chat(messages=messages)) == (400, "invalid_request", "messages")
        assert (await front.chat(messages=messages[:1])).status_code == 200
        assert error_of(await front.complete(prompt=[7] * 26, n=2)) == (400, "invalid_request", "n")
        assert (await front.complete(prompt=[7] * 25, n=2)).status_code == 200

    run(tmp_path, test)


def test_a_full_queue_of_long_texts_refuses_and_short_ones_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(front: Front) -> None:
        front.service.workers._most = 0
        response = await front.http.post("/v1/completions", json={"model": BASE, "prompt": "hello" * 9000})
        assert error_of(response)[:2] == (429, "queue_full")
        assert (await front.complete()).status_code == 200
        assert (await front.chat()).status_code == 200

    run(tmp_path, test)


def test_the_outline_knows_every_field() -> None:
    """A body with every field that a kind has passes the look as it passes the decoder."""
    padding = "x" * limits.SHORT_BODY_BYTES
    for kind in (ChatRequest, CompletionRequest, PutAdapter, wire.LoadLoraAdapter, wire.PutLimits):
        names = [field.encode_name for field in msgspec.structs.fields(kind)]
        check_body(json.dumps({name: padding for name in names if name != "messages"}).encode(), kind)
        with pytest.raises(msgspec.ValidationError, match="other"):
            check_body(json.dumps({"other": padding}).encode(), kind)


def test_what_a_client_repeats_of_an_answer_stays_bytes() -> None:
    lists = b"[" + b",".join([b"[]"] * 100_000) + b"]"
    said = b'{"role":"user","content":[{"type":"text","text":"a","cache_control":%b}],"parsed":%b}' % (
        lists,
        lists,
    )
    chat = decode(b'{"messages":[%b]}' % said, ChatRequest)
    assert bytes(chat.messages[0].parsed) == lists  # type: ignore[call-overload]
    part = b'{"type":"output_text","text":"a","logprobs":%b,"parsed":%b}' % (lists, lists)
    again = decode(b'{"input":[{"role":"assistant","content":[%b]}]}' % part, ResponsesRequest)
    assert isinstance(again.input, list)
    assert isinstance(again.input[0].content, list)
    assert bytes(again.input[0].content[0].parsed) == lists
