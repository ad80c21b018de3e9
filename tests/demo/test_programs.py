"""The demo's evaluation and chat programs against an OpenAI-shaped server in this process."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from demo.cases import Case
from demo.chat import Chat, Client
from demo.evaluate import Run, Score, as_json, main, models_of, show, through_server
from rich.console import Console

from demo import chat as chat_module

MODELS = {
    "data": [
        {"id": "smol", "parent": None},
        {"id": "upper", "parent": "smol"},
        {"id": "same", "parent": "smol"},
    ]
}

Answer = Callable[[str, str], str]


def case(text: str, expected: str) -> Case:
    return Case(({"role": "user", "content": text},), expected, "exact", 8)


def openai_shaped(answer: Answer, seen: list[dict[str, Any]] | None = None) -> httpx.MockTransport:
    """Serves MODELS; answers by `answer(model, last message)`, streamed in two pieces if asked."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        body = json.loads(request.content)
        if seen is not None:
            seen.append(body)
        if body["model"] not in {m["id"] for m in MODELS["data"]}:
            return httpx.Response(
                404, json={"error": {"message": f"no model {body['model']}", "code": "model_not_found"}}
            )
        text = answer(body["model"], body["messages"][-1]["content"])
        if not body.get("stream"):
            return httpx.Response(
                200,
                json={"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": len(text)}},
            )
        if text == "broken":
            return httpx.Response(200, text='data: {"error": {"message": "engine died"}}\n\n')
        pieces = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        pieces += [{"choices": [{"delta": {"content": part}}]} for part in (text[:1], text[1:])]
        pieces += [{"choices": []}]
        return httpx.Response(
            200, text="".join(f"data: {json.dumps(p)}\n\n" for p in pieces) + "data: [DONE]\n\n"
        )

    return httpx.MockTransport(handle)


def evaluate(answer: Answer, cases: dict[str, list[Case]], seen: list[dict[str, Any]] | None = None) -> Run:
    return asyncio.run(through_server("http://server", cases, 4, openai_shaped(answer, seen)))


CASES = {
    "upper": [case(w, w.upper()) for w in ("a", "b", "c", "d", "e")],
    "same": [case(w, w) for w in ("v", "w", "x", "y")],
}


def test_evaluation_counts_base_and_adapter_and_passes_only_clear_winners() -> None:
    seen: list[dict[str, Any]] = []
    run = evaluate(lambda model, text: text.upper() if model == "upper" else text, CASES, seen)
    assert run.scores == {"upper": Score(5, 0, 0, 5), "same": Score(4, 4, 4, 4)}
    assert run.scores["upper"].clear
    assert not run.scores["same"].clear  # right, but so is the base
    assert not run.passed
    assert len(seen) == run.requests == 18
    assert run.completion_tokens == 18
    assert all(body["temperature"] == 0 and body["max_tokens"] == 8 for body in seen)
    assert [body["model"] for body in seen] != sorted(
        body["model"] for body in seen
    )  # mixed, not one after the other
    only = evaluate(lambda model, text: text.upper() if model == "upper" else text, {"upper": CASES["upper"]})
    assert only.passed
    assert as_json(only)["scores"]["upper"] == {
        "cases": 5,
        "base": 0,
        "base_inside": 0,
        "adapter": 5,
        "clear": True,
    }
    out = io.StringIO()
    show(run, Console(file=out, width=120))
    assert "not clearly better" in out.getvalue()


@pytest.mark.parametrize(
    ("score", "clear"),
    [
        (Score(64, 1, 2, 64), True),
        (Score(64, 0, 0, 51), False),
        (Score(64, 0, 50, 64), False),
        (Score(64, 48, 48, 64), True),
    ],
)
def test_clearly_better_needs_a_gain_over_the_lenient_base_and_a_high_share(
    score: Score, clear: bool
) -> None:
    assert score.clear is clear


def test_a_failed_request_fails_the_evaluation() -> None:
    def answer(model: str, text: str) -> str:
        return text.upper() if model == "upper" else text

    run = evaluate(answer, {"upper": CASES["upper"]})
    broken = replace(run, failures=["upper: HTTP 500"])
    assert run.passed
    assert not broken.passed

    def refusing(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        return httpx.Response(429, json={"error": {"message": "queue full"}})

    failed = asyncio.run(
        through_server("http://server", {"upper": CASES["upper"]}, 2, httpx.MockTransport(refusing))
    )
    assert len(failed.failures) == 10
    assert "429" in failed.failures[0]


def test_an_adapter_that_is_not_served_and_a_list_without_a_base_are_named() -> None:
    def answer(model: str, text: str) -> str:
        return text.upper() if model == "upper" else text

    with pytest.raises(ValueError, match="serves none of other"):
        evaluate(answer, {"other": CASES["upper"]})
    run = evaluate(answer, {"other": CASES["upper"], "upper": CASES["upper"]})
    assert (list(run.scores), run.skipped, run.passed) == (["upper"], ["other"], True)
    out = io.StringIO()
    show(run, Console(file=out, width=200))
    assert "does not serve them (its log says why): other" in out.getvalue()
    with pytest.raises(ValueError, match="expected one base"):
        models_of({"data": [{"id": "a", "parent": None}, {"id": "b", "parent": None}]})


def test_main_reports_an_absent_server_and_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--concurrency", "1"]) == 2
    assert "cannot evaluate" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--adapter", "no-such-adapter"])


def session(answer: Answer, seen: list[dict[str, Any]]) -> tuple[Chat, io.StringIO]:
    out = io.StringIO()
    http = httpx.Client(base_url="http://server", transport=openai_shaped(answer, seen))
    chat = Chat(Client(http), Console(file=out, width=100))
    chat.refresh()
    return chat, out


def test_chat_lists_switches_streams_and_keeps_only_the_bases_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(chat_module, "examples", lambda name: [("ahoy", "AHOY")] if name == "upper" else [])
    chat, out = session(lambda model, text: f"[bold]{model}:{text}", seen)
    for line in ("hello", "again", "/use upper", "one", "two", "/try", "/base", "third", "/new", "fourth"):
        assert chat.line(line)
    assert [body["model"] for body in seen] == ["smol", "smol", "upper", "upper", "upper", "smol", "smol"]
    assert [len(body["messages"]) for body in seen] == [1, 3, 1, 1, 1, 5, 1]
    assert "[bold]upper:ahoy" in out.getvalue()  # an answer is text, never markup
    assert "right answer: AHOY" in out.getvalue()
    assert chat.line("/list")
    assert "same" in out.getvalue()
    assert not chat.line("/quit")


def test_chat_survives_errors_and_unknown_names() -> None:
    seen: list[dict[str, Any]] = []
    chat, out = session(lambda model, text: "broken", seen)
    for line in ("/use nobody", "hello", "/what", "", "/try"):
        assert chat.line(line)
    text = out.getvalue()
    assert "nobody is not served" in text
    assert "engine died" in text
    assert "/use NAME" in text
    assert chat.model == "smol"
    assert chat.history == []
    chat.model = "gone"
    assert chat.line("hello")
    assert "404: no model gone" in out.getvalue()
