"""`loraplex bench prefix`: what cached prefixes save, and what they cost where nothing matches.

The engines of a run are loaded at once and take turns: ours with the prefix cache on and off, and vLLM with
its own on and off where an interpreter is given. Every turn has prompts of its own, the same for all engines.
`bench/prefix_scenarios.py` says what is asked, and `bench/prefix_report.py` what it came to. Specification: benchmarks.
"""

from __future__ import annotations

import platform
import statistics
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
from loraplex.bench.prefix_report import CostRow, Measured, PipelineRow, ReuseRow, pipeline_row, reuse_row
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
POOL_GB: Final = {"cpu": 2.0, "cuda": 36.0}
WARM_UP_SEED: Final = 999_999
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """What is measured. model: None for Llama-3.1-8B's shapes with random weights. vllm: a Python interpreter
    with vLLM, or None. pool_gb: of each engine of ours, None for the device's usual size.
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
        ours: list[OurTurns] = []
        engines: list[TurnEngine] = []
        for engine in _loaded(options, model, adapters, tell):
            stack.callback(engine.close)
            engines.append(engine)
            if isinstance(engine, OurTurns):
                ours.append(engine)
        run = _Run(options, ours, engines, tell)
        run.warm_up()
        return Measured(run.reuse(), run.pipeline(), run.cost())


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
        "pool_gb": options.pool_gb or POOL_GB[options.device],
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
    """The scenarios over loaded engines."""

    def __init__(
        self, options: PrefixOptions, ours: Sequence[OurTurns], engines: Sequence[TurnEngine], tell: Tell
    ) -> None:
        self._options, self._sizes, self._tell = options, options.sizes, tell
        self._ours, self._engines = ours, engines
        self._vocab = ours[0].vocab

    def _prompts(self, scenario: str, repeat: int) -> Prompts:
        return Prompts(self._vocab, 1000 * SCENARIOS.index(scenario) + repeat)

    def warm_up(self) -> None:
        """A few turns on each engine that are not counted."""
        prompts = Prompts(self._vocab, WARM_UP_SEED)
        for engine in self._engines:
            self._tell(f"warming up: {engine.name}")
            engine.converse(fresh(prompts, self._sizes)[:2])
            if "a" in self._options.scenarios:
                engine.converse(
                    [talk[:2] for talk in conversations(prompts, self._sizes, _talkers(self._sizes)[:2])]
                )
        if "c" in self._options.scenarios:
            context = min(self._sizes.contexts)
            for alias in SPECIALIST_RANKS:
                self._ours[0].converse([pipeline(prompts, context, self._sizes, alias)])

    def reuse(self) -> list[ReuseRow]:
        """Conversations, then the system prompt: cold, and again with other questions."""
        found: dict[tuple[str, str], list[tuple[Conversation, int]]] = {}
        sizes = self._sizes

        def ask(
            scenario: str, engine: TurnEngine, clients: Any, possible: Callable[[Conversation], int]
        ) -> None:
            self._tell(f"{scenario}: {engine.name}")
            measured = engine.converse(clients)
            found.setdefault((scenario, engine.name), []).append((measured, possible(measured)))

        for repeat in range(self._options.repeats):
            if "a" in self._options.scenarios:
                talks = conversations(self._prompts("a", repeat), sizes, _talkers(sizes))
                for engine in self._engines:
                    ask(
                        "conversations",
                        engine,
                        talks,
                        lambda done: possible_in_conversations(done, sizes.answer),
                    )
            if "b" in self._options.scenarios:
                prompts = self._prompts("b", repeat)
                system = prompts.draw(sizes.system)
                cold, again = (system_prompt(prompts, system, sizes, None) for _ in range(2))
                for engine in self._engines:
                    ask("system prompt", engine, cold, lambda _: (sizes.clients - 1) * sizes.system)
                    if engine.cached:  # else it is the same again
                        ask("system prompt again", engine, again, lambda _: sizes.clients * sizes.system)
        order = list(dict.fromkeys(scenario for scenario, _ in found))
        rows = [reuse_row(*key, turns) for key, turns in found.items()]
        return sorted(rows, key=lambda row: order.index(row.scenario))

    def pipeline(self) -> list[PipelineRow]:
        """Each context with either specialist, on the engine that caches."""
        rows: list[PipelineRow] = []
        for context in self._sizes.contexts if "c" in self._options.scenarios else ():
            turns: dict[str, list[list[TurnTimes]]] = {alias: [] for alias in SPECIALIST_RANKS}
            for repeat in range(self._options.repeats):
                prompts = self._prompts("c", 100 * repeat + self._sizes.contexts.index(context))
                for alias in SPECIALIST_RANKS:
                    self._tell(f"pipeline over {context} tokens, {alias}")
                    asked = pipeline(prompts, context, self._sizes, alias)
                    turns[alias].append(self._ours[0].converse([asked]).turns)
            rows.append(pipeline_row(context, turns))
        return rows

    def cost(self) -> list[CostRow]:
        """Prompts that share nothing, with the cache on and off in turns."""
        if "d" not in self._options.scenarios:
            return []
        count, length = self._sizes.fresh
        on, off = list[Conversation](), list[Conversation]()
        for repeat in range(3 * self._options.repeats):
            prompts = fresh(self._prompts("d", repeat), self._sizes)
            for engine, into in zip(self._ours, (on, off), strict=True):
                self._tell(f"{count} prompts that share nothing: {engine.name}")
                into.append(engine.converse(prompts))
        prefill = statistics.median(one.seconds for one in off)
        return [
            CostRow(
                count,
                count * length,
                1e3 * prefill,
                statistics.median(one.host_ms for one in on),
                statistics.median(one.host_ms for one in off),
                statistics.median(one.seconds for one in on) / prefill,
            )
        ]


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
