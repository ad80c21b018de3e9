"""`loraplex bench prefix`: what cached prefixes save, and what they cost where nothing matches.

On a CPU the engines of a run are loaded at once and take turns, on a device one follows the other: ours with
the prefix cache on and off, and vLLM with its own on and off where an interpreter is given. Every turn has
prompts of its own, the same for all engines. `bench/prefix_scenarios.py` says what is asked, and
`bench/prefix_report.py` what it came to. Specification: benchmarks.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from loraplex.bench.http_traffic import write_adapters
from loraplex.bench.model_shapes import ATTENTION, LLAMA_8B, write_shape
from loraplex.bench.prefix_report import Measured, cost_row, pipeline_row, reuse_row
from loraplex.bench.prefix_scenarios import (
    ALORA,
    CPU_SIZES,
    INVOCATION_TOKENS,
    LORA,
    Prompts,
    Sizes,
    conversations,
    fresh,
    pipeline,
    possible_in_conversations,
    system_prompt,
)
from loraplex.bench.synthetic import write_adapter
from loraplex.bench.turns import Conversation, OurTurns, TurnEngine, TurnTimes, VllmTurns
from loraplex.build.base_model import read_config
from loraplex.model.spec import DecoderSpec, spec_from_config

SCENARIOS: Final = ("a", "b", "c", "d")
RANK: Final = 16
"""Of the conversations' adapters, on q, k, v, o."""
SPECIALIST_RANKS: Final = {LORA: 8, ALORA: 32}
CPU_POOL_GB: Final = 2.0
WARM_UP_SEED: Final = 999_999
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """What is measured. model: None for Llama-3.1-8B's shapes with random weights. vllm: a Python interpreter
    with vLLM, or None. pool_gb: of each engine of ours; None is 2 on a CPU and what a device leaves.
    """

    model: Path | None
    device: str = "cpu"
    dtype: str = "auto"
    scenarios: tuple[str, ...] = SCENARIOS
    sizes: Sizes = CPU_SIZES
    repeats: int = 1
    pool_gb: float | None = None
    vllm: Path | None = None


def run_prefix(options: PrefixOptions, tell: Tell) -> Measured:
    """Measure the scenarios that the options name. tell: called with what begins."""
    if options.device == "cpu":
        _use_all_cores()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
        model = options.model
        if model is None:
            (work / "model").mkdir()
            model = write_shape(LLAMA_8B, work / "model")
        tell("writing adapters")
        adapters = _adapters(work, spec_from_config(read_config(model)), read_config(model), options)
        run, loaded = _Run(options, tell), ExitStack()
        stack.callback(loaded.close)
        engines: list[TurnEngine] = []
        for engine in _loaded(options, model, adapters, tell):
            loaded.callback(engine.close)
            engines.append(engine)
            if options.device == "cuda":  # one at a time: each takes what memory the device has
                run.measure(engines)
                loaded.close()
                engines.clear()
        if engines:
            run.measure(engines)
        return run.measured()


def _use_all_cores() -> None:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))


def _talkers(sizes: Sizes) -> list[str]:
    return [f"a{index}" for index in range(sizes.clients)]


def _adapters(
    work: Path, spec: DecoderSpec, config: dict[str, Any], options: PrefixOptions
) -> dict[str, Path]:
    """Folders by alias, of those that the scenarios need."""
    found: dict[str, Path] = {}
    if "a" in options.scenarios:
        write_adapters(work / "adapters", config, RANK, options.sizes.clients)
        found |= {alias: work / "adapters" / alias for alias in _talkers(options.sizes)}
    if "c" in options.scenarios:
        ids = tuple(range(spec.vocab_size - INVOCATION_TOKENS, spec.vocab_size))
        for alias, rank in SPECIALIST_RANKS.items():
            found[alias] = write_adapter(
                work / alias, spec, rank, rank, ATTENTION, ids if alias == ALORA else ()
            )
    return found


def _loaded(
    options: PrefixOptions, model: Path, adapters: Mapping[str, Path], tell: Tell
) -> Iterator[TurnEngine]:
    """Each once it is loaded, so that what is loaded is let go of whatever the next one does."""
    more: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "pool_gb": CPU_POOL_GB if options.pool_gb is None and options.device == "cpu" else options.pool_gb,
        "max_model_len": options.sizes.longest,
        "load_format": "dummy" if options.model is None else "auto",
    }
    for cached in (True, False) if set(options.scenarios) & {"a", "b", "d"} else (True,):
        tell(f"loading loraplex, cache {'on' if cached else 'off'}")
        yield OurTurns(model, adapters, cached=cached, **more)
    if options.vllm is None:
        return
    own = {alias: folder for alias, folder in adapters.items() if alias not in SPECIALIST_RANKS}
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    for cached in (True, False):
        tell(f"loading vllm, cache {'on' if cached else 'off'}")
        yield VllmTurns(
            options.vllm, model, own, dtype, options.sizes.clients, options.sizes.longest, cached=cached
        )


