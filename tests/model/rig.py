"""The whole control plane over the model runner, with PEFT as the judge of what it answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.engine.rig import sampling
from tests.model.drive import Images, logits_of
from tests.model.tiny import VOCAB, reference
from tests.model.tuned import CONFIGS, image, tuned
from tests.port_doubles import EventLog, MemoryMailbox
from tests.prompts import prompt

from loraplex.core.events import AdapterTransition, Event, RequestPreempted
from loraplex.core.layout import size_class_for
from loraplex.core.messages import RegisterAdapter, Submit
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.model.decoder import Decoder
from loraplex.model.runner import ModelRunner, allocate_pool
from loraplex.sim.world import VirtualClock


class Rig:
    """The whole control plane over the model runner, in one process."""

    def __init__(
        self,
        root: Path,
        model: Decoder,
        *,
        depth: int,
        pages: int,
        executor: Any = None,
        images: Images | None = None,
        names: tuple[str, ...] = tuple(CONFIGS),
        **changes: Any,
    ) -> None:
        """names: of adapters that are registered. changes: to the engine's sizes."""
        kv = model.spec.kv_shape(4, 4)
        sizes: dict[str, Any] = {
            "kv": kv, "num_pages": pages, "max_requests": 8, "max_model_len": 64, "token_budget": 24,
            "vocab_size": VOCAB,
            "depth": depth, "max_adapter_slots": 6, "growth_horizon": 4, "scrub": True,
        }  # fmt: skip
        self.limits = limits = EngineLimits(**{**sizes, **changes})
        self.images, self.mailbox, self.log = images or Images(), MemoryMailbox(), EventLog()
        self.clock = VirtualClock()
        pool = allocate_pool(pages, kv.page_bytes, model.weights.device, poison=True)
        made = None if executor is None else executor(kv, limits.bounds)
        self.runner = ModelRunner(model, kv, limits.bounds, self.images, pool=pool, executor=made)
        self.engine = Engine(limits, self.runner, self.mailbox, self.clock, self.log)
        for call, name in enumerate(names):
            made = image(root, model, name, kv.page_bytes)
            self.images.images[made.kernel_digest] = made
            ranks = tuple(
                sorted({(int(r), int((made.modules[:, 2] == r).sum())) for r in made.modules[:, 2]})
            )
            targets = tuple(sorted(set(made.modules[:, 1].tolist())))
            self.mailbox.inbox.append(
                RegisterAdapter(
                    call,
                    name,
                    made.kernel_digest,
                    len(made.pages),
                    ranks,
                    targets,
                    made.pages.nbytes,
                    size_class_for(kv.page_bytes, made.pages.shape[1]),
                )
            )

    def submit(self, name: str, tokens: list[int], adapter: str | None, count: int) -> None:
        packed = np.array(tokens, dtype="<i4").tobytes()
        self.mailbox.inbox.append(Submit(name, packed, sampling(max_tokens=count), adapter))

    def run(self) -> list[Event]:
        for _ in range(500):
            self.engine.step()
            if self.engine.idle and not self.mailbox.inbox:
                self.engine.check()
                return self.log.events
        raise AssertionError("the engine did not come to rest")


def assert_answers(rig: Rig, asked: dict[str, tuple[list[int], str | None]], count: int) -> None:
    """Every request ended well, and each token is what PEFT (or the base) chooses after the tokens
    before it.
    """
    for name, (tokens, adapter) in asked.items():
        assert [(e.code, e.finish_reason) for e in rig.mailbox.ended[name]] == [(None, "length")]
        judge = tuned(adapter) if adapter else reference("llama")
        known = tokens + rig.mailbox.tokens[name]
        assert len(known) == len(tokens) + count
        choices = logits_of(judge, known).argmax(dim=-1).tolist()
        assert known[len(tokens) :] == choices[len(tokens) - 1 : -1]


def check_engine(rig: Rig, reloads: bool) -> None:
    """Ten requests over the base and every adapter. reloads: the pool is so small that adapters come back."""
    asked = {f"r{i}": (prompt(4 + 5 * (i % 4), i), [None, *CONFIGS][i % 5]) for i in range(10)}
    for name, (tokens, adapter) in asked.items():
        rig.submit(name, tokens, adapter, 10)
    events = rig.run()
    assert_answers(rig, asked, 10)
    loads = Counter(e.adapter for e in events if isinstance(e, AdapterTransition) and e.after == "loading")
    assert (max(loads.values()) > 1) is reloads


def check_preemption(rig: Rig) -> None:
    """More history than the pool of 28 pages holds."""
    asked = {f"r{i}": (prompt(6, i), [None, "qv-r3"][i % 2]) for i in range(4)}
    for name, (tokens, adapter) in asked.items():
        rig.submit(name, tokens, adapter, 30)
    events = rig.run()
    assert any(isinstance(e, RequestPreempted) for e in events)
    assert_answers(rig, asked, 30)
