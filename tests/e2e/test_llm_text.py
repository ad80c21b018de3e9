"""Text through `LLM`: pieces continue the prompt, end tokens are those that a server has too, and a closed
one says so.
"""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from tests.artifact.tiny import VOCAB, save_adapter
from tests.e2e.judge import open_llm
from tests.e2e.tiny_peft import logprobs_of, write_base
from tests.e2e.tiny_words import END, WORD, model
from tests.server.random_adapters import write_adapter
from tests.text.tiny_text import metaspace_tokenizer
from tokenizers import Tokenizer, models

from loraplex import LLM, AnswerForm, SamplingParams
from loraplex.core.errors import CallerError, ErrorCode


def always(folder: Path, token: int) -> tuple[list[int], str, str | None]:
    """Ids, text and end of an answer that would say `token` three times."""
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={token: 100})
    with LLM(folder, load_format="dummy", dtype="float32", pool_gb=0.01) as llm:
        [output] = llm.generate("hello", sampling=sampling)
    return output.token_ids, output.text, output.finish_reason


def test_the_first_word_keeps_the_space_before_it(tmp_path: Path) -> None:
    assert always(model(tmp_path), WORD) == ([WORD] * 3, " world world world", "length")


@pytest.mark.parametrize(
    ("changes", "generation", "ends"),
    [
        ({}, None, True),
        ({"eos_token_id": 7}, None, False),
        ({"eos_token_id": END}, None, True),
        ({"eos_token_id": [7, END]}, None, True),
        ({"eos_token_id": END}, {"eos_token_id": 7}, False),
        ({"eos_token_id": 7}, {"eos_token_id": [END]}, True),
        ({"eos_token_id": [END, 151645]}, None, True),
        ({}, {"eos_token_id": []}, True),
    ],
)
def test_which_token_ends(
    tmp_path: Path, changes: dict[str, Any], generation: dict[str, Any] | None, ends: bool
) -> None:
    model(tmp_path, **changes)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ids, _, reason = always(tmp_path, END)
    assert (ids, reason) == (([END], "stop") if ends else ([END] * 3, "length"))


def test_end_tokens_that_the_model_does_not_have_hinder_nobody(tmp_path: Path) -> None:
    ids, _, reason = always(model(tmp_path, eos_token_id=[151643, 151645]), WORD)
    assert (ids, reason) == ([WORD] * 3, "length")


CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([[1]]),
    "add": lambda llm: llm.add_adapter("b", "x"),
    "swap": lambda llm: llm.swap_adapter("plain", "x"),
    "remove": lambda llm: llm.remove_adapter("plain"),
    "pin": lambda llm: llm.pin_adapter("plain"),
    "unpin": lambda llm: llm.unpin_adapter("plain"),
    "prefetch": lambda llm: llm.prefetch_adapter("plain"),
    "revoke": lambda llm: llm.revoke_adapter("plain"),
    "limits": lambda llm: llm.set_limits(),
    "adapters": lambda llm: llm.adapters(),
    "inspect": lambda llm: llm.inspect(),
    "vocabulary": lambda llm: llm.vocab_size,
}


