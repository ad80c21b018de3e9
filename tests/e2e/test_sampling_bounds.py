"""What may be sampled, through `LLM` and a model: the parameters hold whatever the logits say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.tiny_words import END, WORD, model

from loraplex import LLM, SamplingParams
from loraplex.api.outputs import RequestOutput
from loraplex.core.errors import CallerError
from loraplex.core.request import AnswerForm


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = model(tmp_path_factory.mktemp("words"))
    with LLM(folder, load_format="dummy", dtype="float32", pool_gb=0.01) as made:
        yield made


def asked(llm: LLM, **params: Any) -> RequestOutput:
    given = {"max_tokens": 6, "temperature": 0.0, **params}
    [output] = llm.generate("hello", sampling=SamplingParams(**given))
    return output


def test_an_answer_ends_behind_its_first_tokens(llm: LLM) -> None:
    output = asked(llm, min_tokens=3, logit_bias={END: 100, WORD: 50})
    assert (output.token_ids, output.finish_reason) == ([WORD] * 3 + [END], "stop")
    ignoring = asked(llm, min_tokens=3, logit_bias={END: 100, WORD: 50}, ignore_eos=True)
    assert ignoring.token_ids == [WORD] * 3 + [END] * 3
    stopped = asked(llm, min_tokens=2, logit_bias={WORD: 100}, stop=" world")
    assert (stopped.token_ids, stopped.text) == ([WORD] * 3, " world world")


def test_only_what_is_allowed_is_sampled_in_every_sample_and_piece(llm: LLM) -> None:
    allowed = [WORD, 5, 9]
    output = asked(llm, allowed_token_ids=allowed, logit_bias={END: 100}, temperature=1.0, seed=3, n=4)
    assert all(set(sample.token_ids) <= set(allowed) for sample in output.samples)
    assert {sample.finish_reason for sample in output.samples} == {"length"}
    params = SamplingParams(max_tokens=6, allowed_token_ids=allowed, temperature=1.0, seed=3)
    *_, last = llm.stream("hello", sampling=params)
    assert last.token_ids == output.samples[0].token_ids


def test_a_bad_word_is_not_written_as_the_tokenizer_spells_it(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    space, letter = tokenizer.encode("h", add_special_tokens=False).ids
    wants: dict[str, Any] = {"logit_bias": {space: 100, letter: 99.5}, "presence_penalty": 2.0}
    assert asked(llm, **wants).token_ids[:2] == [space, letter]
    output = asked(llm, **wants, bad_words=["h"], n=2, temperature=1.0, seed=1)
    for sample in output.samples:
        assert (space, letter) not in zip(sample.token_ids, sample.token_ids[1:], strict=False)
    assert asked(llm, **wants, bad_words=["h"]).token_ids == [space] * 6


def test_a_form_and_the_parameters_hold_together(llm: LLM) -> None:
    form = AnswerForm(choice=[" world", "hello"])
    assert asked(llm, structured_outputs=form, logit_bias={WORD: 100}).text == " world"
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    letters = [*map(tokenizer.token_to_id, "helo"), END]
    other = asked(llm, structured_outputs=form, logit_bias={WORD: 100}, allowed_token_ids=letters)
    assert other.text == "hello"
    with pytest.raises(CallerError, match="no token is left"):
        asked(llm, structured_outputs=form, allowed_token_ids=[END])
