"""Activated LoRA through `LLM` against PEFT's own forward pass: where it acts, what it shares, what it never
changes.

Small random adapters over a small random Llama, in float32. Every request runs twice, so that the second one
finds what the first one left in the prefix cache; log probabilities are PEFT's both times.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.artifact.peft_configs import ALL, lora
from tests.artifact.tiny import VOCAB, save_adapter, tiny_model
from tests.catalog.remotes import WebServer
from tests.e2e.tiny_peft import logprobs_of, write_base

from loraplex import LLM, SamplingParams
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_LOGPROBS

TOLERANCE = 1e-4
INVOCATION = [7, 3]
KINDS: dict[str, Any] = {
    "attention": lora(alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM"),
    "every linear": lora(alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM", target_modules=ALL),
    "rslora": lora(alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM", use_rslora=True, r=3),
    "head": lora(alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM", target_modules=["lm_head"]),
    "one token": lora(alora_invocation_tokens=[9], task_type="CAUSAL_LM"),
}
PAGE_TOKENS = 4
CONTEXT = torch.randint(10, VOCAB, (23,), generator=torch.Generator().manual_seed(8)).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_base(tmp_path_factory.mktemp("base"), False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAPLEX_CACHE", str(tmp_path_factory.mktemp("cache")))
        running = LLM(
            folder,
            device="cpu",
            dtype="float32",
            pool_gb=0.02,
            page_tokens=PAGE_TOKENS,
            token_budget=16,
            max_requests=8,
        )
    with running:
        yield running


def prompts(invocation: list[int]) -> list[list[int]]:
    """Invoked at the start, inside a block, between blocks, at the end, twice, and just after another
    invocation.
    """
    return [
        [*invocation, *CONTEXT],
        [*CONTEXT, *invocation],
        [*CONTEXT[:13], *invocation, *CONTEXT[13:]],
        [*CONTEXT[: 3 * PAGE_TOKENS], *invocation, 11, 12],
        [*CONTEXT[:5], *invocation, *CONTEXT[5:9], *invocation, *CONTEXT[9:12]],
        [*invocation, *invocation],
        list(invocation),
    ]


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """PEFT's own continuation. Activation is found in the prompt and kept: it counts back from the growing
    end.
    """
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_as_peft_computes_it(llm: LLM, tmp_path: Path, kind: str) -> None:
    model = save_adapter(tmp_path, KINDS[kind])
    invocation = list(KINDS[kind].alora_invocation_tokens)
    described = llm.add_adapter(kind.replace(" ", "-"), tmp_path)
    assert described["invocation_tokens"] == invocation
    assert described["shares"]["kv"] == ("always" if kind == "head" else "before_invocation")
    scored = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    plain = SamplingParams(max_tokens=6, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True)
    try:
        for prompt in prompts(invocation):
            expected = logprobs_of(model, prompt)
            for _ in range(2):
                (whole,) = llm.generate([prompt], kind.replace(" ", "-"), scored)
                assert whole.cached_tokens == 0
                assert whole.prompt_logprobs is not None
                assert whole.logprobs is not None
                for position, entries in enumerate([*whole.prompt_logprobs[1:], whole.logprobs[0]]):
                    assert entries is not None
                    for token, value in entries.items():
                        assert value == pytest.approx(float(expected[position, token]), abs=TOLERANCE)
            continuation = greedy(model, prompt, 6)
            for turn in range(2):
                (answer,) = llm.generate([prompt], kind.replace(" ", "-"), plain)
                assert answer.token_ids == continuation
                assert answer.logprobs is not None
                for token, value in answer.logprobs[0].items():
                    assert value == pytest.approx(float(expected[-1, token]), abs=TOLERANCE)
                if turn:
                    assert answer.cached_tokens == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
    finally:
        llm.remove_adapter(kind.replace(" ", "-"))


def test_the_base_and_its_specialists_compute_a_context_once(llm: LLM, tmp_path: Path) -> None:
    models = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(100 + seed)
        models[name] = save_adapter(tmp_path / name, KINDS["attention"])
        llm.add_adapter(name, tmp_path / name)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=MAX_LOGPROBS, ignore_eos=True)
    context = [5, 6, *CONTEXT]
    try:
        (base,) = llm.generate([context], None, params)
        conversation = [*context, *base.token_ids]
        for name, model in models.items():
            prompt = [*conversation, *INVOCATION]
            (answer,) = llm.generate([prompt], name, params)
            # The base's last token was never fed back, and a block that the boundary cuts is not shared.
            assert answer.cached_tokens == (len(conversation) - 1) // PAGE_TOKENS * PAGE_TOKENS
            expected = logprobs_of(model, prompt)[-1]
            assert answer.logprobs is not None
            for token, value in answer.logprobs[0].items():
                assert value == pytest.approx(float(expected[token]), abs=TOLERANCE)
        (again,) = llm.generate([conversation], None, params)
        expected = logprobs_of(tiny_model(False), conversation)[-1]
        assert again.logprobs is not None
        for token, value in again.logprobs[0].items():
            assert value == pytest.approx(float(expected[token]), abs=TOLERANCE)
    finally:
        for name in models:
            llm.remove_adapter(name)


def test_new_content_under_an_alias_finds_nothing_of_the_old(llm: LLM, tmp_path: Path) -> None:
    plain = lora(task_type="CAUSAL_LM", target_modules=ALL)
    for seed, name in enumerate(("old", "new")):
        save_adapter(tmp_path / name, plain, seed=seed)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    reusable = (len(CONTEXT) - 1) // PAGE_TOKENS * PAGE_TOKENS
    llm.add_adapter("changing", tmp_path / "old")
    try:
        assert [llm.generate([CONTEXT], "changing", params)[0].cached_tokens for _ in range(2)] == [
            0,
            reusable,
        ]
        llm.swap_adapter("changing", tmp_path / "new")
        assert [llm.generate([CONTEXT], "changing", params)[0].cached_tokens for _ in range(2)] == [
            0,
            reusable,
        ]
    finally:
        llm.remove_adapter("changing")


def test_a_prompt_without_the_invocation(llm: LLM, tmp_path: Path) -> None:
    save_adapter(tmp_path, KINDS["attention"])
    llm.add_adapter("a", tmp_path)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    fallback = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, alora_fallback="base")
    try:
        for prompt in (CONTEXT, [7], [3, 7], [7, 4, 3], [*CONTEXT, 7]):
            with pytest.raises(CallerError) as caught:
                llm.generate([[*prompt, *INVOCATION], prompt], "a", params)
            assert (caught.value.code, caught.value.param) == (ErrorCode.INVOCATION_MISSING, "prompts")
        base, served, invoked = llm.generate(
            [CONTEXT, CONTEXT, [*CONTEXT, *INVOCATION]], [None, "a", "a"], fallback
        )
        assert (base.adapter, served.adapter, invoked.adapter) == (None, None, "a@1")
        assert served.token_ids == base.token_ids
    finally:
        llm.remove_adapter("a")


@pytest.mark.parametrize("value", ["adapter", "", True, 1])
def test_a_fallback_is_the_base_or_none(value: Any) -> None:
    with pytest.raises(CallerError) as caught:
        SamplingParams(alora_fallback=value)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_SAMPLING, "alora_fallback")


def test_a_remote_adapters_card_comes_along(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path / "judge", KINDS["attention"])
    card = '---\nalora_invocation: "[judge]"\nalora_chat_suffix: " [judge]"\n---\n'
    (tmp_path / "judge" / "README.md").write_text(card)
    with WebServer() as web:
        web.publish(tmp_path / "judge", "/judge")
        described = llm.add_adapter("remote", f"{web.url}/judge")
    assert (described["chat_suffix"], described["invocation_tokens"]) == (" [judge]", INVOCATION)
    llm.remove_adapter("remote")
