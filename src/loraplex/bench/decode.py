"""`loraplex bench decode`: output tokens per second of base and adapters, beside peers in the same run.

Times on a shared CPU are noise, so the engines take turns in every repeat, and each row carries its ratio to
our own base and to each peer's same row, as medians of the ratios of single turns. Where other work takes the
cores away, tokens per second of processor time say more: the same ratios are given for those. Prompts are
random token ids, output is greedy and ignores end-of-sequence, so that all do the same work.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from loraplex.bench.engines import Engine, Ours, Peft, RequestBatch, Vllm

OURS: Final = Ours.name
PEER_NAMES: Final = (Peft.name, Vllm.name)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """requests: prompts in one batch. adapters: distinct adapters over them, 0 is the base. mixed: of mixed
    length.
    """

    requests: int
    adapters: int
    mixed: bool = False

    @property
    def name(self) -> str:
        """How the table names it."""
        long = ", mixed lengths" if self.mixed else ""
        if self.adapters == 0:
            return f"{self.requests} x base{long}"
        return f"{self.requests} over {self.adapters} adapter{'s' if self.adapters > 1 else ''}{long}"


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Tokens per second of one case: the median of the turns, their spread, and every turn."""

    case: str
    engine: str
    tokens_per_s: float
    slowest: float
    fastest: float
    turns: list[float] = field(default_factory=list)
    cpu_turns: list[float] = field(default_factory=list)
    """Tokens per second of processor time."""


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What is measured. rank: measure this many random adapters of one rank on all linears; 0 takes
    `adapters`.

    vllm: a Python interpreter with vLLM, or None.
    """

    model: Path
    adapters: tuple[tuple[str, Path], ...]
    device: str = "cpu"
    dtype: str = "auto"
    prompt_tokens: int = 64
    new_tokens: int = 32
    repeats: int = 3
    peer: bool = True
    rank: int = 0
    mixed: bool = False
    vllm: Path | None = None


CASES: Final = (DecodeCase(1, 0), DecodeCase(8, 0), DecodeCase(8, 1), DecodeCase(8, 8))
MIXED: Final = (DecodeCase(64, 0, True), DecodeCase(64, 8, True))
SYNTHETIC: Final = 8


def run_decode(options: DecodeOptions, report: Callable[[str], None]) -> list[DecodeRow]:
    """Measure every case that the adapters allow. report: called with a line of progress."""
    if options.device == "cpu":
        _use_all_cores()
    with ExitStack() as stack:
        adapters = options.adapters
        if options.rank:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-bench-")))
            adapters = _synthetic(options, folder)
        report(f"loading {Ours.name}")
        ours = Ours(options.model, adapters, options.device, options.dtype)
        stack.callback(ours.close)
        engines: list[Engine] = [ours]
        for peer in _peers(options, adapters, report):
            stack.callback(peer.close)
            engines.append(peer)
        cases = _cases(options, len(adapters))
        turns = _measure(options, cases, engines, ours.vocab, report)
    return [
        DecodeRow(
            case,
            engine,
            statistics.median(wall for wall, _ in rates),
            min(rates)[0],
            max(rates)[0],
            [wall for wall, _ in rates],
            [cpu for _, cpu in rates],
        )
        for (engine, case), rates in turns.items()
    ]


def _synthetic(options: DecodeOptions, folder: Path) -> tuple[tuple[str, Path], ...]:
    from loraplex.bench.synthetic import write_adapter
    from loraplex.build.base_model import read_config
    from loraplex.model.spec import spec_from_config

    spec = spec_from_config(read_config(options.model))
    return tuple(
        (f"random-{i}", write_adapter(folder / str(i), spec, options.rank, i)) for i in range(SYNTHETIC)
    )


def _peers(
    options: DecodeOptions, adapters: Sequence[tuple[str, Path]], report: Callable[[str], None]
) -> Iterator[Engine]:
    """Each once it is loaded, so that what is loaded is let go of whatever the next one does."""
    if options.peer:
        report(f"loading {Peft.name}")
        yield Peft(options.model, adapters, options.device, options.dtype)
    if options.vllm is not None:
        positions = 4 * (options.prompt_tokens + options.new_tokens)
        dtype = "bfloat16" if options.dtype == "auto" else options.dtype
        report(f"loading {Vllm.name}")
        yield Vllm(options.vllm, options.model, adapters, dtype, 64, positions)


def _cases(options: DecodeOptions, have: int) -> list[DecodeCase]:
    wanted = CASES + (MIXED if options.mixed else ())
    return [DecodeCase(c.requests, min(c.adapters, have), c.mixed) for c in wanted if c.adapters == 0 or have]


def work_of(options: DecodeOptions, case: DecodeCase, vocab: int, seed: int) -> RequestBatch:
    """Requests of a case; mixed lengths run from half to one and a half times the options' lengths, new
    tokens too.
    """
    rng = np.random.default_rng(seed)

    def lengths(middle: int) -> list[int]:
        if not case.mixed:
            return [middle] * case.requests
        drawn: list[int] = rng.integers(middle // 2, middle + middle // 2 + 1, case.requests).tolist()
        return drawn

    prompts = [rng.integers(0, vocab, n).tolist() for n in lengths(options.prompt_tokens)]
    chosen = [i % case.adapters if case.adapters else None for i in range(case.requests)]
    return RequestBatch(prompts, chosen, lengths(options.new_tokens))


def _measure(
    options: DecodeOptions,
    cases: Sequence[DecodeCase],
    engines: Sequence[Engine],
    vocab: int,
    report: Callable[[str], None],
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Tokens per second of wall and of processor time of every turn, by (engine, case); one turn of each is
    not counted.
    """
    turns: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for repeat in range(options.repeats + 1):
        for case in dict.fromkeys(cases):
            work = work_of(options, case, vocab, repeat)
            for engine in engines:
                if case.mixed and engine.name == Vllm.name:
                    continue  # its target is a static batch
                turn = f"turn {repeat} of {options.repeats}" if repeat else "warming up"
                report(f"{turn}: {engine.name}, {case.name}")
                started, used = time.perf_counter(), engine.cpu_seconds()
                tokens = engine.generate(work)
                wall, cpu = time.perf_counter() - started, engine.cpu_seconds() - used
                if repeat:
                    rates = (tokens / wall, tokens / cpu if cpu else 0.0)
                    turns.setdefault((engine.name, case.name), []).append(rates)
                    report(f"{engine.name} {case.name}: {rates[0]:.1f} tokens/s, {rates[1]:.1f} a CPU second")
    return turns


