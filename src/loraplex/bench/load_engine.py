"""The engine that `loraplex bench load` steps: the one that serves, with its loader process, and nothing
beside it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.build.base_model import BaseModel
from loraplex.build.engine_build import BuiltEngine, build_engine
from loraplex.config import EngineConfig
from loraplex.core.errors import ErrorCode, InternalFault
from loraplex.core.messages import Ended, EngineCall, EngineSampling, Inspect, Reply, SetLimits, Tokens
from loraplex.images.disk_store import ImageStore
from loraplex.memory.residency import AdapterState
from loraplex.process.clock import MonotonicClock
from loraplex.process.local import LocalMailbox, NullSink

PUSH_OUT_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is measured. cold: adapters that load while others run. running: requests that run meanwhile.
    burst: adapters that are asked for at once. pool_gb: None for what the device leaves.
    """

    model: Path
    device: str = "cpu"
    dtype: str = "auto"
    ranks: tuple[int, ...] = (8, 16, 64)
    targets: tuple[str, ...] = ("q,k,v,o", "all linears")
    repeats: int = 5
    cold: int = 100
    running: int = 8
    burst: int = 64
    pool_gb: float | None = 2.0
    max_model_len: int = 2048
    steps: int = 120
    load_format: str = "auto"


class Bench:
    """A serving engine that this program steps."""

    def __init__(self, options: LoadOptions, held: ExitStack) -> None:
        self.images = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
        self.store = ImageStore(self.images)
        self.mailbox = LocalMailbox()
        config = EngineConfig(
            model=str(options.model),
            images_dir=str(self.images),
            device=options.device,
            dtype=options.dtype,
            pool_gb=options.pool_gb,
            loader="process",
            load_format=options.load_format,
            max_model_len=options.max_model_len,
        )
        self.built: BuiltEngine = build_engine(config, self.mailbox, MonotonicClock(), NullSink())
        held.callback(self.built.close)
        self.calls = 0
        self.replies: dict[int, Reply] = {}
        self.arrived: list[tuple[str, int]] = []
        self.step_cpu_ms: list[float] = []
        self.ended = 0

    @property
    def base(self) -> BaseModel:
        """What the engine serves."""
        return self.built.base

    def post(self, message: EngineCall) -> int:
        """Send a call; its number."""
        self.calls += 1
        self.mailbox.post(msgspec.structs.replace(message, call_id=self.calls))
        return self.calls

    def step(self) -> None:
        """One step; what came back is sorted."""
        began = time.thread_time_ns()
        self.built.engine.step()
        self.step_cpu_ms.append((time.thread_time_ns() - began) / 1e6)
        now = time.perf_counter_ns()
        for message in self.mailbox.take():
            match message:
                case Reply():
                    self.replies[message.call_id] = message
                case Tokens():
                    self.arrived += [(message.request_id, now)] * len(message.token_ids)
                case Ended():
                    self.ended += 1
                    if message.code is not None and message.code != ErrorCode.ABORTED:
                        raise InternalFault(ErrorCode.INTERNAL, f"a request ended: {message.message}")

    def call(self, message: EngineCall) -> dict[str, Any]:
        """Send a call and step until it is answered."""
        number = self.post(message)
        while number not in self.replies:
            self.step()
        return self.taken(number)

    def taken(self, number: int) -> dict[str, Any]:
        """The answer to a call that has been answered; a refusal is an error of the benchmark."""
        reply = self.replies.pop(number)
        if reply.code is not None:
            raise InternalFault(ErrorCode.INTERNAL, f"call {number} was refused: {reply.message}")
        return reply.body

    def idle(self) -> None:
        """Step until nothing is under way."""
        while not self.built.engine.idle or self.mailbox.pending:
            self.step()

    def make_cold(self, *, host: bool) -> None:
        """Push every adapter off the device, and with `host` out of host memory too."""
        figures = self.call(SetLimits(0))
        self.call(SetLimits(0, adapter_pages=0, host_bytes=0 if host else None))
        push_out(
            lambda: self.call(Inspect(0)),
            (AdapterState.ABSENT, *(() if host else (AdapterState.HOST_READY,))),
        )
        self.call(SetLimits(0, adapter_pages=figures["adapter_pages"], host_bytes=figures["host_bytes"]))


def greedy(max_tokens: int) -> EngineSampling:
    return EngineSampling(
        max_tokens=max_tokens,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        stop_token_ids=(),
        logprobs=-1,
        prompt_logprobs=-1,
    )


def push_out(
    inspect: Callable[[], dict[str, Any]], until: Sequence[AdapterState] = (AdapterState.ABSENT,)
) -> None:
    """Call `inspect` until every adapter is in one of these states, which lowered limits bring about.

    A fetch that was under way when the limits fell still arrives, and leaves in a step after that.
    """
    for _ in range(PUSH_OUT_STEPS):
        if {entry["state"] for entry in inspect()["adapters"]} <= set(until):
            return
    raise InternalFault(ErrorCode.INTERNAL, f"adapters stay after {PUSH_OUT_STEPS} steps under limits of 0")
