"""Whole engines on CUDA through `LLM`: depths, chunked prefill, preemption, cancelled requests, many
requests.
"""

from __future__ import annotations

import gc
import json
import resource
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer")

from safetensors.numpy import save_file  # noqa: E402
from tests.e2e.judge import settled_pages  # noqa: E402
from tests.gpu.world import CONFIG, VOCAB  # noqa: E402

from loraplex import LLM, SamplingParams  # noqa: E402
from loraplex.api import RequestOutput  # noqa: E402
from loraplex.api.arguments import read_prompts  # noqa: E402
from loraplex.build.engine_build import describe_model, make_runner  # noqa: E402
from loraplex.config import EngineConfig  # noqa: E402
from loraplex.core.plan import StepResult  # noqa: E402
from loraplex.process.worker import replay  # noqa: E402

pytestmark = pytest.mark.gpu
TIE = 0.06


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cuda")
    (root / "base").mkdir()
    (root / "base" / "config.json").write_text(json.dumps({**CONFIG, "initializer_range": 0.1}))
    for name, seed, targets in (("a", 1, ["q_proj", "v_proj"]), ("b", 2, ["o_proj", "down_proj", "up_proj"])):
        folder = root / name
        folder.mkdir()
        save_file(factors(seed, targets), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets})
        )
    return root


def factors(seed: int, targets: list[str]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden, inner, q, kv = 256, 384, 256, 128
    dims = {
        "q_proj": (hidden, q),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "down_proj": (inner, hidden),
        "up_proj": (hidden, inner),
    }
    out = {}
    for layer in range(3):
        for target in targets:
            part = "self_attn" if target in ("q_proj", "v_proj", "o_proj") else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{target}"
            d_in, d_out = dims[target]
            out[f"{prefix}.lora_A.weight"] = (rng.standard_normal((8, d_in)) / 16).astype(np.float32)
            out[f"{prefix}.lora_B.weight"] = (rng.standard_normal((d_out, 8)) / 4).astype(np.float32)
    return out


def open_llm(root: Path, **options: Any) -> LLM:
    chosen: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "pool_gb": 0.05, "load_format": "dummy", "max_requests": 16,
        "token_budget": 64, "max_model_len": 512, "scrub": True,
    }  # fmt: skip
    return LLM(root / "base", {"a": root / "a", "b": root / "b"}, **{**chosen, **options})


PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 5 + 9 * i).tolist() for i in range(9)]
NAMES = [None, "a", "b", "a", None, "b", "a", None, "b"]
GREEDY = SamplingParams(max_tokens=120, temperature=0.0, logprobs=5, ignore_eos=True)


