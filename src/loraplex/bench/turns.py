"""Clients of `loraplex bench prefix`: each asks its turns one after the other, over all that was said before.

One loop for each engine that is measured: ours is `LLM`, whose engine this thread steps; vLLM runs the same
loop in a process of its own (`vllm_peer.py`). Owns the clock of a turn: from when its client could ask to the
first token that the engine hands out. Never decides what is asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from loraplex.api import LLM
from loraplex.api.local_engine import OpenSample
from loraplex.bench.engines import Vllm
from loraplex.core.request import SamplingParams
from loraplex.text.assembly import fewest_cached


class Turn(NamedTuple):
    """What a client asks next. own: token ids behind everything before. adapter: its alias, None for the
    base. new: tokens of the answer.
    """

    own: list[int]
    adapter: str | None
    new: int


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One answered turn. prompt: its tokens, of which `cached` were not computed. Times are milliseconds."""

    client: int
    turn: int
    prompt: int
    cached: int
    ttft_ms: float
    whole_ms: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """What all clients did. host_ms: processor time of making keys and of the engine without its model; 0
    where nobody can tell.
    """

    turns: list[TurnTimes]
    seconds: float
    tokens: int
    host_ms: float = 0.0


class TurnEngine(Protocol):
    """An engine that is loaded and ready for clients."""

    name: str
    cached: bool
    """Whether it reuses prefixes."""

    def converse(self, clients: Sequence[Sequence[Turn]]) -> Conversation:
        """Have every client ask its turns; all begin together."""
        ...

    def close(self) -> None:
        """Let go of memory and processes."""
        ...


class _TimedBackend:
    """An engine's backend that counts the processor time that it takes of the thread that steps."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.spent_ns = 0

    def launch(self, plan: bytes) -> None:
        started = time.thread_time_ns()
        self._inner.launch(plan)
        self.spent_ns += time.thread_time_ns() - started

    def collect(self) -> bytes:
        started = time.thread_time_ns()
        result: bytes = self._inner.collect()
        self.spent_ns += time.thread_time_ns() - started
        return result


@dataclass(slots=True)
class _Asked:
    """A client's open turn. asked, first: seconds on the clock; `first` is 0 before the first token."""

    turn: int
    samples: list[OpenSample]
    prompt: int
    asked: float
    first: float = 0.0


@dataclass(slots=True)
class _Client:
    turns: Sequence[Turn]
    said: list[int] = field(default_factory=list)
    next: int = 0


CACHED: Final = "cache on"
UNCACHED: Final = "cache off"


class OurTurns:
    """`LLM` in this process, with its prefix cache on or off; adapters are on the device before
    anybody asks.
    """

    def __init__(self, model: Path, adapters: Mapping[str, Path], *, cached: bool, **options: Any) -> None:
        self.name, self.cached = f"loraplex, {CACHED if cached else UNCACHED}", cached
        self._llm = LLM(model, dict(adapters), prefix_cache=cached, **options)
        self.vocab = self._llm.vocab_size
        engine = self._llm._built.engine
        self._backend = _TimedBackend(engine._backend)
        engine._backend = self._backend
        for alias in adapters:
            self._llm.prefetch_adapter(alias)

    def converse(self, clients: Sequence[Sequence[Turn]]) -> Conversation:
        """See `TurnEngine.converse`."""
        engine = self._llm._opened()
        everybody = [_Client(turns) for turns in clients]
        ready, asked = list(range(len(everybody))), dict[int, _Asked]()
        done: list[TurnTimes] = []
        tokens, cpu, backend = 0, time.thread_time_ns(), self._backend.spent_ns
        started = time.perf_counter()
        try:
            while ready or asked:
                now = time.perf_counter()
                for number in ready:
                    asked[number] = self._ask(everybody[number], now)
                ready = []
                engine.step()
                now = time.perf_counter()
                for number in list(asked):
                    times = _look(number, asked[number], now)
                    if times is None:
                        continue
                    answer = asked.pop(number).samples[0].answer.token_ids
                    client = everybody[number]
                    client.said += answer
                    tokens += len(answer)
                    done.append(times)
                    if client.next < len(client.turns):
                        ready.append(number)
            seconds = time.perf_counter() - started
            spent = time.thread_time_ns() - cpu - (self._backend.spent_ns - backend)
        finally:
            engine.withdraw([sample for each in asked.values() for sample in each.samples])
        return Conversation(done, seconds, tokens, spent / 1e6)

    def _ask(self, client: _Client, now: float) -> _Asked:
        turn = client.turns[client.next]
        client.said += turn.own
        params = SamplingParams(max_tokens=turn.new, temperature=0.0, ignore_eos=True)
        [job] = self._llm._jobs([client.said], turn.adapter, params)
        samples = self._llm._asked(job)
        self._llm._opened().begin(samples)
        client.next += 1
        return _Asked(client.next - 1, samples, len(client.said), now)

    def close(self) -> None:
        """See `TurnEngine.close`."""
        self._llm.close()
        del self._backend  # it holds the weights


def _look(number: int, asked: _Asked, now: float) -> TurnTimes | None:
    """The times of a turn that is over."""
    [sample] = asked.samples
    if sample.error is not None:
        raise sample.error
    if not asked.first and sample.answer.token_ids:
        asked.first = now
    if not sample.assembly.over:
        return None
    return TurnTimes(
        number,
        asked.turn,
        asked.prompt,
        fewest_cached([sample.assembly]),
        1e3 * (asked.first - asked.asked),
        1e3 * (now - asked.asked),
    )


class VllmTurns:
    """vLLM under another interpreter, with its prefix cache on or off; it looks for its adapters by alias."""

    def __init__(
        self,
        python: Path,
        model: Path,
        adapters: Mapping[str, Path],
        dtype: str,
        requests: int,
        positions: int,
        *,
        cached: bool,
    ) -> None:
        self.name, self.cached = f"vllm, {CACHED if cached else UNCACHED}", cached
        self._numbers = {alias: index for index, alias in enumerate(adapters)}
        self._vllm = Vllm(python, model, list(adapters.items()), dtype, requests, positions, cached=cached)

    def converse(self, clients: Sequence[Sequence[Turn]]) -> Conversation:
        """See `TurnEngine.converse`."""
        wanted = [
            [
                [turn.own, None if turn.adapter is None else self._numbers[turn.adapter], turn.new]
                for turn in turns
            ]
            for turns in clients
        ]
        tuned = any(turn.adapter is not None for turns in clients for turn in turns)
        answer = self._vllm.ask({"clients": wanted}, tuned=tuned)
        return Conversation([TurnTimes(*row) for row in answer["turns"]], answer["seconds"], answer["tokens"])

    def close(self) -> None:
        """See `TurnEngine.close`."""
        self._vllm.close()
