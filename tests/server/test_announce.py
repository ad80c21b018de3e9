"""What a ready server tells people to try is right as it stands."""

from __future__ import annotations

import ast
import io
import json
import shlex

import pytest

from loraplex.config import ServeConfig
from loraplex.server.announce import Announcer, examples
from loraplex.server.wire import ChatRequest, CompletionRequest, decode


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("aliases", [[], ["sql", "iso-date"]])
def test_examples_are_valid(chat: bool, aliases: list[str]) -> None:
    names, curl, python, command = examples("http://127.0.0.1:8000", "base", aliases, chat)
    assert all(name in names for name in ["base", *aliases])
    words = shlex.split(curl.replace("\\\n", ""))
    assert words[1] == f"http://127.0.0.1:8000/v1/{'chat/completions' if chat else 'completions'}"
    body = decode(words[words.index("-d") + 1].encode(), ChatRequest if chat else CompletionRequest)
    assert body.model == ([*aliases, "base"])[0]
    ast.parse(python)
    assert shlex.split(command)[:3] == ["loraplex", "adapters", "list"]


def test_lines_are_printed_unless_logs_are_for_machines() -> None:
    stream = io.StringIO()
    announcer = Announcer(ServeConfig(demo=True), stream)
    announcer.say("adapter [red]x[/red]")
    announcer.ready("http://h:1", "base", ["a"], chat=True)
    assert "adapter [red]x[/red]\n" in stream.getvalue()
    assert "ready on http://h:1" in stream.getvalue()
    announcer.say("adapter \udcff\x1b[31m\n is not served")
    assert "adapter \\udcff\\x1b[31m\\n is not served\n" in stream.getvalue()
    quiet = io.StringIO()
    announcer = Announcer(ServeConfig(demo=True, log_json=True), quiet)
    announcer.say("x")
    announcer.ready("http://h:1", "base", ["a"], chat=True)
    assert quiet.getvalue() == ""


def test_a_body_of_the_example_is_json() -> None:
    curl = examples("http://h:1", "base", [], chat=False)[1]
    assert json.loads(shlex.split(curl.replace("\\\n", ""))[-1]) == {
        "model": "base",
        "prompt": [1, 2, 3],
        "max_tokens": 8,
    }
