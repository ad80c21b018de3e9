"""The `openai` client's whole surface, synchronous and asynchronous, against a server process with a real
engine.

The model has random weights and a byte-level tokenizer: what it says is noise, how it says it is what is
tested.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from tests.server.fuzzing import Target, target
from tests.waiting import LIMIT_S

from loraplex.process.engine_process import BUILDER

pytestmark = pytest.mark.e2e
BASE = "tiny"
MESSAGES: list[Any] = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello 👩 日本"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bb"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tag": {"type": "string", "pattern": "^[a-z]{1,4}$"},
    },
    "required": ["kind", "count", "tag"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
KEYS = {"admin-key": ("default", "admin"), "user-key": ("blue", "user")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("surface")
    rows = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "role": role}
        for key, (tenant, role) in KEYS.items()
    ]
    (folder / "keys").write_text("\n".join(map(json.dumps, rows)))
    with target(
        folder,
        BUILDER,
        key="admin-key",
        max_model_len=1024,
        load_format="dummy",
        dtype="float32",
        api_key_file=str(folder / "keys"),
    ) as found:
        yield found
        found.check_unharmed()


@pytest.fixture
def client(server: Target) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="user-key", max_retries=0) as made:
        yield made


def fits(text: str | None) -> dict[str, Any]:
    """The value in an answer that was held to SCHEMA."""
    value = json.loads(text or "")
    assert list(value) == ["kind", "count", "tag"]
    assert value["kind"] in ("a", "bb")
    assert 0 <= value["count"] <= 99
    assert value["tag"].isascii()
    assert 1 <= len(value["tag"]) <= 4
    return dict(value)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [BASE, "one", "two"]
    one = client.models.retrieve("one")
    assert (one.object, one.owned_by, one.model_dump()["parent"]) == ("model", "loraplex", BASE)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.APIStatusError) as refused:
        client.models.delete("one")
    assert refused.value.status_code == 405


@pytest.mark.parametrize("model", [BASE, "one", "two@1"])
def test_completions(client: openai.OpenAI, model: str) -> None:
    def ask(**options: Any) -> Any:
        return client.completions.create(model=model, prompt="hello", max_tokens=12, **options)

    greedy = ask(temperature=0)
    assert greedy.choices[0].text == ask(temperature=0).choices[0].text
    assert greedy.object == "text_completion"
    assert greedy.usage.total_tokens == greedy.usage.prompt_tokens + greedy.usage.completion_tokens
    assert greedy.system_fingerprint.startswith("base:" if model == BASE else model.partition("@")[0] + "@1:")
    drawn = ask(n=3, seed=5, logprobs=3)
    assert [choice.text for choice in drawn.choices] == [choice.text for choice in ask(n=3, seed=5).choices]
    assert len({choice.text for choice in drawn.choices}) == 3
    for choice in drawn.choices:
        scored = choice.logprobs
        assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs)
        assert all(value <= 0 and math.isfinite(value) for value in scored.token_logprobs)
        assert all(3 <= len(top) <= 4 for top in scored.top_logprobs)
    stream = ask(temperature=0, stream=True, stream_options={"include_usage": True}, logprobs=0)
    chunks = list(stream)
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == greedy.choices[0].text
    assert chunks[-1].usage == greedy.usage
    many = client.completions.create(
        model=model, prompt=["hello", "w"], max_tokens=3, temperature=0, echo=True, logprobs=1
    )
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.choices[0].text.startswith("hello")
    assert many.choices[0].logprobs is not None
    assert many.choices[0].logprobs.token_logprobs is not None
    assert many.choices[0].logprobs.token_logprobs[0] is None
    ids = client.completions.create(model=model, prompt=[70, 71], max_tokens=2, temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 2
    assert client.completions.create(model=model, prompt=[[70], [71, 72]], max_tokens=1).choices[1].index == 1


def test_stop_and_limits(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=BASE, prompt="hello", max_tokens=40, seed=3).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    for form in (stop, ["never in it", stop]):
        cut = client.completions.create(model=BASE, prompt="hello", max_tokens=40, seed=3, stop=form).choices[
            0
        ]
        assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    short = client.completions.create(
        model=BASE, prompt="hello", max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert short.choices[0].finish_reason == "length"
    biased = client.completions.create(
        model=BASE,
        prompt="hello",
        max_tokens=3,
        temperature=0,
        logit_bias={"80": 100},
        presence_penalty=0.1,
        frequency_penalty=0.1,
        top_p=0.9,
        best_of=1,
        user="somebody",
        extra_body={"top_k": 5, "return_token_ids": True},
    )
    assert biased.choices[0].model_dump()["token_ids"] == [80, 80, 80]


@pytest.mark.parametrize("model", [BASE, "one"])
def test_chat(client: openai.OpenAI, model: str) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(model=model, messages=MESSAGES, **options)

    answer = ask(max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
    message = answer.choices[0].message
    assert (answer.object, message.role, message.refusal, message.tool_calls) == (
        "chat.completion",
        "assistant",
        None,
        None,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the best"
        assert math.exp(entry.top_logprobs[0].logprob) + math.exp(entry.top_logprobs[1].logprob) <= 1
    parts = [{"type": "text", "text": "hello 👩 日本"}]
    again = client.chat.completions.create(
        model=model,
        messages=[MESSAGES[0], {"role": "user", "content": parts}],
        max_tokens=8,
        temperature=0,  # type: ignore[list-item]
    )
    assert again.choices[0].message.content == message.content
    stream = ask(max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}, n=2)
    chunks = list(stream)
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 16
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=400, seed=1, response_format=FORMAT
    ) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    fits(final.choices[0].message.content)


class Kind(BaseModel):
    """A nested part of `Thing`."""

    name: Literal["x", "yy"] = Field(description="which")


class Thing(BaseModel):
    """What a caller of `parse` asks for."""

    kinds: list[Kind] = Field(max_length=2)
    ratio: float | None
    good: bool


@pytest.mark.parametrize("model", [BASE, "one", "two"])
def test_answers_held_to_a_format(client: openai.OpenAI, model: str) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(
            model=model, messages=MESSAGES, response_format=FORMAT, max_tokens=400, **options
        )

    drawn = ask(n=4, seed=1, temperature=1.3)
    values = [fits(choice.message.content) for choice in drawn.choices]
    assert all(choice.finish_reason == "stop" for choice in drawn.choices)
    assert len({json.dumps(value) for value in values}) > 1
    again = ask(n=4, seed=1, temperature=1.3)
    assert [c.message.content for c in again.choices] == [c.message.content for c in drawn.choices]
    scored = ask(temperature=0, logprobs=True, top_logprobs=3)
    fits(scored.choices[0].message.content)
    content = scored.choices[0].logprobs.content
    assert any(entry.token not in {top.token for top in entry.top_logprobs} for entry in content), (
        "log probabilities are the model's own, whatever the format left of them"
    )
    chunks = list(ask(temperature=0, stream=True))
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == (
        scored.choices[0].message.content
    )
    stopped = ask(temperature=0, stop='"count"').choices[0]
    assert stopped.message.content == scored.choices[0].message.content.partition('"count"')[0]
    assert stopped.finish_reason == "stop"
    short = client.chat.completions.create(
        model=model, messages=MESSAGES, response_format=FORMAT, max_tokens=3, temperature=0
    )
    assert short.choices[0].finish_reason == "length"


def test_formats_beside_free_answers_and_the_parse_helper(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=BASE, messages=MESSAGES, response_format=Thing, max_tokens=400, seed=2
    )
    thing = parsed.choices[0].message.parsed
    assert isinstance(thing, Thing)
    free = client.chat.completions.create(
        model=BASE, messages=MESSAGES, response_format={"type": "text"}, max_tokens=4, temperature=0
    )
    plain = client.chat.completions.create(model=BASE, messages=MESSAGES, max_tokens=4, temperature=0)
    assert free.choices[0].message.content == plain.choices[0].message.content
    bias: Any = {str(token): -100 for token in range(3, 200)}
    anything = client.chat.completions.create(
        model=BASE,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_tokens=40,
        seed=4,
        logit_bias=bias,
    )
    assert (anything.choices[0].message.content or "").startswith("{"), (
        "no bias lets a forbidden token through"
    )
    completion = client.completions.create(
        model="one", prompt="hello", max_tokens=400, extra_body={"response_format": FORMAT}, seed=1
    )
    fits(completion.choices[0].text)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=BASE,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}},
        )
    assert (refused.value.code, refused.value.param) == ("schema_unsupported", "response_format")


TOOL: Any = {
    "type": "function",
    "function": {"name": "thing", "description": "Makes a thing.", "parameters": SCHEMA, "strict": True},
}
OTHER: Any = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize("model", [BASE, "one"])
def test_calls_of_tools_held_to_their_schemas(client: openai.OpenAI, model: str) -> None:
    """Noise that has to be a call is one of these functions with arguments of its schema."""

    def ask(**options: Any) -> Any:
        return client.chat.completions.create(
            model=model,
            messages=MESSAGES[1:],
            tools=[OTHER, TOOL],
            max_tokens=150,
            temperature=1.2,
            **options,
        )

    choice = {"type": "function", "function": {"name": "thing"}}
    drawn = ask(tool_choice=choice, n=3, seed=1)
    for made in drawn.choices:
        (call,) = made.message.tool_calls
        assert (made.finish_reason, made.message.content, call.function.name) == ("tool_calls", None, "thing")
        fits(call.function.arguments)
    for seed in range(3):
        chunks = list(ask(tool_choice="required", parallel_tool_calls=False, stream=True, seed=seed))
        parts = [part for chunk in chunks for c in chunk.choices for part in c.delta.tool_calls or ()]
        assert {part.index for part in parts} == {0}
        assert parts[0].function.name in ("thing", "other")
        arguments = "".join(part.function.arguments for part in parts)
        assert json.loads(arguments) == {} if parts[0].function.name == "other" else fits(arguments)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    free = ask(seed=2)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls


def test_raw_responses_and_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="one", messages=MESSAGES, max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-loraplex-model"] == "one@1"
    answer = raw.parse()
    assert answer.id == "chatcmpl-mine-1"
    assert answer._request_id == "mine-1"
    assert (answer.system_fingerprint or "") == f"one@1:{raw.headers['x-loraplex-semantic-digest'][:16]}"
    with client.completions.with_streaming_response.create(
        model=BASE, prompt="hello", max_tokens=2, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    quick = client.with_options(timeout=LIMIT_S, max_retries=1)
    assert quick.completions.create(model=BASE, prompt="hello", max_tokens=1).choices


def test_errors_are_the_client_s_classes(server: Target, client: openai.OpenAI) -> None:
    def refused(kind: type[openai.APIStatusError], code: str, **options: Any) -> openai.APIStatusError:
        body = {"model": BASE, "messages": MESSAGES, "max_tokens": 2, **options}
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**body)
        assert caught.value.code == code
        assert caught.value.message
        return caught.value

    assert refused(openai.NotFoundError, "model_not_found", model="nobody").param == "model"
    assert refused(openai.BadRequestError, "invalid_sampling", temperature=-1).param == "temperature"
    assert refused(openai.BadRequestError, "context_length_exceeded", max_tokens=10_000).param == "max_tokens"
    assert refused(openai.BadRequestError, "unsupported_option", store=True).param == "store"
    assert refused(openai.BadRequestError, "invalid_request", extra_body={"foo": 1}).param == "foo"
    assert (
        refused(
            openai.APIStatusError,
            "request_too_large",
            messages=[{"role": "user", "content": "x" * (9 << 20)}],
        ).status_code
        == 413
    )
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.PermissionDeniedError):
        client.put("/adapters/x", cast_to=object, body={"source": "/x"})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="admin-key", max_retries=0) as admin:
        one = server.http.get("/v1/adapters/one").json()["source"]
        with pytest.raises(openai.ConflictError) as conflict:
            admin.put("/adapters/one", cast_to=object, body={"source": one, "expected_revision": 9})
        assert conflict.value.code == "adapter_revision_conflict"
    with (
        openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="k", max_retries=0) as nobody,
        pytest.raises(openai.APIConnectionError),
    ):
        nobody.models.list()


def test_the_asynchronous_client(server: Target) -> None:
    async def test() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="user-key", max_retries=0
        ) as client:
            models = [model.id async for model in client.models.list()]
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=models[k % 3], messages=MESSAGES, max_tokens=400, seed=k, response_format=FORMAT
                    )
                    for k in range(6)
                ),
                *(
                    client.completions.create(model=models[k % 3], prompt="hello", max_tokens=9)
                    for k in range(6)
                ),
            )
            for answer in answers[:6]:
                fits(answer.choices[0].message.content)  # type: ignore[union-attr]
            stream = await client.chat.completions.create(
                model="two", messages=MESSAGES, max_tokens=60, stream=True
            )
            await anext(stream)
            await stream.close()
            late = asyncio.ensure_future(
                client.completions.create(model=BASE, prompt="hello", max_tokens=100, n=20)
            )
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)

    asyncio.run(test())
    server.check_unharmed()
