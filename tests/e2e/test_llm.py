"""`LLM` as a user has it, against transformers and PEFT on the same weights: both depths, both backends, replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex import LLM, SamplingParams
from loraplex.config import EngineConfig
from loraplex.core.errors import LoraplexError
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.runtime.build import describe_model, engine_limits, make_runner
from loraplex.runtime.worker import read_log, replay

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
]

VOCAB = 128
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rs": {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"q_proj": 7},
        "alpha_pattern": {"down_proj": 3},
    },
}
NAMES = [None, "plain", "rs", "pattern"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, options in ADAPTERS.items():
        torch.manual_seed(len(name))
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(**options))
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def references(base: Path, adapters: dict[str, Path]) -> dict[str | None, Any]:
    found: dict[str | None, Any] = {None: LlamaForCausalLM.from_pretrained(base).eval()}
    for name, folder in adapters.items():
        found[name] = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder).eval()
    return found


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, int(rng.integers(2, longest))).tolist() for _ in range(count)]


def assert_follows(reference: Any, prompt: list[int], tokens: list[int]) -> None:
    """Level b: teacher-forced, every token is the reference's best or ties with it within 1e-4."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0].float()
    for index, token in enumerate(tokens):
        row = logits[len(prompt) + index - 1]
        assert row.max() - row[token] <= 1e-4, (index, token, int(row.argmax()))


@pytest.fixture
def llm(base: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(base, adapters, dtype="float32", pool_gb=0.01, scrub=True, page_tokens=4) as made:
        yield made


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("backend", ["inline", "process"])
def test_mixed_batch_follows_transformers_and_peft(
    base: Path, adapters: dict[str, Path], references: dict[str | None, Any], depth: int, backend: str
) -> None:
    many = prompts(8)
    names = [NAMES[i % 4] for i in range(8)]
    with LLM(
        base, adapters, dtype="float32", pool_gb=0.01, pipeline_depth=depth, backend=backend, scrub=True,
        max_requests=6, token_budget=9, page_tokens=3,
    ) as llm:  # fmt: skip
        outputs = llm.generate(many, names, GREEDY)
        alone = [llm.generate(p, n, GREEDY)[0] for p, n in zip(many[:4], names[:4], strict=True)]
    for prompt, name, output in zip(many, names, outputs, strict=True):
        assert_follows(references[name], prompt, output.token_ids)
    assert [o.token_ids for o in alone] == [o.token_ids for o in outputs[:4]]


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_keeps_the_answers(
    base: Path, adapters: dict[str, Path], references: dict[str | None, Any], depth: int
) -> None:
    page_bytes = 2 * 2 * 4 * 2 * 8 * 4
    params = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
    many = prompts(6, longest=8)
    with LLM(
        base, {"plain": adapters["plain"]}, dtype="float32", page_tokens=4, pool_gb=62 * page_bytes / (1 << 30),
        max_model_len=128, pipeline_depth=depth, scrub=True,
    ) as llm:  # fmt: skip
        before = llm.inspect()["pages"]
        outputs = llm.generate(many, ["plain", None] * 3, params)
        after = llm.inspect()
    assert after["preemptions"] > 0
    assert after["pages"]["free"] == before["free"]
    for index, output in enumerate(outputs):
        assert len(output.token_ids) == 110
        assert_follows(references["plain" if index % 2 == 0 else None], many[index], output.token_ids)


def test_log_probabilities_are_the_references(llm: LLM, references: dict[str | None, Any]) -> None:
    prompt = prompts(1)[0]
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=5, prompt_logprobs=3, ignore_eos=True)
    output = llm.generate([prompt], ["rs"], params)[0]
    with torch.inference_mode():
        ids = torch.tensor([prompt + output.token_ids])
        expected = references["rs"](ids).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        assert entry is not None
        assert prompt[position] in entry
        for token, value in entry.items():
            assert value == pytest.approx(float(expected[position - 1, token]), abs=1e-4)
    for index, entry in enumerate(output.logprobs):
        assert output.token_ids[index] in entry
        assert len(entry) == 5
        for token, value in entry.items():
            assert value == pytest.approx(float(expected[len(prompt) + index - 1, token]), abs=1e-4)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, top_k=50, seed=11, ignore_eos=True)
    many = prompts(4)
    alone = llm.generate(many[0], "plain", params)[0]
    batch = llm.generate(many, ["plain", None, "rs", "pattern"], params)
    assert batch[0].token_ids == alone.token_ids
    samples = llm.generate(many[0], "plain", SamplingParams(max_tokens=12, seed=11, n=3, ignore_eos=True))[
        0
    ].samples
    assert len({tuple(s.token_ids) for s in samples}) == 3