class _Run:
    """The scenarios over loaded engines, and what they came to so far."""

    def __init__(self, options: PrefixOptions, tell: Tell) -> None:
        self._options, self._sizes, self._tell = options, options.sizes, tell
        self._vocab = 0
        self._reuse: dict[tuple[str, str], list[tuple[Conversation, int]]] = {}
        self._pipeline: dict[int, dict[str, list[list[TurnTimes]]]] = {}
        self._fresh: dict[bool, list[Conversation]] = {True: [], False: []}

    def measure(self, engines: Sequence[TurnEngine]) -> None:
        """Every scenario of the options, with the engines in turns."""
        ours = [engine for engine in engines if isinstance(engine, OurTurns)]
        self._vocab = ours[0].vocab
        for engine in engines:
            self._warm_up(engine)
        for repeat in range(self._options.repeats):
            if "a" in self._options.scenarios:
                self._talk(engines, repeat)
            if "b" in self._options.scenarios:
                self._ask_together(engines, repeat)
            for engine in ours:
                if engine.cached and "c" in self._options.scenarios:
                    self._hand_over(engine, repeat)
        if "d" in self._options.scenarios:
            self._share_nothing(ours)

    def _prompts(self, scenario: str, repeat: int) -> Prompts:
        return Prompts(self._vocab, 1000 * SCENARIOS.index(scenario) + repeat)

    def _warm_up(self, engine: TurnEngine) -> None:
        """A few turns that are not counted."""
        self._tell(f"warming up: {engine.name}")
        prompts, sizes = Prompts(self._vocab, WARM_UP_SEED), self._sizes
        engine.converse(fresh(prompts, sizes)[:2])
        if "a" in self._options.scenarios:
            engine.converse([talk[:2] for talk in conversations(prompts, sizes, _talkers(sizes)[:2])])
        if "c" in self._options.scenarios and engine.cached and isinstance(engine, OurTurns):
            for alias in SPECIALIST_RANKS:
                engine.converse([pipeline(prompts, min(sizes.contexts), sizes, alias)])

    def _note(self, scenario: str, engine: TurnEngine, measured: Conversation, possible: int) -> None:
        self._reuse.setdefault((scenario, engine.name), []).append((measured, possible))

    def _talk(self, engines: Sequence[TurnEngine], repeat: int) -> None:
        """Conversations, an adapter each."""
        talks = conversations(self._prompts("a", repeat), self._sizes, _talkers(self._sizes))
        for engine in engines:
            self._tell(f"conversations: {engine.name}")
            done = engine.converse(talks)
            self._note("conversations", engine, done, possible_in_conversations(done, self._sizes.answer))

    def _ask_together(self, engines: Sequence[TurnEngine], repeat: int) -> None:
        """A system prompt: cold, and again with other questions where that differs."""
        prompts, sizes = self._prompts("b", repeat), self._sizes
        system = prompts.draw(sizes.system)
        cold, again = (system_prompt(prompts, system, sizes, None) for _ in range(2))
        for engine in engines:
            self._tell(f"system prompt: {engine.name}")
            done = engine.converse(cold)
            self._note("system prompt", engine, done, (sizes.clients - 1) * sizes.system)
            if engine.cached:
                done = engine.converse(again)
                self._note("system prompt again", engine, done, sizes.clients * sizes.system)

    def _hand_over(self, engine: OurTurns, repeat: int) -> None:
        """Each context with either specialist."""
        for number, context in enumerate(self._sizes.contexts):
            turns = self._pipeline.setdefault(context, {alias: [] for alias in SPECIALIST_RANKS})
            prompts = self._prompts("c", 100 * repeat + number)
            for alias in SPECIALIST_RANKS:
                self._tell(f"pipeline over {context} tokens, {alias}")
                turns[alias].append(engine.converse([pipeline(prompts, context, self._sizes, alias)]).turns)

    def _share_nothing(self, ours: Sequence[OurTurns]) -> None:
        """Prompts that share nothing."""
        for repeat in range(3 * self._options.repeats):
            prompts = fresh(self._prompts("d", repeat), self._sizes)
            for engine in ours:
                self._tell(f"prompts that share nothing: {engine.name}")
                self._fresh[engine.cached].append(engine.converse(prompts))

    def measured(self) -> Measured:
        """All rows."""
        order = list(dict.fromkeys(scenario for scenario, _ in self._reuse))
        rows = [reuse_row(*key, turns) for key, turns in self._reuse.items()]
        on, off = self._fresh[True], self._fresh[False]
        return Measured(
            sorted(rows, key=lambda row: order.index(row.scenario)),
            [pipeline_row(context, turns) for context, turns in self._pipeline.items()],
            [cost_row(*self._sizes.fresh, on, off)] if on else [],
        )


def as_json(options: PrefixOptions, measured: Measured) -> str:
    """The whole run as JSON: rows, options, machine and date."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "model": "llama-3.1-8b shapes" if options.model is None else options.model.name,
        "device": options.device,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "sizes": options.sizes,
        "reuse": [{**msgspec.to_builtins(row), "share": row.share} for row in measured.reuse],
        "pipeline": [{**msgspec.to_builtins(row), "ratio": row.ratio} for row in measured.pipeline],
        "cost": [{**msgspec.to_builtins(row), "share": row.share} for row in measured.cost],
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