def same_up_to_ties(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> None:
    """Equal up to where the first's best two nearly tie; what follows such a place is another text."""
    for left, right in zip(first, second, strict=True):
        assert left.logprobs is not None
        for index, (own, other) in enumerate(zip(left.token_ids, right.token_ids, strict=True)):
            if own != other:
                scores = left.logprobs[index]
                assert other in scores
                assert scores[own] - scores[other] < TIE
                break


@pytest.mark.parametrize("depth", [0, 1])
def test_chunks_preemption_and_both_depths_give_the_requests_own_text(root: Path, depth: int) -> None:
    with open_llm(root) as llm:
        alone = [llm.generate([p], [n], GREEDY)[0] for p, n in zip(PROMPTS, NAMES, strict=True)]
    # 50 pages of 24 KiB: a few requests fit, so that some are preempted.
    with open_llm(root, pipeline_depth=depth, pool_gb=50 * 24576 / 2**30) as llm:
        together = llm.generate(PROMPTS, NAMES, GREEDY)
        assert llm._built.engine.state.preemptions > 0
        llm._built.engine.check()
    same_up_to_ties(alone, together)


def test_a_backend_in_another_process_gives_the_same_texts(root: Path) -> None:
    """It gets the plans' packed bytes and nothing else. Batches may differ: when a copy ends is the device's
    affair.
    """
    answers = []
    for backend in ("inline", "process"):
        with open_llm(root, backend=backend, pipeline_depth=1) as llm:
            llm.generate(PROMPTS, NAMES, SamplingParams(max_tokens=1))  # everything is resident from here on
            answers.append(llm.generate(PROMPTS, NAMES, GREEDY))
    same_up_to_ties(*answers)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_plan_log_replays_to_the_same_tokens(root: Path, tmp_path: Path, depth: int) -> None:
    """Greedy and sampled, chunks, mixed and captured steps, bit for bit; the same plans are the same
    launches.
    """
    path, images = tmp_path / "plans", tmp_path / "images"
    sampled = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=3, logprobs=5)
    options: dict[str, Any] = {"pipeline_depth": depth, "plan_log": str(path), "loader": "inline"}
    with open_llm(root, **options) as llm:
        outputs = [*llm.generate(PROMPTS, NAMES, GREEDY), *llm.generate(PROMPTS, NAMES, sampled)]
        shutil.copytree(llm._images, images)
    config = EngineConfig(
        model=str(root / "base"),
        images_dir=str(images),
        device="cuda",
        dtype="bfloat16",
        pool_gb=0.05,
        load_format="dummy",
        max_requests=16,
        token_budget=64,
        max_model_len=512,
        scrub=True,
        pipeline_depth=depth,
    )
    runs = []
    for _ in range(2):
        runner, _, close = make_runner(config, describe_model(config))
        results = [StepResult.unpack(data) for data in replay(path, runner)]
        assert all(result.error_message == "" for result in results)
        runs.append([(r.tokens.tolist(), r.logprob_ids.tolist(), r.logprob_values.tolist()) for r in results])
        del runner
        close()
    assert runs[0] == runs[1]
    replayed = sorted(token for tokens, _, _ in runs[0] for token in tokens)
    kept = sorted(token for output in outputs for token in output.token_ids)
    # At depth 1 a plan may sample once more for a request that has ended.
    assert not Counter(kept) - Counter(replayed)
    assert len(replayed) - len(kept) <= 2 * len(outputs)


def test_withdrawn_requests_leave_nothing_behind(root: Path) -> None:
    with open_llm(root) as llm:
        llm.generate(PROMPTS, NAMES, GREEDY)
        free = settled_pages(llm)["free"]
        for step in (1, 3, 6):
            samples = [
                sample
                for job in llm._jobs(read_prompts(PROMPTS), NAMES, GREEDY)
                for sample in llm._asked(job)
            ]
            llm._engine.begin(samples)
            for _ in range(step):
                llm._engine.step()
            llm._engine.withdraw(samples)
            llm._built.engine.check()
        assert settled_pages(llm)["free"] == free


def test_ten_thousand_requests_without_growth(root: Path) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, ignore_eos=True, seed=1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 4 + i % 13).tolist() for i in range(500)]
    names = [(None, "a", "b")[i % 3] for i in range(500)]
    with open_llm(root, max_requests=64, token_budget=512, scrub=False) as llm:
        marks = []
        for _ in range(20):
            llm.generate(prompts, names, params)
            torch.cuda.synchronize()
            gc.collect()  # what earlier engines left in cycles must not hide growth
            marks.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert marks[-1][0] <= marks[4][0]
        assert marks[-1][1] <= marks[4][1]
        llm.generate(prompts, names, params)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10
        llm._built.engine.check()


def test_an_adapter_changes_its_own_rows_alone(root: Path) -> None:
    with open_llm(root) as llm:
        base = llm.generate(PROMPTS, None, GREEDY)
        mixed = llm.generate(PROMPTS, NAMES, GREEDY)
    unadapted = [i for i, name in enumerate(NAMES) if name is None]
    same_up_to_ties([base[i] for i in unadapted], [mixed[i] for i in unadapted])
    assert sum(base[i].token_ids != mixed[i].token_ids for i in range(9) if NAMES[i]) >= 4
