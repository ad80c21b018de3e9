"""Every generated PEFT configuration, served: PEFT's log probabilities where the operators execute it, else a
refusal by name.

One base and one `LLM`; adapters are what PEFT itself wrote. What a configuration is expected to do follows
from `EXECUTABLE`: a method that the operators learn moves its configurations from refused to equal, here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.artifact.peft_configs import GENERAL, LORA
from tests.artifact.tiny import VOCAB, TinyTensors, save_adapter, tiny_base, tiny_model
from tests.e2e.tiny_peft import logprobs_of, write_base

from loraplex import LLM, SamplingParams
from loraplex.adapters.prepare import EXECUTABLE
from loraplex.artifact.read_artifact import load_adapter
from loraplex.artifact.record import Artifact
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_LOGPROBS

TOLERANCE = 1e-4
PROMPTS = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 24)
]
CONFIGS: dict[str, tuple[Any, bool]] = {name: (config, False) for name, config in LORA.items()}
CONFIGS |= {name: (config, bias) for name, (config, bias, _) in GENERAL.items()}


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, LLM]]:
    """An `LLM` over the tiny Llama without and one with biases."""
    running = {}
    for bias in (False, True):
        folder = write_base(tmp_path_factory.mktemp(f"base-{bias}"), bias)
        running[bias] = LLM(folder, device="cpu", dtype="float32", pool_gb=0.02)
    yield running
    for llm in running.values():
        llm.close()


def prompts_for(artifact: Artifact) -> list[list[int]]:
    """Prompts; those of an activated adapter invoke it, and one of them twice."""
    tokens = list(artifact.invocation_tokens or ())
    if not tokens:
        return PROMPTS
    return [*([*prompt, *tokens, 5, 6] for prompt in PROMPTS), tokens, [*tokens, *PROMPTS[1], *tokens]]


def check_equal(
    llm: LLM, alias: str | None, model: torch.nn.Module, prompts: list[list[int]] = PROMPTS
) -> float:
    """The largest difference between what is served under `alias` and the PEFT model, over all prompts."""
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    worst = 0.0
    outputs = llm.generate(prompts, alias and [alias] * len(prompts), params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = logprobs_of(model, prompt)
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        served = [*output.prompt_logprobs[1:], output.logprobs[0]]
        assert len(served) == len(prompt)
        for position, entries in enumerate(served):
            assert entries is not None
            assert len(entries) >= MAX_LOGPROBS
            for token, value in entries.items():
                worst = max(worst, abs(value - float(expected[position, token])))
    assert worst < TOLERANCE
    return worst


@pytest.mark.parametrize("name", CONFIGS)
def test_served_as_peft_computes_it_or_refused_by_name(
    llms: dict[bool, LLM], tmp_path: Path, name: str
) -> None:
    config, bias = CONFIGS[name]
    model = save_adapter(tmp_path, config, bias=bias)
    artifact = load_adapter(tmp_path, tiny_base(bias), TinyTensors(bias))
    missing = artifact.methods - EXECUTABLE
    llm = llms[bias]
    if missing:
        with pytest.raises(CallerError) as caught:
            llm.add_adapter("a", tmp_path)
        assert caught.value.code is ErrorCode.ADAPTER_UNSUPPORTED
        assert all(method in caught.value.message for method in missing)
        return
    prompts = prompts_for(artifact)
    base = logprobs_of(tiny_model(bias), prompts[-1])
    assert float((logprobs_of(model, prompts[-1]) - base).abs().max()) > 30 * TOLERANCE  # it does something
    described = llm.add_adapter("a", tmp_path)
    try:
        assert described["tensors_applied"] == described["tensors_total"] == artifact.tensors_total
        check_equal(llm, "a", model, prompts)
    finally:
        llm.remove_adapter("a")


@pytest.mark.parametrize("bias", [False, True])
def test_the_base_is_the_base(llms: dict[bool, LLM], bias: bool) -> None:
    check_equal(llms[bias], None, tiny_model(bias))


def test_enough_of_them_are_equal() -> None:
    print(f"{len(CONFIGS)} configurations; executed: {sorted(EXECUTABLE)}")
    assert len(LORA) >= 41