def _use_all_cores() -> None:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))


def _ratio(row: DecodeRow, other: DecodeRow | None) -> str:
    """Median of the ratios of single turns (and of processor time), or of the medians where turns are not
    known.
    """
    if other is None:
        return ""
    if not row.turns or len(row.turns) != len(other.turns):
        return f"{row.tokens_per_s / other.tokens_per_s:.2f}"
    wall = statistics.median(a / b for a, b in zip(row.turns, other.turns, strict=True))
    pairs = [(a, b) for a, b in zip(row.cpu_turns, other.cpu_turns, strict=True) if b]
    return f"{wall:.2f} ({statistics.median(a / b for a, b in pairs):.2f})" if pairs else f"{wall:.2f}"


HEAD: Final = ("case", "loraplex tok/s", "transformers+PEFT", "ratio", "vllm", "ratio", "of our base")


def table(rows: Sequence[DecodeRow]) -> list[tuple[str, ...]]:
    """Lines of (case, ours, then each peer and the ratio to it, ratio to our base with as many requests)."""
    ours = {row.case: row for row in rows if row.engine == OURS}
    lines: list[tuple[str, ...]] = []
    for name, row in ours.items():
        cells = [name, f"{row.tokens_per_s:.1f}"]
        for engine in PEER_NAMES:
            peer = next((r for r in rows if (r.engine, r.case) == (engine, name)), None)
            cells += [f"{peer.tokens_per_s:.1f}" if peer else "", _ratio(row, peer)]
        mixed = ", mixed lengths" if name.endswith("mixed lengths") else ""
        cells.append(_ratio(row, ours.get(f"{name.split()[0]} x base{mixed}")))
        lines.append(tuple(cells))
    return lines


def as_json(options: DecodeOptions, rows: Sequence[DecodeRow]) -> str:
    """The whole run as JSON: rows, options, machine and date."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "device": options.device,
        "dtype": options.dtype,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "rank": options.rank,
        "adapters": [name for name, _ in options.adapters],
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(record, indent=2)
