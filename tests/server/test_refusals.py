"""Strict decoding: each wrong field is refused by name, with a stable code, and nothing reaches the
engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.rig import BASE, MAX_LEN, Front, error_of, run

from loraplex.core import limits
from loraplex.core.messages import Submit
from loraplex.server.service import ServicePhase

BAD, OPTION, SAMPLING = (400, "invalid_request"), (400, "unsupported_option"), (400, "invalid_sampling")
SCHEMA = (400, "schema_unsupported")


def named(schema: dict[str, Any], name: str = "thing") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


COMPLETIONS: list[tuple[dict[str, Any], tuple[int, str], str | None]] = [
    ({"foo": 1}, BAD, "foo"),
    ({"max_tokens": "5"}, BAD, "max_tokens"),
    ({"max_tokens": 1.5}, BAD, "max_tokens"),
    ({"stream": 1}, BAD, "stream"),
    ({"logprobs": True}, BAD, "logprobs"),
    ({"model": 3}, BAD, "model"),
    ({"prompt": None}, BAD, "prompt"),
    ({"prompt": [1, "a"]}, BAD, "prompt"),
    ({"prompt": [True]}, BAD, "prompt"),
    ({"prompt": [[1], [1.5]]}, BAD, "prompt"),
    ({"stream": True, "stream_options": {"foo": True}}, BAD, "stream_options.foo"),
    ({"stream_options": {"include_usage": True}}, BAD, "stream_options"),
    ({"priority": 1 << 40}, BAD, "priority"),
    ({"ttft_deadline_ms": 0}, BAD, "ttft_deadline_ms"),
    ({"prompt": ["a"] * 20, "n": 20}, BAD, "n"),
    ({"prompt": []}, (400, "empty_prompt"), "prompt"),
    ({"prompt": [[]]}, (400, "empty_prompt"), "prompt"),
    ({"prompt": [300]}, (400, "token_out_of_range"), "prompt"),
    ({"prompt": [-1]}, (400, "token_out_of_range"), "prompt"),
    ({"prompt": [1 << 70]}, (400, "token_out_of_range"), "prompt"),
    ({"max_tokens": MAX_LEN}, (400, "context_length_exceeded"), "max_tokens"),
    ({"suffix": "x"}, OPTION, "suffix"),
    ({"alora_fallback": False}, BAD, "alora_fallback"),
    ({"alora_fallback": "other"}, SAMPLING, "alora_fallback"),
    ({"best_of": 3}, OPTION, "best_of"),
    ({"n": 0}, SAMPLING, "n"),
    ({"temperature": -1}, SAMPLING, "temperature"),
    ({"temperature": 1e300}, SAMPLING, "temperature"),
    ({"repetition_penalty": 1e-300}, SAMPLING, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, SAMPLING, "repetition_penalty"),
    ({"top_p": 0}, SAMPLING, "top_p"),
    ({"min_p": 2}, SAMPLING, "min_p"),
    ({"top_k": -2}, SAMPLING, "top_k"),
    ({"top_k": limits.MAX_TOP_K + 1}, SAMPLING, "top_k"),
    ({"seed": 1 << 64}, SAMPLING, "seed"),
    ({"logit_bias": {"9" * 5000: 1}}, SAMPLING, "logit_bias"),
    ({"logit_bias": {"²": 1}}, SAMPLING, "logit_bias"),
    (
        {"logit_bias": {"267": 1}},
        (400, "token_out_of_range"),
        "logit_bias",
    ),  # in the vocabulary, unknown to the tokenizer
    ({"stop": ""}, SAMPLING, "stop"),
    ({"logprobs": 21}, SAMPLING, "logprobs"),
    ({"repetition_penalty": 0}, SAMPLING, "repetition_penalty"),
    ({"presence_penalty": 3}, SAMPLING, "presence_penalty"),
    ({"frequency_penalty": 3}, SAMPLING, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, SAMPLING, "logit_bias"),
    ({"logit_bias": {"1": 101}}, SAMPLING, "logit_bias"),
    ({"model": "nobody"}, (404, "model_not_found"), "model"),
    ({"model": "base-model@1"}, (404, "model_not_found"), "model"),
]
CHAT: list[tuple[dict[str, Any], tuple[int, str], str | None]] = [
    ({"messages": []}, (400, "empty_prompt"), "messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, BAD, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, BAD, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, BAD, None),
    ({"functions": [{}]}, OPTION, "functions"),
    ({"response_format": {"type": "grammar"}}, BAD, "response_format.type"),
    ({"response_format": {"type": "text", "more": 1}}, BAD, "response_format.more"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        BAD,
        "response_format.json_schema.name",
    ),
    ({"response_format": named({"not": {}})}, SCHEMA, "response_format"),
    ({"response_format": named({"type": "object", "x-guidance": {}})}, SCHEMA, "response_format"),
    ({"response_format": named({"$ref": "http://elsewhere/x"})}, SCHEMA, "response_format"),
    ({"response_format": named({"enum": []})}, SCHEMA, "response_format"),
    ({"response_format": named({}, "a name")}, BAD, "response_format.json_schema.name"),
    ({"top_logprobs": 2}, BAD, "top_logprobs"),
    ({"logprobs": 2}, BAD, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, SAMPLING, "top_logprobs"),
    ({"max_completion_tokens": MAX_LEN}, (400, "context_length_exceeded"), "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, BAD, "max_completion_tokens"),
    ({"max_tokens": MAX_LEN}, (400, "context_length_exceeded"), "max_tokens"),
    (
        {"messages": [{"role": "user", "content": "x" * MAX_LEN}]},
        (400, "context_length_exceeded"),
        "messages",
    ),
    ({"prompt": "x"}, BAD, "prompt"),
    ({"alora_fallback": "none"}, SAMPLING, "alora_fallback"),
]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"messages": [{"role": "function", "content": "x"}]},
            (
                "messages[0].role is 'function', expected 'system' or 'developer' or 'user' or 'assistant' "
                "or "
                "'tool'"
            ),
        ),
        (
            {"response_format": {"type": "grammar"}},
            "response_format.type is 'grammar', expected 'text' or 'json_object' or 'json_schema'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "text": ""}]}]},
            "messages[0].content[0].type is 'audio', expected 'text'",
        ),
    ],
)
def test_a_refused_word_is_answered_with_the_words_that_are_known(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    async def test(front: Front) -> None:
        body = (await front.chat(**change)).json()["error"]
        assert said in body["message"]

    run(tmp_path, test)


def test_completion_fields(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for change, (status, code), param in COMPLETIONS:
            assert error_of(await front.complete(**change)) == (status, code, param), change
        assert front.engine.of(Submit) == []

    run(tmp_path, test)


def test_an_answer_holds_so_many_log_probabilities_of_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 5 * 2 * 3 * 2)
    given: dict[str, Any] = {"prompt": [[7] * 5] * 2, "echo": True, "logprobs": 2, "n": 2, "max_tokens": 1}

    async def test(front: Front) -> None:
        for change in ({}, {"max_tokens": 0}, {"logprobs": None}, {"logprobs": 3, "n": 1}):
            assert (await front.complete(**{**given, **change})).status_code == 200, change
        sent = len(front.engine.of(Submit))
        assert (await front.complete(**{**given, "logprobs": 20, "echo": False})).status_code == 200
        for change in ({"logprobs": 3}, {"n": 3}, {"prompt": [[7] * 5, [7] * 6]}, {"prompt": [[7] * 5] * 3}):
            answer = error_of(await front.complete(**{**given, **change}))
            assert answer == (400, "invalid_request", "logprobs"), change
        assert len(front.engine.of(Submit)) == sent + 4

    run(tmp_path, test)


def test_an_answer_is_short_however_long_what_it_refuses(tmp_path: Path) -> None:
    long = "x" * 1_000_000
    bodies: list[dict[str, Any]] = [
        {"model": long}, {long: 1}, {"stop": long}, {"temperature": long}, {"stream_options": {long: 1}},
        {"seed": 1 << 14_000},
    ]  # fmt: skip

    async def test(front: Front) -> None:
        for change in bodies:
            response = await front.complete(**change)
            assert response.status_code in (400, 404)
            assert len(response.content) < limits.MAX_ERROR_CHARS + limits.MAX_ERROR_PARAM_CHARS + 500

    run(tmp_path, test)


def test_chat_fields(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        for change, (status, code), param in CHAT:
            answer = error_of(await front.chat(**change))
            assert answer[:2] == (status, code), change
            assert param is None or answer[2] == param, change
        assert front.engine.of(Submit) == []
        assert (await front.chat(response_format={"type": "text"}, tools=None)).status_code == 200

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("body", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_request"),
        (b"\xff\xfe", "application/json", 400, "invalid_request"),
        (b'{"model": "\xff"}', "application/json", 400, "invalid_request"),
        (b"[" * 100_000, "application/json", 400, "invalid_request"),
        (b"{}", "application/json", 400, "invalid_request"),
        (b"{}", "text/plain", 400, "invalid_request"),
        (b" " * (limits.MAX_BODY_BYTES + 1), "application/json", 413, "request_too_large"),
    ],
    ids=["cut", "not-utf8", "string-not-utf8", "deep", "empty", "content-type", "large"],
)
def test_bodies(tmp_path: Path, body: bytes, kind: str, status: int, code: str) -> None:
    async def test(front: Front) -> None:
        response = await front.http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert error_of(response)[:2] == (status, code)

    run(tmp_path, test)


def test_a_large_body_without_a_length_is_refused_while_it_arrives(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        async def body() -> Any:
            for _ in range(40):
                yield b" " * (1 << 20)

        headers = {"content-type": "application/json"}
        response = await front.http.post("/v1/completions", content=body(), headers=headers)
        assert error_of(response)[:2] == (413, "request_too_large")

    run(tmp_path, test)


def test_paths_and_methods(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert error_of(await front.http.get("/v1/nothing"))[:2] == (404, "not_found")
        assert error_of(await front.http.get("/v1/completions"))[:2] == (405, "method_not_allowed")
        assert error_of(await front.http.post("/v1/models"))[:2] == (405, "method_not_allowed")
        assert error_of(await front.http.post("/v1/adapters/a/explode"))[:2] == (404, "not_found")
        assert error_of(await front.http.get("/v1/models/nobody")) == (404, "model_not_found", "model")

    run(tmp_path, test)


def test_nothing_is_taken_before_ready_or_while_draining(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        front.service.phase = ServicePhase.DRAINING
        assert error_of(await front.complete())[:2] == (503, "shutting_down")
        assert error_of(await front.http.get("/ready"))[:2] == (503, "shutting_down")
        assert (await front.http.get("/health")).json() == {"status": "ok"}
        front.service.phase = ServicePhase.OPEN
        front.supervisor.ready = False
        response = await front.chat()
        assert error_of(response)[:2] == (503, "engine_unavailable")
        assert "retry-after" in response.headers
        assert "loraplex_ready 0.0" in (await front.http.get("/metrics")).text
        front.supervisor.ready = True
        assert (await front.http.get("/ready")).status_code == 200

    run(tmp_path, test)


def test_an_unexpected_exception_is_typed_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(front: Front) -> None:
        del front.supervisor.info["vocab_size"]
        assert error_of(await front.complete())[:2] == (500, "internal")
        assert "Traceback" in caplog.text

    run(tmp_path, test)


def test_request_ids_headers_and_access_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "loraplex.access")

    async def test(front: Front) -> None:
        body = {"model": BASE, "prompt": "SECRET"}
        same = [
            await front.http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
            for _ in range(2)
        ]
        assert [r.headers["x-request-id"] for r in same] == ["mine-1", "mine-1"]
        assert same[0].json()["id"] == "cmpl-mine-1"
        assert len({m.request_id for m in front.engine.of(Submit)}) == 2
        odd = await front.http.post("/v1/completions", json=body, headers={"x-request-id": "a b\tc" * 40})
        assert len(odd.headers["x-request-id"]) == 32
        assert same[0].headers["x-loraplex-model"] == BASE
        assert error_of(await front.complete(foo=1))[1] == "invalid_request"
        lines = [record for record in caplog.records if record.name == "loraplex.access"]
        values = [record.__dict__["loraplex_fields"] for record in lines]
        assert [v["status"] for v in values] == [200, 200, 200, 400]
        assert values[0]["output_tokens"] == 7
        assert values[0]["ttft_ms"] >= 0
        assert values[3]["code"] == "invalid_request"
        assert "SECRET" not in str(values)

    run(tmp_path, test)