def test_bias_stop_ids_and_end_of_sequence(llm: LLM) -> None:
    prompt = prompts(1)[0]
    forced = llm.generate(prompt, None, SamplingParams(max_tokens=3, temperature=0.0, logit_bias={9: 100.0}))[
        0
    ]
    assert forced.token_ids == [9, 9, 9]
    assert forced.finish_reason == "length"
    stopped = llm.generate(
        prompt, None, SamplingParams(max_tokens=3, temperature=0.0, logit_bias={9: 100.0}, stop_token_ids=[9])
    )[0]
    assert (stopped.token_ids, stopped.finish_reason) == ([9], "stop")
    ended = llm.generate(prompt, None, SamplingParams(max_tokens=3, temperature=0.0, logit_bias={2: 100.0}))[
        0
    ]
    assert ended.finish_reason == "stop"
    ignored = llm.generate(
        prompt, None, SamplingParams(max_tokens=3, temperature=0.0, logit_bias={2: 100.0}, ignore_eos=True)
    )[0]
    assert ignored.token_ids == [2, 2, 2]


def test_adapters_come_change_and_go(
    llm: LLM, adapters: dict[str, Path], references: dict[str | None, Any]
) -> None:
    prompt = prompts(1)[0]
    free = llm.inspect()["pages"]["free"]
    added = llm.add_adapter("more", adapters["plain"])
    assert (added["alias"], added["revision"], added["tensors_applied"]) == (
        "more",
        1,
        added["tensors_total"],
    )
    assert llm.generate(prompt, "more", GREEDY)[0].adapter == "more@1"
    swapped = llm.swap_adapter("more", adapters["rs"])
    assert swapped["revision"] == 2
    assert_follows(references["rs"], prompt, llm.generate(prompt, "more@2", GREEDY)[0].token_ids)
    llm.remove_adapter("more")
    assert llm.inspect()["pages"]["free"] == free
    assert [a["alias"] for a in llm.adapters()] == list(ADAPTERS)
    with pytest.raises(LoraplexError) as caught:
        llm.generate(prompt, "more", GREEDY)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("prompt", "adapter", "params", "code"),
    [
        ("text", None, GREEDY, "tokenizer_missing"),
        ([], None, GREEDY, "empty_prompt"),
        ([VOCAB], None, GREEDY, "token_out_of_range"),
        ([1 << 40], None, GREEDY, "token_out_of_range"),
        ([5] * 250, None, GREEDY, "context_too_long"),
        ([5], "nobody", GREEDY, "model_not_found"),
        ([5], None, SamplingParams(max_tokens=4, logit_bias={VOCAB: 1.0}), "token_out_of_range"),
    ],
)
def test_refusals_are_typed(
    llm: LLM, prompt: Any, adapter: str | None, params: SamplingParams, code: str
) -> None:
    with pytest.raises(LoraplexError) as caught:
        llm.generate([prompt], [adapter], params)
    assert caught.value.code == code
    assert llm.generate([[5, 6]], None, GREEDY)[0].token_ids


def test_a_log_of_plans_replays_to_the_same_tokens(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    log = tmp_path / "plans"
    with LLM(base, adapters, dtype="float32", pool_gb=0.01, plan_log=str(log)) as llm:
        outputs = llm.generate(prompts(4), NAMES, GREEDY)
        llm._built.close()
        config = EngineConfig(model=str(base), images_dir=llm._images_dir.name, dtype="float32", pool_gb=0.01)
        description = describe_model(config)
        runner = make_runner(config, description, engine_limits(config, description))
        tokens: dict[int, list[int]] = {}
        for packed, result in zip(read_log(log), replay(log, runner), strict=True):
            plan, step = BatchPlan.unpack(packed), StepResult.unpack(result)
            assert not step.error.size
            for sample, token in zip(plan.samples, step.tokens.tolist(), strict=True):
                tokens.setdefault(int(plan.requests[sample[1], 0]), []).append(token)
    replayed = sorted(tokens.values())
    for output in outputs:
        assert any(stream[: len(output.token_ids)] == output.token_ids for stream in replayed)
