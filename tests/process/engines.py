"""Engines for tests of processes and transport, built in a real engine process by name.

`build_virtual` is the real control plane over the virtual device. `build_echo` repeats a request's prompt for
ever, one token a step, and obeys a few prompts: see `EchoEngine`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.config import EngineConfig
from loraplex.core.errors import CallerError, ErrorCode
from loraplex.core.layout import KvShape
from loraplex.core.messages import (
    Abort,
    Ended,
    Finish,
    FromEngine,
    Inspect,
    LoadAdapter,
    PinAdapter,
    PrefetchAdapter,
    RegisterAdapter,
    RemoveAdapter,
    Reply,
    Submit,
    TokenLogprobs,
    Tokens,
)
from loraplex.core.packed import I32, float_bits
from loraplex.core.plan import BatchPlan, StepResult
from loraplex.core.ports import Clock, EventSink, Mailbox
from loraplex.engine.sizes import EngineLimits
from loraplex.engine.step import Engine
from loraplex.process.worker import ProcessBackend
from loraplex.sim.device import VirtualDevice
from loraplex.text.grammars import load_grammars

SPLIT = "tests.process.engines:build_split"
VIRTUAL = "tests.process.engines:build_virtual"
ECHO = "tests.process.engines:build_echo"
VOCAB = 997
DIE = 990
RAISE = 991
MUTE = 992
PAUSED = 993
HANG = 994
ONCE = 995
SLOW_AGAIN = "tests.process.engines:build_slow_again"
NEVER = "tests.process.engines:build_never"
REFUSING = "tests.process.engines:build_refusing"
STEP_S = 0.0002
"""How long a step of the echo engine takes: an engine without a device would outrun every client."""
_DEVICE = threading.Event()


INFO = {
    "base_abi": "ab" * 32, "dtype": "float32", "vocab_size": VOCAB, "eos_token_ids": [2], "page_tokens": 16,
    "cache_abi": "cd" * 32, "graph_revision": 1, "prefix_cache": False,
    "notes": ["an engine of the tests"],
}  # fmt: skip


@dataclass
class Built:
    """What the engine's process drives."""

    engine: Any
    info: dict[str, Any]
    close: Callable[[], None] = lambda: None


def virtual_limits(config: EngineConfig) -> EngineLimits:
    """Sizes of an engine over 4,096 virtual pages."""
    return EngineLimits(
        kv=KvShape(1, 1, 1, 4, 16),
        num_pages=4097,
        max_requests=config.max_requests,
        max_model_len=config.max_model_len or 32768,
        token_budget=512,
        vocab_size=VOCAB,
        depth=config.pipeline_depth,
    )


class ScoringDevice(VirtualDevice):
    """A virtual device for servers: it keeps no history of its plans, and answers with log probabilities of
    no meaning.
    """

    def result_of(self, plan: BatchPlan, tokens: I32) -> StepResult:
        """Scores beside the tokens."""
        result = super().result_of(plan, tokens)
        indptr, ids, values = made_scores(result.tokens, plan.samples.logprobs)
        prompt_indptr, prompt_ids, prompt_values = made_scores(
            plan.prompt_logprobs.target, plan.prompt_logprobs.top
        )
        return replace(
            result,
            logprob_indptr=indptr,
            logprob_ids=ids,
            logprob_values=values,
            prompt_logprob_indptr=prompt_indptr,
            prompt_logprob_ids=prompt_ids,
            prompt_logprob_values=prompt_values,
            prompt_logprob_ranks=np.ones(len(plan.prompt_logprobs), dtype=np.int32),
        )


def made_scores(tokens: I32, wanted: I32) -> tuple[I32, I32, I32]:
    """(indptr, ids, float32 bits): each token, then `wanted` others."""
    rows = [
        [int(token), *range(3, 3 + top)] if top >= 0 else []
        for token, top in zip(tokens, wanted.tolist(), strict=True)
    ]
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    values = [-0.25 * rank for row in rows for rank in range(1, len(row) + 1)]
    return indptr, np.array([token for row in rows for token in row], dtype=np.int32), float_bits(values)


def virtual_device(config: EngineConfig) -> VirtualDevice:
    """The virtual device, for this process or a worker's."""
    device = ScoringDevice(virtual_limits(config).bounds, 16)
    device.plans = None
    return device


