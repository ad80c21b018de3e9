"""A whole control plane over the virtual device, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from tests.port_doubles import EventLog, MemoryMailbox

from loraplex.core.layout import KvShape
from loraplex.core.messages import EngineSampling, RegisterAdapter, Submit
from loraplex.engine.deltas import digest_words
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.identity.cache import KeyChain, cache_root, namespace_of
from loraplex.identity.canonical import digest
from loraplex.identity.closure import GRAPH_REVISION
from loraplex.identity.execution import adapter_execution, base_execution, history_of
from loraplex.sim.device import Faults, VirtualDevice
from loraplex.sim.tokens import adapter_number, expected_tokens, head_only
from loraplex.sim.world import VirtualClock

VOCAB = 997
both_depths = pytest.mark.parametrize("depth", [0, 1])


def sampling(**changes: Any) -> EngineSampling:
    fields: dict[str, Any] = {
        "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": (), "stop_token_ids": (),
        "logprobs": -1,
        "prompt_logprobs": -1,
    }  # fmt: skip
    return EngineSampling(**{**fields, **changes})


BASE = digest("base")
CACHE = digest("cache")
CACHED: dict[str, Any] = {"prefix_cache": True, "base_abi": BASE, "cache_abi": CACHE}


class Rig:
    def __init__(
        self, *, depth: int = 1, pages: int = 33, page_tokens: int = 4, grammars: Any = None, **changes: Any
    ) -> None:
        fields: dict[str, Any] = {
            "kv": KvShape(1, 1, 1, 4, page_tokens), "num_pages": pages, "max_requests": 8,
            "max_model_len": 64, "token_budget": 16,
            "vocab_size": VOCAB, "depth": depth, "max_adapter_slots": 8, "growth_horizon": 4, "scrub": True,
            "load_retry_ns": 3000,
        }  # fmt: skip
        self.limits = EngineLimits(**{**fields, **changes})
        self.faults = Faults()
        self.device = VirtualDevice(self.limits.bounds, page_tokens, self.faults)
        self.mailbox, self.clock, self.log = MemoryMailbox(), VirtualClock(), EventLog()
        self.engine = Engine(self.limits, self.device, self.mailbox, self.clock, self.log, grammars=grammars)
        self.prompts: dict[str, tuple[np.ndarray, str | None, int, int]] = {}
        self.invocations: dict[str, tuple[int, ...]] = {}
        self.calls = 0

    def kernel_digest(self, key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    def number(self, key: str) -> int:
        return adapter_number(digest_words(self.kernel_digest(key)))

    def execution(self, key: str) -> str:
        """An adapter of the output head executes as the base."""
        return base_execution(BASE) if head_only(self.number(key)) else adapter_execution(digest(key))

    def register(
        self, key: str, pages: int = 2, size_class: int = 0, invocation: tuple[int, ...] = ()
    ) -> int:
        self.calls += 1
        self.invocations[key] = invocation
        self.mailbox.inbox.append(
            RegisterAdapter(
                self.calls,
                key,
                self.kernel_digest(key),
                pages,
                ((4, 2),),
                (0, 1),
                1000,
                size_class,
                self.execution(key),
                invocation,
            )
        )
        return self.calls

    def keys(
        self, prompt: np.ndarray, adapter: str | None, invoked_at: int = -1, namespace: str = "default"
    ) -> bytes:
        """Keys of a prompt's full blocks, as a client makes them."""
        execution = self.execution(adapter) if adapter is not None else None
        history = history_of(BASE, execution, None if invoked_at < 0 else invoked_at)
        root = cache_root(CACHE, GRAPH_REVISION, namespace)
        chain = KeyChain(root, history, self.limits.kv.page_tokens)
        return b"".join(chain.extend(prompt.astype("<i4").tobytes()))

    def submit(
        self,
        name: str,
        prompt: list[int],
        adapter: str | None = None,
        grammar: str | None = None,
        tenant: str = "default",
        invoked_at: int = -1,
        **changes: Any,
    ) -> None:
        params = sampling(**changes)
        array = np.array(prompt, dtype=np.int32)
        self.prompts[name] = (array, adapter, params.max_tokens, invoked_at)
        namespace = namespace_of(tenant, self.limits.shared_tenants)
        keys = self.keys(array, adapter, invoked_at, namespace) if self.limits.prefix_cache else b""
        self.mailbox.inbox.append(
            Submit(
                name,
                array.astype("<i4").tobytes(),
                params,
                adapter,
                tenant,
                grammar=grammar,
                namespace=namespace,
                block_keys=keys,
                invoked_at=invoked_at,
            )
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
        prompt, adapter, count, invoked_at = self.prompts[name]
        number = self.number(adapter) if adapter else 0
        return expected_tokens(prompt, number, count, VOCAB, max(invoked_at, 0))

    def assert_answered(self, *names: str) -> None:
        for name in names:
            assert self.mailbox.tokens[name] == self.expected(name), name
            assert [e.finish_reason for e in self.mailbox.ended[name]] == ["length"], name
