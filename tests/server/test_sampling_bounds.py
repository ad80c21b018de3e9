"""Fields that bound what may be sampled, from a request's body to what the engine is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.rig import Front, error_of, run

from loraplex.core import limits
from loraplex.core.messages import EngineSampling, Submit


def test_the_engine_is_asked_for_what_the_fields_say(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        async def asked(**body: Any) -> EngineSampling:
            found = []
            for ask in (front.complete, front.chat):
                front.engine.sent.clear()
                response = await ask(**body)
                assert response.status_code == 200, response.text
                found.append(front.engine.of(Submit)[0].sampling)
            assert found[0].late_token_ids == found[1].late_token_ids
            assert found[0].bad_words == found[1].bad_words
            return found[1]

        plain = await asked(max_tokens=5)
        assert (plain.min_tokens, plain.late_token_ids) == (0, ())
        assert (plain.allowed_token_ids, plain.bad_words) == ((), ())
        late = await asked(max_tokens=5, min_tokens=5, stop_token_ids=[9])
        assert (late.min_tokens, late.late_token_ids, late.stop_token_ids) == (5, (1, 2, 9), (1, 2, 9))
        ignoring = await asked(max_tokens=5, min_tokens=3, ignore_eos=True)
        assert (ignoring.late_token_ids, ignoring.stop_token_ids) == ((1, 2), ())
        allowed = await asked(allowed_token_ids=[9, 5, 9])
        assert allowed.allowed_token_ids == (5, 9)
        worded = await asked(bad_words=["ab", " ab", "c"])
        spelled = [front.ids(text) for text in ("ab", " ab", "c", " c")]
        assert set(worded.bad_words) == {tuple(ids) for ids in spelled}

    run(tmp_path, test)


BOUNDS: list[tuple[dict[str, Any], str, str]] = [
    ({"min_tokens": -1}, "invalid_sampling", "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "invalid_sampling", "min_tokens"),
    ({"allowed_token_ids": []}, "invalid_sampling", "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "invalid_sampling", "allowed_token_ids"),
    ({"allowed_token_ids": [1 << 20]}, "token_out_of_range", "allowed_token_ids"),
    (
        {"allowed_token_ids": [5] * (limits.MAX_ALLOWED_TOKEN_IDS + 1)},
        "invalid_sampling",
        "allowed_token_ids",
    ),
    ({"bad_words": ["x"] * (limits.MAX_BAD_WORDS + 1)}, "invalid_sampling", "bad_words"),
    ({"bad_words": [""]}, "invalid_sampling", "bad_words"),
    ({"bad_words": ["x" * (limits.MAX_BAD_WORD_CHARS + 1)]}, "invalid_sampling", "bad_words"),
    ({"bad_words": "x"}, "invalid_request", "bad_words"),
    ({"prompt_logprobs": -1}, "invalid_sampling", "prompt_logprobs"),
    ({"prompt_logprobs": limits.MAX_LOGPROBS + 1}, "invalid_sampling", "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "invalid_request", "prompt_logprobs"),
]


@pytest.mark.parametrize(("body", "code", "field"), BOUNDS)
def test_values_out_of_bounds_are_refused_by_name(
    tmp_path: Path, body: dict[str, Any], code: str, field: str
) -> None:
    async def test(front: Front) -> None:
        for ask in (front.complete, front.chat):
            assert error_of(await ask(**body)) == (400, code, field)
        assert not front.engine.of(Submit)

    run(tmp_path, test)


def test_a_stop_string_is_acted_on_behind_the_first_tokens_only(tmp_path: Path) -> None:
    """As vLLM counts them: one that completes with the last of `min_tokens` ends nothing."""

    async def test(front: Front) -> None:
        front.engine.script = lambda _: [*front.ids("abSTOPcdSTOPe"), 1]
        at = len(front.ids("abSTOP"))

        async def text(**body: Any) -> str:
            return str(
                (await front.complete(max_tokens=30, stop="STOP", **body)).json()["choices"][0]["text"]
            )

        assert await text() == "ab"
        assert await text(min_tokens=at - 1) == "ab"
        assert await text(min_tokens=at) == "abSTOPcd"
        assert await text(min_tokens=at, include_stop_str_in_output=True) == "abSTOPcdSTOP"
        assert await text(min_tokens=13) == "abSTOPcdSTOPe"

    run(tmp_path, test)


def test_log_probabilities_of_a_prompt_come_in_the_shape_of_vllm(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        ids = front.ids("STOPxabc")
        body = {"prompt": ids, "max_tokens": 1, "n": 2, "prompt_logprobs": 2}
        choices = (await front.complete(**body)).json()["choices"]
        assert [message.sampling.prompt_logprobs for message in front.engine.of(Submit)] == [2, -1]
        scored = choices[0]["prompt_logprobs"]
        assert choices[1]["prompt_logprobs"] == scored
        assert scored[0] is None
        assert len(scored) == len(ids) > 3
        for token, entry in zip(ids[1:], scored[1:], strict=True):
            own = entry[str(token)]
            assert set(own) == {"logprob", "rank", "decoded_token"}
            assert own["decoded_token"] == front.service.codec.token_text(token)
            assert len(entry) <= 3
            assert [value["rank"] for key, value in entry.items() if key != str(token)] == [1, 2][
                -len(entry) + 1 :
            ]
        talk = (await front.chat(max_tokens=1, prompt_logprobs=0)).json()
        assert talk["prompt_logprobs"][0] is None
        assert len(talk["prompt_logprobs"]) == talk["usage"]["prompt_tokens"]
        assert all(len(entry) == 1 for entry in talk["prompt_logprobs"][1:])
        for plain in ((await front.complete()).json()["choices"][0], (await front.chat()).json()):
            assert "prompt_logprobs" not in plain
        echoed = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
        choice = (await front.complete(**echoed)).json()["choices"][0]
        assert len(choice["logprobs"]["top_logprobs"][1]) >= 3
        assert len(choice["prompt_logprobs"][1]) <= 2

    run(tmp_path, test)