def build_virtual(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """The real engine over the virtual device."""
    limits = virtual_limits(config)
    grammars = load_grammars(Path(config.model), VOCAB, [1, 2])
    engine = Engine(limits, virtual_device(config), mailbox, clock, events, grammars=grammars)
    return Built(engine, {**INFO, "max_model_len": limits.max_model_len})


def build_split(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """The real engine over the virtual device in a worker process, whose id it tells."""
    backend = ProcessBackend(config, "tests.process.engines:virtual_device")
    engine = Engine(virtual_limits(config), backend, mailbox, clock, events)
    return Built(engine, {**INFO, "max_model_len": 32768, "worker": backend.pid}, backend.close)


@dataclass
class _Running:
    message: Submit
    prompt: list[int]
    sent: int = 0


@dataclass
class EchoEngine:
    """Answers a request with its prompt, again and again, until max_tokens or a stop token.

    A prompt that begins with DIE kills the process, RAISE breaks the step, MUTE never gets an answer, PAUSED
    gets it once the file `gate` exists, HANG stops the engine until then, ONCE gets the token behind it and
    no more. Adapters shift each token by their number of pages.
    """

    mailbox: Mailbox
    gate: Path
    running: dict[str, _Running] = field(default_factory=dict)
    adapters: dict[str, RegisterAdapter] = field(default_factory=dict)

    def step(self, wait: bool = False) -> bool:
        """Read, then send one token for each request."""
        _DEVICE.wait(STEP_S)
        out: list[FromEngine] = []
        busy = any(run.prompt[0] != MUTE for run in self.running.values())
        for message in self.mailbox.receive(wait and not busy):
            self.handle(message, out)
        for request_id, run in list(self.running.items()):
            if self.speaks(run):
                self.advance(request_id, run, out)
        if out:
            self.mailbox.send(out)
        return bool(out)

    def speaks(self, run: _Running) -> bool:
        """Whether the request gets a token now."""
        first = run.prompt[0]
        if first == ONCE:
            return not run.sent
        return first != MUTE and (first != PAUSED or self.gate.exists())

    def handle(self, message: Any, out: list[FromEngine]) -> None:
        """One message."""
        match message:
            case Submit():
                self.submit(message, out)
            case Abort():
                if self.running.pop(message.request_id, None):
                    out.append(Ended(message.request_id, code="aborted", message="aborted"))
            case Finish():
                if self.running.pop(message.request_id, None):
                    out.append(Ended(message.request_id, "stop"))
            case RegisterAdapter():
                self.adapters[message.key] = message
                out.append(Reply(message.call_id, body={"key": message.key}))
            case RemoveAdapter():
                if self.adapters.pop(message.key, None) is None:
                    out.append(Reply(message.call_id, "adapter_not_found", "no such adapter"))
                else:
                    out.append(Reply(message.call_id, body={"key": message.key}))
            case LoadAdapter() | PrefetchAdapter() | PinAdapter():
                out.append(Reply(message.call_id, body={"key": message.key}))
            case Inspect():
                out.append(Reply(message.call_id, body=self.figures()))

    def figures(self) -> dict[str, Any]:
        """In the form of `engine.inspect`."""
        described = {"state": "idle", "leases": 0, "pinned": False, "removing": False}
        adapters = [{"key": a.key, "device_pages": a.pages, **described} for a in self.adapters.values()]
        return {
            "pages": {"total": 64, "free": 63, "reserved": 0, "adapter": 0, "kv": 0, "page_bytes": 4096},
            "slabs": {"free_bytes": 0, "reserved_bytes": 0, "owned_bytes": 0, "tail_bytes": 0},
            "requests": {"running": len(self.running), "waiting": 0, "live": len(self.running)},
            "steps": {"launched": 0, "committed": 0},
            "preemptions": 0,
            "pins": {"adapters": 0, "pages": 0},
            "host": {"used_bytes": 0, "limit_bytes": 0},
            "loads": {"under_way": 0, "wanted": 0},
            "adapters": adapters,
        }

    def submit(self, message: Submit, out: list[FromEngine]) -> None:
        """Start a request, or obey its first token."""
        prompt = np.frombuffer(message.prompt, dtype="<i4").tolist()
        if prompt[:1] == [DIE]:
            os._exit(9)
        while prompt[:1] == [HANG] and not self.gate.exists():
            _DEVICE.wait(STEP_S)
        if prompt[:1] == [RAISE]:
            raise RuntimeError("told to")
        if message.adapter is not None and message.adapter not in self.adapters:
            out.append(Ended(message.request_id, code="adapter_not_found", message="no such adapter"))
            return
        self.running[message.request_id] = _Running(message, prompt)

    def advance(self, request_id: str, run: _Running, out: list[FromEngine]) -> None:
        """One token."""
        sampling = run.message.sampling
        shift = self.adapters[run.message.adapter].pages if run.message.adapter else 0
        begin = 1 if run.prompt[0] == ONCE else 0
        token = run.prompt[(begin + run.sent) % len(run.prompt)] + shift
        run.sent += 1
        top = tuple(range(max(sampling.logprobs, 0)))
        entry = TokenLogprobs((token, *top), (-0.5, *(-1.0 - k for k in top)))
        out.append(Tokens(request_id, (token,), (entry,) if sampling.logprobs >= 0 else ()))
        if token in sampling.stop_token_ids:
            out.append(Ended(request_id, "stop", token))
            del self.running[request_id]
        elif run.sent >= sampling.max_tokens:
            out.append(Ended(request_id, "length"))
            del self.running[request_id]


def build_echo(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """An `EchoEngine`, whose gate is the file `go` beside the model's folder."""
    return Built(EchoEngine(mailbox, Path(config.model).parent / "go"), {**INFO, "max_model_len": 1 << 20})


def build_slow_again(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """An `EchoEngine` at the first and third start; the second one takes for ever."""
    starts = Path(config.model) / "starts"
    starts.mkdir(exist_ok=True)
    number = len(list(starts.iterdir()))
    (starts / str(number)).touch()
    return (build_never if number == 1 else build_echo)(config, mailbox, clock, events)


def build_refusing(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """Refuses its model."""
    raise CallerError(ErrorCode.MODEL_UNSUPPORTED, "the model is refused", param="model")


def build_never(config: EngineConfig, mailbox: Mailbox, clock: Clock, events: EventSink) -> Built:
    """Loads for ever."""
    while not mailbox.closed:  # type: ignore[attr-defined]  # the process's mailbox knows when it must end
        mailbox.receive(wait=True)
    raise CallerError(ErrorCode.MODEL_UNSUPPORTED, "it was told to end")
