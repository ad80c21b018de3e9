"""What `loraplex bench prefix` found: rows, a table, charts and JSON.

Owns how turns become rows. Never measures. Specification: benchmarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from loraplex.bench.plot import document
from loraplex.bench.prefix_scenarios import ALORA, LORA
from loraplex.bench.turns import CACHED, Conversation, TurnTimes


class ReuseRow(msgspec.Struct, frozen=True):
    """Conversations or a system prompt on one engine. possible: prompt tokens that an earlier request, or one
    that came with it, had too. TTFT in milliseconds, of all turns and of every client's last; by_turn:
    medians, or of each client in order of waiting where there is one turn.
    """

    scenario: str
    engine: str
    prompt_tokens: int
    possible: int
    reused: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    last_p50_ms: float
    last_p99_ms: float
    tokens_per_s: float
    by_turn_ms: list[float]

    @property
    def share(self) -> float:
        """Of the possible tokens, those that were reused."""
        return self.reused / self.possible


class PipelineRow(msgspec.Struct, frozen=True):
    """One context: milliseconds to the first token of the base, and of a specialist that is always on and of
    one that is activated; whole_ms: of draft and verdict together. reused: prompt tokens, by specialist.
    """

    context: int
    base_ms: float
    ttft_ms: dict[str, float]
    whole_ms: dict[str, float]
    reused: dict[str, int]

    @property
    def ratio(self) -> float:
        """How many times sooner the activated one answers."""
        return self.ttft_ms[LORA] / self.ttft_ms[ALORA]


class CostRow(msgspec.Struct, frozen=True):
    """Prompts that share nothing. prefill_ms: that the prefill of all takes without a cache. host_ms:
    processor time of making keys and of the engine without its model, with the cache on and off.
    """

    prompts: int
    prompt_tokens: int
    prefill_ms: float
    cached_host_ms: float
    uncached_host_ms: float
    wall_ratio: float

    @property
    def share(self) -> float:
        """What the cache adds, as a part of the prefill."""
        return (self.cached_host_ms - self.uncached_host_ms) / self.prefill_ms


class Measured(msgspec.Struct):
    """All rows of a run."""

    reuse: list[ReuseRow]
    pipeline: list[PipelineRow]
    cost: list[CostRow]


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share))


def reuse_row(scenario: str, engine: str, measured: Sequence[tuple[Conversation, int]]) -> ReuseRow:
    turns = [times for one, _ in measured for times in one.turns]
    ttft = [times.ttft_ms for times in turns]
    number = max(times.turn for times in turns)
    last = [times.ttft_ms for times in turns if times.turn == number]
    by_turn = [
        statistics.median(times.ttft_ms for times in turns if times.turn == turn)
        for turn in range(number + 1)
    ]
    return ReuseRow(
        scenario,
        engine,
        sum(times.prompt for times in turns),
        sum(possible for _, possible in measured),
        sum(times.cached for times in turns),
        _percentile(ttft, 50),
        _percentile(ttft, 99),
        _percentile(last, 50),
        _percentile(last, 99),
        statistics.median(one.tokens / one.seconds for one, _ in measured),
        by_turn if number else sorted(ttft),
    )


def pipeline_row(context: int, turns: Mapping[str, Sequence[Sequence[TurnTimes]]]) -> PipelineRow:
    def middle(alias: str, of: Callable[[Sequence[TurnTimes]], float]) -> float:
        return statistics.median(of(one) for one in turns[alias])

    return PipelineRow(
        context,
        statistics.median(one[0].ttft_ms for runs in turns.values() for one in runs),
        {alias: middle(alias, lambda one: one[1].ttft_ms) for alias in turns},
        {alias: middle(alias, lambda one: one[0].whole_ms + one[1].whole_ms) for alias in turns},
        {alias: int(middle(alias, lambda one: one[1].cached)) for alias in turns},
    )


def cost_row(count: int, length: int, on: Sequence[Conversation], off: Sequence[Conversation]) -> CostRow:
    """`count` prompts of `length` tokens. on, off: their runs with and without a cache."""
    prefill = statistics.median(one.seconds for one in off)
    return CostRow(
        count,
        count * length,
        1e3 * prefill,
        statistics.median(one.host_ms for one in on),
        statistics.median(one.host_ms for one in off),
        statistics.median(one.seconds for one in on) / prefill,
    )


def table(measured: Measured) -> list[str]:
    """The rows as lines of text."""
    lines = []
    if measured.reuse:
        lines.append(
            f"{'scenario':20} {'engine':20} {'reused of possible':>26} {'TTFT p50/p99 ms':>17} "
            f"{'last turn':>17} tokens/s"
        )
    for row in measured.reuse:
        of = f"{row.reused:,} of {row.possible:,} {row.share:4.0%}"
        lines.append(
            f"{row.scenario:20} {row.engine:20} {of:>26} {_pair(row.ttft_p50_ms, row.ttft_p99_ms):>17} "
            f"{_pair(row.last_p50_ms, row.last_p99_ms):>17} {row.tokens_per_s:8,.0f}"
        )
    lines += map(_pipeline_line, measured.pipeline)
    lines += map(_cost_line, measured.cost)
    return lines


def _pipeline_line(row: PipelineRow) -> str:
    return (
        f"{row.context:6,} tokens: base's first token {row.base_ms:,.0f} ms; specialist's with LoRA "
        f"{row.ttft_ms[LORA]:,.1f}, with aLoRA {row.ttft_ms[ALORA]:,.1f}: {row.ratio:.1f} times sooner; "
        f"whole {row.whole_ms[LORA]:,.0f} and {row.whole_ms[ALORA]:,.0f} ms; reused {row.reused[LORA]:,} and "
        f"{row.reused[ALORA]:,}"
    )


def _cost_line(row: CostRow) -> str:
    return (
        f"{row.prompts} prompts of {row.prompt_tokens // row.prompts} tokens that share nothing: the cache "
        f"adds {row.cached_host_ms - row.uncached_host_ms:.2f} ms of processor time to a prefill of "
        f"{row.prefill_ms:,.0f} ms, {row.share:.2%}; {row.wall_ratio:.3f} of the time without it"
    )


def _pair(middle: float, high: float) -> str:
    return f"{middle:,.0f} / {high:,.0f}"


def draw(measured: Measured) -> str:
    """TTFT over turns, over clients in order of waiting, and over contexts, as SVG."""
    charts: list[tuple[str, str, str, dict[str, list[tuple[float, float]]]]] = []
    for scenario in dict.fromkeys(row.scenario for row in measured.reuse):
        talk = scenario == "conversations"
        series = {
            row.engine: [(float(at), ms) for at, ms in enumerate(row.by_turn_ms, 1)]
            for row in measured.reuse
            if row.scenario == scenario
        }
        what = "turn" if talk else "client, in order of waiting"
        charts.append((scenario, what, "ms to first token", series))
    if measured.pipeline:
        rows = measured.pipeline
        charts.append(
            (
                f"specialist, {CACHED}",
                "tokens of context",
                "ms to first token",
                {
                    "base": [(row.context, row.base_ms) for row in rows],
                    **{alias: [(row.context, row.ttft_ms[alias]) for row in rows] for alias in (LORA, ALORA)},
                },
            )
        )
    return document(charts)
