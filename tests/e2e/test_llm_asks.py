"""Other ways to ask an `LLM`: conversations, streams, prompts as objects, answers in a form, and its
tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.tiny_words import END, WORD, model
from tests.server.random_adapters import write_adapter

from loraplex import LLM, AnswerForm, SamplingParams
from loraplex.core.errors import CallerError, ErrorCode

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} world{% endif %}"
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = model(tmp_path_factory.mktemp("asks"), max_position_embeddings=1024)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    own = write_adapter(folder / "own", 1)
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with LLM(folder, {"own": own}, load_format="dummy", dtype="float32", pool_gb=0.01) as made:
        yield made


def test_a_conversation_is_its_template_and_an_adapters_own(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    base, own = llm.chat([messages, messages], [None, "own"], GREEDY)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    for output, text in ((base, "hello world"), (own, "hello")):
        assert output.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False).ids
        [same] = llm.generate([output.prompt_token_ids], output.adapter and "own", GREEDY)
        assert same.token_ids == output.token_ids
    [one] = llm.chat(messages, sampling=GREEDY)
    assert one.token_ids == base.token_ids


def test_prompts_may_be_objects(llm: LLM) -> None:
    asked: list[Any] = [{"prompt_token_ids": [5, 6]}, {"prompt": "hello"}, [5, 6], "hello"]
    first, second, third, fourth = llm.generate(asked, sampling=GREEDY)
    assert first.prompt_token_ids == third.prompt_token_ids == [5, 6]
    assert second.prompt_token_ids == fourth.prompt_token_ids
    assert llm.generate({"prompt_token_ids": [5, 6]}, sampling=GREEDY)[0].token_ids == third.token_ids


def test_a_stream_grows_to_the_whole_answer_and_may_be_left(llm: LLM) -> None:
    [whole] = llm.generate([[5, 6]], "own", GREEDY)
    seen = list(llm.stream([5, 6], "own", GREEDY))
    counts = [len(output.token_ids) for output in seen]
    assert counts == sorted(counts)
    assert len(set(counts)) > 1
    assert (seen[-1].token_ids, seen[-1].text, seen[-1].finish_reason) == (
        whole.token_ids,
        whole.text,
        whole.finish_reason,
    )
    assert all(whole.token_ids[: len(output.token_ids)] == output.token_ids for output in seen)
    left = llm.stream([5, 6], "own", GREEDY)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert llm.inspect()["requests"]["live"] == 0


COUNT: Any = {
    "type": "function",
    "function": {
        "name": "hello",
        "parameters": {
            "type": "object",
            "properties": {"lo": {"enum": [1, 2]}},
            "required": ["lo"],
            "additionalProperties": False,
        },
    },
}


def test_a_conversation_may_call_tools(llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=200, seed=3, n=2)
    [made] = llm.chat(
        messages, [None], params, tools=[COUNT], tool_choice="required", parallel_tool_calls=False
    )
    for sample in made.samples:
        (call,) = sample.tool_calls
        assert (sample.finish_reason, sample.text, call.name) == ("tool_calls", "", "hello")
        assert json.loads(call.arguments) in ({"lo": 1}, {"lo": 2})
    [call] = made.tool_calls
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert "hello" in tokenizer.decode(made.prompt_token_ids)
    assert len(made.prompt_token_ids) > len(llm.chat(messages, sampling=GREEDY)[0].prompt_token_ids)
    again: list[Any] = [
        *messages,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "world"},
    ]
    [final] = llm.chat(again, sampling=GREEDY, tools=[COUNT], tool_choice="none")
    assert final.tool_calls == []
    assert "world" in tokenizer.decode(final.prompt_token_ids)
    form = AnswerForm(regex="a")
    with pytest.raises(CallerError) as caught:
        llm.chat(messages, sampling=SamplingParams(structured_outputs=form), tools=[COUNT])
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "structured_outputs")


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (AnswerForm(choice=["hello", "world"]), {"hello", "world"}),
        (AnswerForm(regex="(lo|he){2}"), {"lolo", "lohe", "helo", "hehe"}),
        (AnswerForm(json={"enum": [1, 2]}), {"1", "2"}),
        (AnswerForm(grammar='start: "wo" | "dr"'), {"wo", "dr"}),
    ],
)
def test_an_answer_has_the_form_that_is_asked(llm: LLM, form: AnswerForm, texts: set[str]) -> None:
    params = SamplingParams(max_tokens=20, seed=3, structured_outputs=form)
    for output in llm.generate(["hello"] * 2, [None, "own"], params):
        assert output.text in texts
        assert output.finish_reason == "stop"


def test_special_tokens_are_shown_where_they_are_not_skipped(llm: LLM) -> None:
    said = {"max_tokens": 2, "temperature": 0.0, "logit_bias": {END: 100}, "ignore_eos": True}
    assert llm.generate("hello", sampling=SamplingParams(**said))[0].text == ""
    assert (
        llm.generate("hello", sampling=SamplingParams(**said, skip_special_tokens=False))[0].text
        == "</s></s>"
    )
    stop = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={WORD: 100}, stop_token_ids=[WORD])
    assert llm.generate("hello", sampling=stop)[0].text == ""


def test_what_is_wrong_is_refused_by_name(llm: LLM) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: llm.chat([]), "messages"), (lambda: llm.chat([{"role": "user"}]),
         "messages[0].content"),
        (lambda: llm.chat("hello"), "messages"), (lambda: llm.generate({"text": "a"}), "prompts"),  # type: ignore[arg-type]
        (lambda: llm.generate({"prompt": 3}), "prompts"),
        (AnswerForm, "structured_outputs"), (lambda: AnswerForm(regex="a", choice=["b"]),
        "structured_outputs"),
        (lambda: AnswerForm(regex=3), "structured_outputs"),  # type: ignore[arg-type]
        (lambda: SamplingParams(structured_outputs="a"), "structured_outputs"),  # type: ignore[arg-type]
    ]  # fmt: skip
    for ask, param in wrong:
        with pytest.raises(CallerError) as caught:
            ask()
        assert caught.value.param == param
        assert caught.value.code in (ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_SAMPLING)


def test_urgency_changes_no_answer_and_is_refused_out_of_range(llm: LLM) -> None:
    urgent = SamplingParams(max_tokens=6, temperature=0.0, priority=-3, ttft_deadline_ms=86_400_000)
    patient, pressed = llm.generate([[5, 6], [5, 6]], sampling=[GREEDY, urgent])
    assert patient.token_ids == pressed.token_ids
    for fields in (
        {"priority": 1 << 31},
        {"priority": 0.5},
        {"ttft_deadline_ms": 0},
        {"ttft_deadline_ms": True},
    ):
        with pytest.raises(CallerError) as refused:
            SamplingParams(**fields)  # type: ignore[arg-type]
        assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_SAMPLING, next(iter(fields)))
