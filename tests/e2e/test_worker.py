"""The model in a process of its own, and a plan log replayed on a fresh runner."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.judge import CONFIGS, NAMES, check_greedy, open_llm
from tests.prompts import prompt

from loraplex import LLM, SamplingParams
from loraplex.build.engine_build import build_runner, describe_model, engine_limits, make_runner
from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, ErrorCode, InternalFault
from loraplex.core.plan import StepResult
from loraplex.process.worker import PlanLog, read_log, replay

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("device")]

PROMPTS = [prompt(length, seed) for seed, length in enumerate((5, 23, 1, 14))]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=5)


both_depths_and_slabs = pytest.mark.parametrize(("depth", "page_tokens"), [(0, 4), (1, 4), (1, 128)])
"""With pages of 128 tokens the smaller adapters take blocks of slab pages."""


@both_depths_and_slabs
def test_a_worker_process_gives_what_the_inline_backend_gives(
    root: Path, depth: int, page_tokens: int
) -> None:
    answers = []
    for backend in ("inline", "process"):
        with open_llm(root, backend=backend, pipeline_depth=depth, page_tokens=page_tokens) as llm:
            assert (llm.inspect()["slabs"]["owned_blocks"] > 0) == (page_tokens == 128)
            answers.append([llm.generate(PROMPTS, NAMES, params) for params in (GREEDY, SAMPLED)])
    inline, process = answers
    for name, output in zip(NAMES, process[0], strict=True):
        check_greedy(output, name, 8)
    for one, other in zip(inline, process, strict=True):
        assert [o.token_ids for o in one] == [o.token_ids for o in other]


def test_a_worker_that_cannot_load_its_model_says_why(tmp_path: Path, root: Path) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CallerError) as caught:
        LLM(tmp_path / "base", backend="process", pool_gb=0.01)
    assert caught.value.code is ErrorCode.MODEL_WEIGHTS_INVALID


def test_a_worker_that_is_told_the_base_does_not_hash_its_weights_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(
        "loraplex.build.base_model.hash_weights", lambda folder: hashed.append(folder) or "0" * 64
    )
    config = EngineConfig(model=str(root / "base"), images_dir=str(tmp_path), dtype="float32", pool_gb=0.01)
    build_runner(config, "a" * 64)
    assert hashed == []
    assert describe_model(config, "a" * 64).abi == "a" * 64
    describe_model(config)
    assert hashed == [root / "base"]


@both_depths_and_slabs
def test_a_plan_log_replays_to_the_same_results(
    root: Path, tmp_path: Path, depth: int, page_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    collect = PlanLog.collect

    def record(self: PlanLog) -> bytes:
        seen.append(collect(self))
        return seen[-1]

    monkeypatch.setattr(PlanLog, "collect", record)
    path, images = tmp_path / "plans", tmp_path / "images"
    with open_llm(
        root,
        plan_log=str(path),
        pipeline_depth=depth,
        scrub=True,
        token_budget=16,
        max_requests=4,
        page_tokens=page_tokens,
    ) as llm:
        outputs = [*llm.generate(PROMPTS, NAMES, GREEDY), *llm.generate(PROMPTS, NAMES, SAMPLED)]
        shutil.copytree(llm._images, images)  # it goes when the LLM closes
        pages = llm.inspect()["pages"]
    config = EngineConfig(
        model=str(root / "base"),
        images_dir=str(images),
        dtype="float32",
        pool_gb=0.01,
        page_tokens=page_tokens,
        pipeline_depth=depth,
        scrub=True,
        token_budget=16,
        max_requests=4,
        device=device,
    )
    base = describe_model(config)
    sizes = engine_limits(config, base)
    assert sizes.kv.page_bytes == pages["page_bytes"]
    again = [StepResult.unpack(data) for data in replay(path, make_runner(config, base)[0])]
    first = [StepResult.unpack(data) for data in seen]
    assert len(again) == len(first)
    for one, other in zip(first, again, strict=True):
        assert other.error_message == ""
        assert other.generation == one.generation
        # On a stream of its own a copy ends when it ends: any plan up to its publication may report it.
        copied = ["copied"] if device == "cpu" else []
        for name in ("tokens", "logprob_ids", "logprob_indptr"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), (one.generation, name)
        for name in ("faults", *copied):
            found, expected = getattr(other, name).array, getattr(one, name).array
            assert np.array_equal(found, expected), (one.generation, name)
    sampled = sum(result.tokens.size for result in again)
    assert sampled >= sum(len(output.token_ids) for output in outputs)
    assert sum(int(result.copied.intact.sum()) for result in again) == len(CONFIGS)


def test_a_log_that_is_cut_short_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "plans"
    with open_llm(root, [], plan_log=str(path)) as llm:
        llm.generate(PROMPTS, None, GREEDY)
    whole = list(read_log(path))
    assert len(whole) >= 8
    path.write_bytes(path.read_bytes()[:-3])
    plans = read_log(path)
    with pytest.raises(InternalFault) as caught:
        list(plans)
    assert caught.value.code is ErrorCode.PLAN_MALFORMED
