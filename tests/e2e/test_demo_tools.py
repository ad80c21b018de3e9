"""The tool-calling demo adapter behind a server: held-out requests become calls, results go back, talk stays
talk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from demo.cases import Case, read_heldout
from demo.checkers import is_right
from demo.evaluate import text_of
from tests.server.processes import ROOT, started
from tests.waiting import run

from loraplex.process.engine_process import BUILDER

pytestmark = pytest.mark.e2e

ADAPTER = ROOT / "demo" / "adapters" / "tools"
CALLS = 6


def chosen() -> list[Case]:
    """Some cases that call and some that do not."""
    cases = read_heldout(ADAPTER)
    calls = [case for case in cases if "<tool_call>" in case.expected]
    talk = [case for case in cases if "<tool_call>" not in case.expected]
    return [*calls[:CALLS], *talk]


async def ask(client: openai.AsyncOpenAI, model: str, case: Case, **options: Any) -> Any:
    """The first choice of a greedy answer."""
    body: Any = {"messages": list(case.bare().messages), "tools": list(case.tools), "temperature": 0}
    answer = await client.chat.completions.create(model=model, max_tokens=case.max_tokens, **(body | options))
    return answer.choices[0]


def test_held_out_requests_become_calls_and_results_go_back(tmp_path: Path) -> None:
    async def test() -> None:
        demo: Any = {
            "model": None, "demo": True, "adapters": [["tools", str(ADAPTER)]], "dtype": "float32",
            "max_model_len": 1024, "pool_gb": 0.3,
        }  # fmt: skip
        async with started(tmp_path, BUILDER, "real", **demo) as server:
            await server.ready()
            base = (await server.http.get("/v1/models")).json()["data"][0]["id"]
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0
            ) as client:
                await tell_calls(client)
                await round_trip(client)
                await hold_the_base(client, base)

    run(test)


async def tell_calls(client: openai.AsyncOpenAI) -> None:
    """Calls as the adapter learnt them, and talk that stays talk: it saw little of that."""
    cases = chosen()
    choices = [await ask(client, "tools", case) for case in cases]
    answers = [text_of(choice.message.model_dump()) for choice in choices]
    right = [
        is_right(case.checker, answer, case.expected) for case, answer in zip(cases, answers, strict=True)
    ]
    assert sum(right[:CALLS]) >= CALLS - 1, answers
    assert any(right[CALLS:]), answers
    for choice in choices:
        assert (choice.finish_reason == "tool_calls") is bool(choice.message.tool_calls)


async def round_trip(client: openai.AsyncOpenAI) -> None:
    """A streamed call, its result, and an answer to that."""
    case = chosen()[0]
    messages: list[Any] = list(case.bare().messages)
    tools: list[Any] = list(case.tools)
    async with client.chat.completions.stream(
        model="tools", messages=messages, tools=tools, temperature=0, max_tokens=64
    ) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    (call,) = message.tool_calls or ()
    assert isinstance(json.loads(call.function.arguments), dict)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = await ask(client, "tools", case, messages=[*messages, message.model_dump(), result])
    assert again.message.content or again.message.tool_calls


async def hold_the_base(client: openai.AsyncOpenAI, base: str) -> None:
    """A base that was taught nothing of calls makes a right one where it has to."""
    case = chosen()[0]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice = await ask(client, base, case, tool_choice=named)
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    if choice.finish_reason == "tool_calls":
        assert set(json.loads(call.function.arguments)) == {"city", "day"}
