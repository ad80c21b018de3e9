"""Every generated PEFT configuration, served: PEFT's log probabilities where the operators execute it, else a refusal by name.

One base and one `LLM`; adapters are what PEFT itself wrote. What a configuration is expected to do follows from
`EXECUTABLE`: a method that the operators learn moves its configurations from refused to equal, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.artifact.peft_configs import GENERAL, LORA
from tests.artifact.tiny import VOCAB, TinyTensors, save_adapter, tiny_base, tiny_model

from loraplex import LLM, SamplingParams
from loraplex.adapters.prepare import EXECUTABLE
from loraplex.artifact.read_artifact import load_adapter
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.limits import MAX_LOGPROBS

TOLERANCE = 1e-4
PROMPTS = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 24)
]
CONFIGS: dict[str, tuple[Any, bool]] = {name: (config, False) for name, config in LORA.items()}
CONFIGS |= {name: (config, bias) for name, (config, bias, _) in GENERAL.items()}


def write_base(folder: Path, bias: bool) -> Path:
    model = tiny_model(bias)
    model.config.save_pretrained(folder)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


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


def logprobs_of(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """PEFT's log probabilities, [positions, vocabulary], float64."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def check_equal(llm: LLM, alias: str | None, model: torch.nn.Module) -> float:
    """The largest difference between what is served under `alias` and the PEFT model, over all prompts."""
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
    )
    worst = 0.0
    for prompt, output in zip(
        PROMPTS, llm.generate(PROMPTS, alias and [alias] * len(PROMPTS), params), strict=True
    ):
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
    base = logprobs_of(tiny_model(bias), PROMPTS[-1])
    assert float((logprobs_of(model, PROMPTS[-1]) - base).abs().max()) > 30 * TOLERANCE  # it does something
    described = llm.add_adapter("a", tmp_path)
    try:
        assert described["tensors_applied"] == described["tensors_total"] == artifact.tensors_total
        check_equal(llm, "a", model)
    finally:
        llm.remove_adapter("a")


@pytest.mark.parametrize("bias", [False, True])
def test_the_base_is_the_base(llms: dict[bool, LLM], bias: bool) -> None:
    check_equal(llms[bias], None, tiny_model(bias))


def test_enough_of_them_are_equal() -> None:
    equal = [name for name in LORA if "alora" not in name]
    print(f"{len(CONFIGS)} configurations; executed: {sorted(EXECUTABLE)}")
    assert len(equal) >= 40
