"""A whole control plane over the virtual device, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from loraplex.core.layout import KvShape
from loraplex.core.messages import EngineSampling, RegisterAdapter, Submit
from loraplex.engine.deltas import digest_words
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.sim.device import Faults, VirtualDevice
from loraplex.sim.tokens import adapter_number, expected_tokens
from loraplex.sim.world import EventLog, MemoryMailbox, VirtualClock

VOCAB = 997
both_depths = pytest.mark.parametrize("depth", [0, 1])


def sampling(**changes: Any) -> EngineSampling:
    fields: dict[str, Any] = {
        "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "stop_token_ids": (), "logprobs": -1,
        "prompt_logprobs": -1,
    }  # fmt: skip
    return EngineSampling(**{**fields, **changes})


class Rig:
    def __init__(
        self, *, depth: int = 1, pages: int = 33, page_tokens: int = 4, grammars: Any = None, **changes: Any
    ) -> None:
        fields: dict[str, Any] = {
            "kv": KvShape(1, 1, 1, 4, page_tokens), "num_pages": pages, "max_requests": 8, "max_model_len": 64, "token_budget": 16,
            "vocab_size": VOCAB, "depth": depth, "max_adapter_slots": 8, "growth_horizon": 4, "scrub": True,
            "load_retry_ns": 3000,
        }  # fmt: skip
        self.limits = EngineLimits(**{**fields, **changes})
        self.faults = Faults()
        self.device = VirtualDevice(self.limits.bounds, page_tokens, self.faults)
        self.mailbox, self.clock, self.log = MemoryMailbox(), VirtualClock(), EventLog()
        self.engine = Engine(self.limits, self.device, self.mailbox, self.clock, self.log, grammars=grammars)
        self.prompts: dict[str, tuple[np.ndarray, str | None, int]] = {}
        self.calls = 0

    def kernel_digest(self, key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    def register(self, key: str, pages: int = 2, size_class: int = 0) -> int:
        self.calls += 1
        self.mailbox.inbox.append(
            RegisterAdapter(
                self.calls, key, self.kernel_digest(key), pages, ((4, 2),), (0, 1), 1000, size_class
            )
        )
        return self.calls

    def submit(
        self,
        name: str,
        prompt: list[int],
        adapter: str | None = None,
        grammar: str | None = None,
        **changes: Any,
    ) -> None:
        params = sampling(**changes)
        array = np.array(prompt, dtype=np.int32)
        self.prompts[name] = (array, adapter, params.max_tokens)
        self.mailbox.inbox.append(
            Submit(name, array.astype("<i4").tobytes(), params, adapter, grammar=grammar)
        )

    def step(self) -> bool:
        self.clock.now += 1000
        moved = self.engine.step()
        self.engine.check()
        return moved

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            self.step()
            if self.engine.idle and not self.mailbox.inbox:
                return
        raise AssertionError(f"not idle after {limit} steps: {self.engine.state.records}")

    def expected(self, name: str) -> list[int]:
        prompt, adapter, count = self.prompts[name]
        number = adapter_number(digest_words(self.kernel_digest(adapter))) if adapter else 0
        return expected_tokens(prompt, number, count, VOCAB)

    def assert_answered(self, *names: str) -> None:
        for name in names:
            assert self.mailbox.tokens[name] == self.expected(name), name
            assert [e.finish_reason for e in self.mailbox.ended[name]] == ["length"], name
