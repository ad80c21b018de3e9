"""Cached prefixes through real forward passes: tokens are those of PEFT, with the cache on and off, at level
b.

Nine adapters of several kinds over shared prompts and conversations, in random interleavings; two of them are
activated.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tests.engine.rig import BASE, CACHE, sampling
from tests.model.resident_base import BaseWeights
from tests.model.rig import Rig
from tests.model.tiny import VOCAB, reference, save
from tests.model.tuned import ALL, image
from tests.prompts import prompt

from loraplex.artifact.identify import artifact_record
from loraplex.artifact.read_artifact import load_adapter
from loraplex.build.base_model import base_modules
from loraplex.core.events import PrefixMatched, RequestPreempted
from loraplex.core.layout import size_class_for
from loraplex.core.messages import RegisterAdapter, Submit
from loraplex.identity.cache import KeyChain, cache_root
from loraplex.identity.canonical import digest
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.identity.compatibility import adapter_function
from loraplex.identity.execution import base_execution, history_of
from loraplex.model.decoder import Decoder

TIE = 1e-4
INVOCATION = (7, 8)
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "qv": {"r": 3, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"r": 4, "lora_alpha": 4, "use_dora": True, "target_modules": ["k_proj", "o_proj"]},
    "bias": {"r": 2, "lora_alpha": 4, "lora_bias": True, "target_modules": ["q_proj", "up_proj"]},
    "head": {"r": 2, "lora_alpha": 4, "target_modules": ["lm_head"]},
    "last": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [2]},
    "embed": {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens", "up_proj"]},
    "alora": {"r": 8, "lora_alpha": 8, "target_modules": ALL, "alora_invocation_tokens": list(INVOCATION)},
    "alora-qkv": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"],
        "alora_invocation_tokens": list(INVOCATION),
    },
}  # fmt: skip
ACTIVATED = ("alora", "alora-qkv")
LIKE_THE_BASE = ("head", "last")


@cache
def tuned(name: str) -> Any:
    """PEFT over a copy of the base; B as random as A."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about targets
        base = type(reference("llama"))(reference("llama").config)
        base.load_state_dict(reference("llama").state_dict())
        model = peft.get_peft_model(base, peft.LoraConfig(**CONFIGS[name], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(list(CONFIGS).index(name))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name and "magnitude" not in parameter_name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cached")
    save("llama", root / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that embeddings are saved too
        for name in CONFIGS:
            tuned(name).save_pretrained(root / name)
    return root


def executions(root: Path, model: Decoder) -> dict[str, str]:
    """What acts, by adapter: from what the files say, not from their names."""
    out = {}
    for name in CONFIGS:
        artifact = load_adapter(root / name, base_modules(model.spec), BaseWeights(model.spec, model.weights))
        modules = artifact_record(artifact, BASE).modules
        out[name] = adapter_function(BASE, digest(name), modules, model.spec.layers).kv
    return out


class Served:
    """One engine over the tiny model, with the cache on or off."""

    def __init__(self, root: Path, model: Decoder, *, cached: bool, depth: int, pages: int) -> None:
        on: dict[str, Any] = {"prefix_cache": True, "base_abi": BASE, "cache_abi": CACHE} if cached else {}
        self.cached = cached
        self.rig = Rig(root, model, depth=depth, pages=pages, names=(), max_adapter_slots=12, **on)
        self.acts = executions(root, model)
        kv = self.rig.limits.kv
        for call, name in enumerate(CONFIGS):
            made = image(root, model, name, kv.page_bytes)
            self.rig.images.images[made.kernel_digest] = made
            self.rig.mailbox.inbox.append(
                RegisterAdapter(
                    call,
                    name,
                    made.kernel_digest,
                    len(made.pages),
                    ((4, 1),),
                    (0,),
                    made.pages.nbytes,
                    size_class_for(kv.page_bytes, made.pages.shape[1]),
                    self.acts[name] if cached else "",
                    INVOCATION if name in ACTIVATED else (),
                )
            )

    def submit(self, request: str, tokens: list[int], adapter: str | None, count: int, scored: bool) -> None:
        at = invoked_at(tokens) if adapter in ACTIVATED else -1
        packed = np.array(tokens, dtype="<i4").tobytes()
        keys = b""
        if self.cached:
            execution = self.acts[adapter] if adapter is not None else None
            history = history_of(BASE, execution, None if at < 0 else at)
            chain = KeyChain(
                cache_root(CACHE, GRAPH_REVISION, "default"), history, self.rig.limits.kv.page_tokens
            )
            keys = b"".join(chain.extend(packed))
        params = sampling(max_tokens=count, prompt_logprobs=0 if scored else -1)
        self.rig.mailbox.inbox.append(
            Submit(request, packed, params, adapter, block_keys=keys, invoked_at=at)
        )


def invoked_at(tokens: list[int]) -> int:
    return max(at for at in range(len(tokens) - 1) if tuple(tokens[at : at + 2]) == INVOCATION)


def assert_best(tokens: list[int], output: list[int], adapter: str | None) -> None:
    """Level b: after all tokens before it, each is what the judge chooses, or within `TIE` of that."""
    judge = reference("llama") if adapter is None else tuned(adapter)
    known = torch.tensor([tokens + output])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what activation costs in training
        scores = judge(input_ids=known).logits[0].log_softmax(-1)
    for index, token in enumerate(output):
        row = scores[len(tokens) - 1 + index]
        assert float(row.max() - row[token]) <= TIE, (adapter, index)


def interleaving(seed: int) -> list[tuple[str, list[int], str | None, int, bool, int]]:
    """(request, prompt, adapter, output tokens, prompt log probabilities, steps before the next one)."""
    rng = Random(seed)
    contexts = [prompt(24, 100 + index) for index in range(2)]
    out = []
    for index in range(28):
        adapter = rng.choice([None, *CONFIGS])
        tokens = [*contexts[rng.randrange(2)][: rng.choice([8, 13, 24])], *prompt(rng.randrange(4), index)]
        if adapter in ACTIVATED:
            tokens += [*INVOCATION, *prompt(rng.randrange(5), 50 + index)]
        elif rng.random() < 0.3:
            tokens += INVOCATION
        out.append((f"r{index}", tokens, adapter, rng.randint(1, 9), rng.random() < 0.15, rng.randrange(6)))
    return out


@pytest.mark.parametrize(("seed", "depth", "pages"), [(1, 1, 220), (2, 0, 220), (3, 1, 90), (4, 0, 90)])
def test_tokens_are_the_judges_with_the_cache_on_and_off(
    folders: Path, model: Decoder, seed: int, depth: int, pages: int
) -> None:
    asked = interleaving(seed)
    for cached in (True, False):
        served = Served(folders, model, cached=cached, depth=depth, pages=pages)
        served.rig.run()
        for request, tokens, adapter, count, scored, steps in asked:
            served.submit(request, tokens, adapter, count, scored)
            for _ in range(steps):
                served.rig.engine.step()
                served.rig.engine.check()
        events = served.rig.run()
        for request, tokens, adapter, count, _, _ in asked:
            assert [end.finish_reason for end in served.rig.mailbox.ended[request]] == ["length"], request
            output = served.rig.mailbox.tokens[request]
            assert len(output) == count
            assert_best(tokens, output, adapter)
        reused = sum(event.reused for event in events if isinstance(event, PrefixMatched))
        assert bool(reused) is cached


@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_go_on_from_their_own_blocks(folders: Path, model: Decoder, depth: int) -> None:
    served = Served(folders, model, cached=True, depth=depth, pages=40)
    asked = {f"r{index}": [*prompt(9, index), *INVOCATION] for index in range(4)}
    for request, tokens in asked.items():
        served.submit(request, tokens, "alora-qkv", 24, False)
    events = served.rig.run()
    assert any(isinstance(event, RequestPreempted) for event in events)
    assert any(event.again and event.reused for event in events if isinstance(event, PrefixMatched))
    for request, tokens in asked.items():
        assert_best(tokens, served.rig.mailbox.tokens[request], "alora-qkv")


def test_what_the_files_say_decides_who_shares_with_the_base(folders: Path, model: Decoder) -> None:
    acts = executions(folders, model)
    assert {name for name in CONFIGS if acts[name] == base_execution(BASE)} == set(LIKE_THE_BASE)
    assert max(INVOCATION) < VOCAB
