"""An adapter's own chat template, end tokens and added tokens over HTTP, and the choice of the base's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.server.rig import BASE, Front, error_of, run
from tests.text.tiny_text import byte_tokenizer

from loraplex.core.messages import Submit
from loraplex.text.codec import TextCodec

OWN = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
END = 7
"""An end token by id, which the base's is not."""


def adapter(front: Front, name: str, template: str | None = OWN, ends: list[int] | None = None) -> str:
    """A folder whose function every other one has, with files of its own beside the weights."""
    source = Path(front.source(name, "the same weights"))
    if template is not None:
        (source / "chat_template.jinja").write_text(template)
    if ends is not None:
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(source)


async def put(front: Front, name: str, source: str, **more: object) -> dict[str, object]:
    answer = await front.http.put(f"/v1/adapters/{name}", json={"source": source, **more})
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json())


async def asked(front: Front, model: str) -> tuple[str, tuple[int, ...]]:
    """The prompt's text that a conversation makes, and what ends its answer."""
    front.engine.sent.clear()
    response = await front.chat(model=model, max_tokens=20)
    assert response.status_code == 200, response.text
    (submit,) = front.engine.of(Submit)
    assert front.codec is not None
    text = front.codec.decode(np.frombuffer(submit.prompt, "<i4").tolist(), skip_special=False)
    return text, submit.sampling.stop_token_ids


def test_each_revision_has_the_text_of_its_own_files(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        base, ends = await asked(front, BASE)
        assert base.startswith("<|start|>[user]hello")
        first = await put(front, "own", adapter(front, "first", OWN, [END]))
        other = await put(front, "other", adapter(front, "second", "{{ messages[0].content }}!"))
        plain = await put(front, "plain", adapter(front, "third", None))
        assert first["semantic_digest"] == other["semantic_digest"] == plain["semantic_digest"]
        assert (first["text"], plain["text"]) == ("adapter", "adapter")
        assert await asked(front, "own") == ("<hello>", (*ends, END))
        assert await asked(front, "other") == ("hello!", ends)
        assert await asked(front, "plain") == (base, ends)
        await put(front, "own", adapter(front, "fourth", "<<{{ messages[0].content }}>>"))
        assert await asked(front, "own") == ("<<hello>>", ends)
        assert await asked(front, "own@1") == ("<hello>", (*ends, END))
        assert await asked(front, "own@2") == ("<<hello>>", ends)

    run(tmp_path, test)


def test_an_own_end_token_ends_a_structured_answer_and_waits_for_the_first_tokens(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await put(front, "own", adapter(front, "first", OWN, [END]))
        for model, own in ((BASE, ()), ("own", (END,))):
            front.engine.sent.clear()
            body = {"max_tokens": 5, "min_tokens": 2, "guided_regex": "[a-z]+"}
            assert (await front.chat(model=model, **body)).status_code == 200
            (submit,) = front.engine.of(Submit)
            assert submit.own_ends == own
            assert submit.sampling.late_token_ids == (1, 2, *own)
        front.engine.sent.clear()
        await front.chat(model="own")
        assert front.engine.of(Submit)[0].own_ends == ()

    run(tmp_path, test)


def test_the_bases_text_is_used_by_choice_and_by_the_servers_default(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        base = await asked(front, BASE)
        source = adapter(front, "first", OWN, [END])
        assert (await put(front, "chosen", source, text="base"))["text"] == "base"
        assert await asked(front, "chosen") == base
        assert (await put(front, "silent", source))["text"] == front.service.config.adapter_text
        assert (await asked(front, "silent") == base) == (front.service.config.adapter_text == "base")
        await put(front, "own", source, text="adapter")
        assert (await asked(front, "own"))[0] == "<hello>"
        load = {"lora_name": "loaded", "lora_path": source, "text": "base"}
        assert (await front.http.post("/v1/load_lora_adapter", json=load)).status_code == 200
        assert await asked(front, "loaded") == base
        wrong = await front.http.put("/v1/adapters/bad", json={"source": source, "text": "mine"})
        assert error_of(wrong) == (400, "invalid_request", "text")

    run(tmp_path, test)
    run(tmp_path, test, adapter_text="base")


def test_a_template_that_cannot_run_refuses_the_registration_and_not_the_bases_text(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        source = adapter(front, "bad", "{% if %}")
        refused = await front.http.put("/v1/adapters/bad", json={"source": source})
        assert error_of(refused)[:2] == (400, "adapter_unsupported")
        loaded = await front.http.post(
            "/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": source}
        )
        assert error_of(loaded)[:2] == (400, "adapter_unsupported")
        assert not front.engine.resident
        await put(front, "bad", source, text="base")
        assert await asked(front, "bad") == await asked(front, BASE)

    run(tmp_path, test)


def test_a_base_without_a_template_serves_chat_for_an_adapter_that_brings_one(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        await put(front, "own", adapter(front, "first"))
        assert (await asked(front, "own"))[0] == "<hello>"
        assert error_of(await front.chat(model=BASE))[:2] == (400, "unsupported_option")

    run(tmp_path, test, codec=TextCodec(byte_tokenizer(), {1}, "<|start|>", None))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_added_tokens_are_read_whole_and_end_tokens_leave_no_text(tmp_path: Path, path: str) -> None:
    async def test(front: Front) -> None:
        assert front.codec is not None
        new = front.codec.vocab_size
        source = Path(adapter(front, "first", OWN, [END]))
        (source / "added_tokens.json").write_text(json.dumps({"<|call|>": new}))
        await put(front, "own", str(source))
        front.engine.script = lambda _: [*front.ids("yes"), END, *front.ids("no")]
        asks = (
            {"prompt": "a<|call|>"}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "a<|call|>"}]}
        )
        answer = (await front.http.post(path, json={"model": "own", "max_tokens": 20, **asks})).json()
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == ("yes", "stop")
        (submit,) = front.engine.of(Submit)
        assert np.frombuffer(submit.prompt, "<i4").tolist().count(new) == 1
        assert submit.sampling.sampled_ids == new + 1
        front.engine.sent.clear()
        bias = {"logit_bias": {str(new): 5}, "max_tokens": 20}
        assert (await front.http.post(path, json={"model": "own", **bias, **asks})).status_code == 200
        refused = await front.http.post(path, json={"model": BASE, **bias, **asks})
        assert error_of(refused) == (400, "token_out_of_range", "logit_bias")
        await front.http.post(path, json={"model": BASE, "max_tokens": 20, **asks})
        assert [submit.sampling.sampled_ids for submit in front.engine.of(Submit)] == [new + 1, 0]

    run(tmp_path, test)