def test_a_closed_llm_says_so_and_keeps_no_weights(root: Path) -> None:
    with open_llm(root, ["plain"]) as llm:
        llm.generate([[1, 2]], "plain")
        engine = weakref.ref(llm._built.engine)
    for call in CALLS.values():
        with pytest.raises(CallerError, match="closed") as caught:
            call(llm)
        assert caught.value.code is ErrorCode.INVALID_REQUEST
    llm.close()
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"plan_log": "/nonexistent/folder/log"}, "plan_log"),
        ({"pool_gb": 1000.0 * 1024}, "pool_gb"),
        ({"pool_gb": 0.001, "device": "cuda"}, "device"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_by_name(
    root: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CallerError, match=param) as caught:
        open_llm(root, **options)
    assert (caught.value.code, caught.value.param) == (ErrorCode.CONFIG_INVALID, param)


def test_a_biased_token_outside_the_vocabulary_is_refused_by_the_fields_name(root: Path) -> None:
    with open_llm(root, []) as llm:
        for field in ("logit_bias", "stop_token_ids"):
            value: Any = {999: 1.0} if field == "logit_bias" else [999]
            with pytest.raises(CallerError, match=f"{field} holds token id 999") as caught:
                llm.generate([[1]], sampling=SamplingParams(**{field: value}))
            assert (caught.value.code, caught.value.param) == (ErrorCode.TOKEN_OUT_OF_RANGE, field)


def test_an_adapters_own_end_tokens_end_its_answers_and_the_bases_by_choice(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logit_bias={WORD: 100})
    source = write_adapter(tmp_path / "own", 1)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": WORD}))
    other = write_adapter(tmp_path / "plain", 1)
    folder = model(tmp_path / "base")
    with LLM(folder, {"own": source}, load_format="dummy", dtype="float32", pool_gb=0.01) as llm:
        assert llm.add_adapter("based", source, text="base")["text"] == "base"
        assert llm.add_adapter("plain", other)["text"] == "adapter"
        outputs = llm.generate(["hello"] * 4, ["own", "based", "plain", None], sampling)
        assert [(output.text, output.finish_reason) for output in outputs] == [
            ("", "stop"),
            *[(" world world world", "length")] * 3,
        ]
        llm.swap_adapter("own", other)
        assert llm.generate("hello", "own", sampling)[0].finish_reason == "length"
        (other / "chat_template.jinja").write_text("{% if %}")
        for text, code in ((None, ErrorCode.ADAPTER_UNSUPPORTED), ("mine", ErrorCode.INVALID_REQUEST)):
            with pytest.raises(CallerError) as caught:
                llm.add_adapter("bad", other, text=text)
            assert caught.value.code is code


def test_further_tokens_of_an_adapters_tokenizer_are_sampled_as_peft_does(tmp_path: Path) -> None:
    known, end = 30, 40
    base, folder = write_base(tmp_path / "base", bias=False), tmp_path / "head"
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(known)}, unk_token="w0"))
    tokenizer.save(str(base / "tokenizer.json"))
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    judge = save_adapter(folder, config)
    plain = shutil.copytree(folder, tmp_path / "plain")
    added = {str(i): {"content": f"<{i}>", "special": i == end} for i in range(known, VOCAB)}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "eos_token": f"<{end}>"})
    )

    def greedy(prompt: list[int], ids: int, steps: int) -> list[int]:
        out: list[int] = []
        while len(out) < steps and (not out or ids == known or out[-1] != end):
            out.append(int(logprobs_of(judge, prompt + out)[-1, :ids].argmax()))
        return out

    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=False, logprobs=2)
    prompts = [[1, 5, 9], [2], [7, 7, 3, 11], [28, 40, 63]]
    adapters = {"own": folder, "plain": plain}
    with LLM(base, adapters, dtype="float32", pool_gb=0.01) as llm:
        own = llm.generate([*prompts, *prompts], ["own"] * 4 + ["plain"] * 4, sampling)
        for prompt, output, narrow in zip(prompts, own[:4], own[4:], strict=True):
            assert output.token_ids == greedy(prompt, VOCAB, 12)
            assert narrow.token_ids == greedy(prompt, known, 12)
            assert all(
                token == max(top, key=top.__getitem__)
                for token, top in zip(output.token_ids, output.logprobs, strict=True)
            )
        assert any(token >= known for output in own[:4] for token in output.token_ids)
        forced = SamplingParams(max_tokens=5, temperature=1.0, seed=3, logit_bias={end: 100})
        [ended] = llm.generate(["w1 <33>w2"], "own", forced)
        assert (ended.token_ids, ended.text, ended.finish_reason) == ([end], "", "stop")
        [said] = llm.generate(
            ["w1"], "own", SamplingParams(max_tokens=2, temperature=0.0, logit_bias={33: 100})
        )
        assert said.text.replace(" ", "") == "<33><33>"
        with pytest.raises(CallerError, match="never sampled"):
            llm.generate(["w1"], "plain", forced)


def test_a_held_answer_may_end_with_the_adapters_own_end_token(tmp_path: Path) -> None:
    folder, source = model(tmp_path / "base"), write_adapter(tmp_path / "own", 1)
    new = metaspace_tokenizer().get_vocab_size(with_added_tokens=True)
    added = {str(new): {"content": "<|done|>", "special": True}}
    (source / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|done|>", "added_tokens_decoder": added})
    )
    with LLM(folder, {"own": source}, load_format="dummy", dtype="float32", pool_gb=0.01) as llm:
        sampling = SamplingParams(
            max_tokens=12,
            temperature=0.0,
            logit_bias={new: 100},
            structured_outputs=AnswerForm(regex="(he)+"),
        )
        [output] = llm.generate("hello", "own", sampling)
    assert (output.text, output.token_ids[-1], output.finish_reason) == ("he", new, "stop")
