"""`LLM` over the real runner: its tokens against transformers and PEFT, batches, preemption, contract and
errors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.e2e.judge import CONFIGS, GIB, NAMES, check_greedy, check_same, open_llm, settled_pages
from tests.model.tiny import POSITIONS, VOCAB
from tests.prompts import prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex import LLM, SamplingParams
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.events import Event, RequestFinished, RequestQueued

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("device")]

PROMPTS = [prompt(length, seed) for seed, length in enumerate((5, 23, 1, 14))]
"""One for each of NAMES, of different lengths."""


def greedy(count: int = 10, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **options)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers_and_peft(root: Path, name: str | None, depth: int) -> None:
    with open_llm(root, [name] if name else [], pipeline_depth=depth) as llm:
        for tokens in PROMPTS[:2]:
            [output] = llm.generate([tokens], name, greedy(logprobs=5, prompt_logprobs=5))
            check_greedy(output, name, 10)
            assert output.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_chunked_mixed_batch_equals_each_request_alone(root: Path, depth: int) -> None:
    wanted = greedy(logprobs=5, prompt_logprobs=5)
    with open_llm(root, pipeline_depth=depth, token_budget=8, max_requests=4) as llm:
        batch = llm.generate(PROMPTS, NAMES, wanted)
        steps = llm.inspect()["steps"]["launched"]
        alone = [llm.generate([p], [n], wanted)[0] for p, n in zip(PROMPTS, NAMES, strict=True)]
        assert steps > 10 + sum(map(len, PROMPTS)) // 8 - 1  # the prompts did not fit into one step
    for name, tokens, one, other in zip(NAMES, PROMPTS, batch, alone, strict=True):
        check_greedy(one, name, 10)
        check_same(one.samples[0], other.samples[0], name, tokens)


def small_pool(root: Path, kv_pages: int) -> float:
    """pool_gb that holds the null page, every adapter and `kv_pages` more."""
    with open_llm(root) as llm:
        llm.generate(PROMPTS, NAMES, greedy(1))
        pages = llm.inspect()["pages"]
    return (1 + pages["adapter"] + kv_pages + 0.5) * float(pages["page_bytes"]) / GIB


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("scrub", [False, True])
def test_preemption_and_poisoned_pages_change_no_token(root: Path, depth: int, scrub: bool) -> None:
    prompts = [prompt(8, seed) for seed in range(4)]
    options: dict[str, Any] = {"pipeline_depth": depth, "scrub": scrub, "max_requests": 4}
    # Of 4 positions to a page, each request begins with 18 pages (prompt and growth horizon) and ends with
    # 27.
    with open_llm(root, pool_gb=small_pool(root, 80), **options) as llm:
        outputs = llm.generate(prompts, NAMES, greedy(100))
        assert llm.inspect()["preemptions"] > 0
    with open_llm(root, **options) as llm:
        calm = llm.generate(prompts, NAMES, greedy(100))
        assert llm.inspect()["preemptions"] == 0
    for name, tokens, one, other in zip(NAMES, prompts, outputs, calm, strict=True):
        check_greedy(one, name, 100)
        check_same(one.samples[0], other.samples[0], name, tokens)


def test_a_seed_gives_the_same_sample_alone_and_in_a_batch(root: Path) -> None:
    params = [SamplingParams(max_tokens=12, seed=100 + index, temperature=0.9) for index in range(4)]
    with open_llm(root) as llm:
        batch = llm.generate(PROMPTS, NAMES, params)
        alone = [llm.generate([p], n, s)[0] for p, n, s in zip(PROMPTS, NAMES, params, strict=True)]
        others = llm.generate(
            PROMPTS, NAMES, [SamplingParams(max_tokens=12, seed=7, temperature=0.9) for _ in params]
        )
    assert [o.token_ids for o in batch] == [o.token_ids for o in alone]
    assert [o.token_ids for o in batch] != [o.token_ids for o in others]


def test_top_k_is_off_at_zero_and_at_minus_one(root: Path) -> None:
    params = [SamplingParams(max_tokens=12, seed=5, temperature=2.0, top_k=k) for k in (0, -1, 1)]
    with open_llm(root, ["plain"]) as llm:
        off, none, one = llm.generate([PROMPTS[0]] * 3, "plain", params)
    assert off.token_ids == none.token_ids != one.token_ids


def test_n_gives_independent_samples_that_a_seed_repeats(root: Path) -> None:
    params = SamplingParams(max_tokens=8, n=3, seed=3, logprobs=0, prompt_logprobs=0)
    with open_llm(root, ["plain"]) as llm:
        [first] = llm.generate([PROMPTS[0]], "plain", params)
        [second] = llm.generate([PROMPTS[0]], "plain", params)
        [single] = llm.generate([PROMPTS[0]], "plain", SamplingParams(max_tokens=8, seed=3))
    texts = [tuple(sample.token_ids) for sample in first.samples]
    assert len(set(texts)) == 3
    assert texts == [tuple(sample.token_ids) for sample in second.samples]
    assert first.token_ids == single.token_ids
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(PROMPTS[0])
    for sample in first.samples:
        assert sample.logprobs is not None
        assert [list(entry) for entry in sample.logprobs] == [[token] for token in sample.token_ids]


def test_sampled_tokens_are_always_among_their_logprobs(root: Path) -> None:
    with open_llm(root, []) as llm:
        outputs = llm.generate(
            PROMPTS,
            None,
            SamplingParams(max_tokens=12, temperature=5.0, seed=1, logprobs=2, prompt_logprobs=2),
        )
    sizes = set()
    for output in outputs:
        assert output.logprobs is not None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        pairs = [
            *zip(output.token_ids, output.logprobs, strict=True),
            *zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True),
        ]
        for token, entries in pairs:
            assert entries is not None
            assert token in entries
            sizes.add(len(entries))
    assert sizes == {2, 3}  # the token was one of the top two, or came on top of them


def test_stop_token_ids_end_a_request(root: Path) -> None:
    with open_llm(root, []) as llm:
        [free] = llm.generate([PROMPTS[1]], None, greedy())
        stop = free.token_ids[4]
        end = free.token_ids.index(stop)
        [stopped, other] = llm.generate(
            [PROMPTS[1], PROMPTS[1]], None, [greedy(stop_token_ids=[stop]), greedy()]
        )
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: end + 1]
    assert (other.token_ids, other.finish_reason) == (free.token_ids, "length")


def test_end_of_sequence_ends_a_request_unless_ignored(root: Path, tmp_path: Path) -> None:
    with open_llm(root, []) as llm:
        [free] = llm.generate([PROMPTS[1]], None, greedy())
    eos = free.token_ids[3]
    shutil.copytree(root / "base", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    with open_llm(tmp_path, []) as llm:
        [ended, ignoring] = llm.generate([PROMPTS[1]] * 2, None, [greedy(), greedy(ignore_eos=True)])
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    assert (ignoring.token_ids, ignoring.finish_reason) == (free.token_ids, "length")


def test_a_continued_text_keeps_its_first_space(root: Path, tmp_path: Path) -> None:
    """As over HTTP: what a tokenizer drops at the start of a text belongs to an answer, which
    continues one.
    """
    shutil.copytree(root / "base", tmp_path / "base")
    words = Tokenizer(models.WordLevel({"\u2581hello": 0, "\u2581world": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.save(str(tmp_path / "base" / "tokenizer.json"))
    with open_llm(tmp_path, []) as llm:
        [output] = llm.generate(["hello"], None, greedy(2, logit_bias={1: 100.0}))
    assert (output.token_ids, output.text) == ([1, 1], " world world")


def test_logit_bias_forces_a_token_and_leaves_logprobs_raw(root: Path) -> None:
    with open_llm(root, ["plain"]) as llm:
        [free] = llm.generate([PROMPTS[0]], "plain", greedy(1, logprobs=20))
        assert free.logprobs is not None
        forced = min(free.logprobs[0], key=lambda token: free.logprobs[0][token])  # type: ignore[index]
        [output] = llm.generate([PROMPTS[0]], "plain", greedy(5, logprobs=1, logit_bias={forced: 100.0}))
    assert output.token_ids == [forced] * 5
    assert output.logprobs is not None
    assert output.logprobs[0][forced] == pytest.approx(free.logprobs[0][forced], abs=1e-4)


def test_adapters_are_added_swapped_and_removed(root: Path) -> None:
    with open_llm(root, []) as llm:
        base = llm.generate(PROMPTS[0], None, greedy())[0]
        assert base.adapter is None
        assert llm.adapters() == []
        before = llm.inspect()["pages"]
        added = llm.add_adapter("a", root / "plain")
        assert (added["alias"], added["revision"], added["ranks"]) == ("a", 1, [8])
        assert added["tensors_applied"] == added["tensors_total"] == 2 * 2 * 3
        plain = llm.generate([PROMPTS[0]], ["a"], greedy())[0]
        check_greedy(plain, "plain", 10)
        assert plain.adapter == "a@1"
        assert llm.adapters()[0]["tier_bytes"]["device"] > 0
        swapped = llm.swap_adapter("a", root / "rslora", expected=1)
        assert swapped["revision"] == 2
        assert swapped["semantic_digest"] != added["semantic_digest"]
        tuned = llm.generate([PROMPTS[0]], "a", greedy())[0]
        check_greedy(tuned, "rslora", 10)
        assert tuned.adapter == "a@2"
        with pytest.raises(
            CallerError, match="superseded or removed and is not held; its current revision is 2"
        ):
            llm.generate([PROMPTS[0]], "a@1", greedy())
        with pytest.raises(CallerError) as conflict:
            llm.swap_adapter("a", root / "plain", expected=1)
        assert conflict.value.code is ErrorCode.ADAPTER_REVISION_CONFLICT
        assert [entry["alias"] for entry in llm.adapters()] == ["a"]
        llm.remove_adapter("a")
        assert llm.adapters() == []
        check_same(
            llm.generate([PROMPTS[0]], None, greedy())[0].samples[0], base.samples[0], None, PROMPTS[0]
        )
        after = llm.inspect()
        assert after["adapters"] == []
        assert after["pages"] == before
        with pytest.raises(CallerError) as gone:
            llm.generate([PROMPTS[0]], "a")
        assert gone.value.code is ErrorCode.MODEL_NOT_FOUND


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_return_when_adapters_leave(root: Path, depth: int) -> None:
    with open_llm(root, [], pipeline_depth=depth, scrub=True) as llm:
        free = settled_pages(llm)["free"]
        for _ in range(2):
            for name in CONFIGS:
                llm.add_adapter(name, root / name)
            llm.generate(PROMPTS, NAMES, greedy(3))
            assert settled_pages(llm)["free"] < free
            for name in CONFIGS:
                llm.remove_adapter(name)
            assert settled_pages(llm)["free"] == free


def refused(llm: LLM, *args: Any) -> ErrorCode:
    with pytest.raises(CallerError) as caught:
        llm.generate(*args)
    return caught.value.code


def test_refusals_are_typed_and_leave_nothing_behind(root: Path) -> None:
    with open_llm(root, ["plain"]) as llm:
        good = PROMPTS[0]
        llm.generate([good], "plain", greedy(1))
        pages = settled_pages(llm)
        assert refused(llm, [good], "nobody") is ErrorCode.MODEL_NOT_FOUND
        assert refused(llm, [good], "plain@9") is ErrorCode.MODEL_NOT_FOUND
        assert refused(llm, "text") is ErrorCode.TOKENIZER_MISSING
        assert refused(llm, [good], None, SamplingParams(stop="x")) is ErrorCode.TOKENIZER_MISSING
        assert refused(llm, [good], None, greedy(POSITIONS)) is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert refused(llm, [[]]) is ErrorCode.EMPTY_PROMPT
        assert refused(llm, [[1, VOCAB]]) is ErrorCode.TOKEN_OUT_OF_RANGE
        assert refused(llm, [[-1]]) is ErrorCode.TOKEN_OUT_OF_RANGE
        assert refused(llm, [[1 << 40]]) is ErrorCode.TOKEN_OUT_OF_RANGE
        assert refused(llm, [good, good], ["plain"]) is ErrorCode.INVALID_REQUEST
        assert refused(llm, [good], None, greedy(stop_token_ids=[VOCAB])) is ErrorCode.TOKEN_OUT_OF_RANGE
        assert refused(llm, [good, [VOCAB], good], None, greedy(60)) is ErrorCode.TOKEN_OUT_OF_RANGE
        # A token id that no int32 holds is found while requests before it are already open.
        assert refused(llm, [good, [1 << 40]], None, greedy(60)) is ErrorCode.TOKEN_OUT_OF_RANGE
        assert llm.inspect()["requests"] == {"running": 0, "waiting": 0, "live": 0}
        [output] = llm.generate([good], "plain", greedy())
        check_greedy(output, "plain", 10)
        assert settled_pages(llm) == pages


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"n": 0},
        {"max_tokens": 0},
        {"logprobs": -1},
        {"temperature": 10**400},
        {"stop": 5},
        {"stop": None},
        {"stop": [5]},
        {"logit_bias": [1]},
        {"logit_bias": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": None},
        {"stop_token_ids": "x"},
        {"top_k": -2},
        {"top_k": True},
        {"top_k": 1.0},
        {"top_k": None},
    ],
)
def test_bad_sampling_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(CallerError) as caught:
        SamplingParams(**options)
    assert caught.value.code is ErrorCode.INVALID_SAMPLING
    assert caught.value.param == next(iter(options))


def test_an_unknown_option_is_refused(root: Path) -> None:
    with pytest.raises(CallerError) as caught:
        open_llm(root, colour="red")
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_refused_adapter_at_the_start_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CallerError) as caught:
        LLM(root / "base", {"a": tmp_path / "nowhere"}, dtype="float32", pool_gb=0.01)
    assert caught.value.code is ErrorCode.ADAPTER_SOURCE_MISSING


def test_an_adapter_with_a_tensor_left_over_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "plain", tmp_path / "odd")
    weights = tmp_path / "odd" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors["base_model.model.model.layers.0.self_attn.z_proj.lora_A.weight"] = np.ones(
        (8, 48), dtype=np.float32
    )
    save_file(tensors, weights)
    with open_llm(root, ["plain"]) as llm:
        pages = llm.inspect()["pages"]
        for call in (
            lambda: llm.add_adapter("odd", weights.parent),
            lambda: llm.swap_adapter("plain", weights.parent),
        ):
            with pytest.raises(CallerError) as caught:
                call()
            assert caught.value.code is ErrorCode.ADAPTER_TENSOR_UNMATCHED
            assert "z_proj" in caught.value.message
        assert [(entry["alias"], entry["revision"]) for entry in llm.adapters()] == [("plain", 1)]
        assert llm.inspect()["pages"] == pages


class Watcher:
    """An event sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def test_an_event_sink_sees_what_the_engine_does(root: Path) -> None:
    watcher = Watcher()
    with open_llm(root, ["plain"], events=watcher) as llm:
        llm.generate(PROMPTS[:2], [None, "plain"], greedy(3))
    queued = [event for event in watcher.events if isinstance(event, RequestQueued)]
    assert [event.prompt_tokens for event in queued] == [len(tokens) for tokens in PROMPTS[:2]]
    assert [event.adapter is None for event in queued] == [True, False]
    assert {event.request_id for event in watcher.events if isinstance(event, RequestFinished)} == {
        event.request_id for event in queued
    }


def test_a_grouped_batch_answers_every_prompt_in_its_place(root: Path) -> None:
    names = ["plain", None, "rslora", "plain", None, "rslora"]
    prompts = [prompt(3 + 5 * index % 14, index) for index in range(len(names))]
    with open_llm(root, ["plain", "rslora"]) as llm:
        plain = llm.generate(prompts, names, greedy(6))
        grouped = llm.generate(prompts, names, greedy(6), grouping="pets")
        for output, other, name in zip(grouped, plain, names, strict=True):
            assert output.prompt_token_ids == other.prompt_token_ids
            assert output.adapter == other.adapter
            check_greedy(output, name, 6)
        with pytest.raises(CallerError, match="grouping"):
            llm.generate(prompts, names, greedy(6), grouping="length")
        with pytest.raises(CallerError) as refused:
            llm.generate([[]], None, greedy(6), grouping="pets")
        assert refused.value.code is ErrorCode.EMPTY_PROMPT
