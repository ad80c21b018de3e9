"""Traces of many adapters: when which request comes, and what became of all of them.

S-LoRA's as its paper has it (a Gamma process for each adapter, rates by a power law) and as its published
code has it (one Gamma process, popularity drawn as power(alpha)); true Zipf; churn; a flood by one tenant of
several. Lengths are uniform. Draws depend on a seed alone. Never touches a socket or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np

SLO_S: Final = 6.0
"""S-LoRA's: a first token within it attains, and satisfies by 1 - (ttft / 6)^2."""
LIGHT: Final = ("light0", "light1", "light2", "light3")
FLOOD: Final = "flood"
FLOOD_SHARE: Final = 10
"""Times what each of the light tenants asks."""
PER_ADAPTER: Final = 10
"""Requests for each adapter of a Zipf trace on average, so that its tail is asked for too."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One trace. rate: requests a second, together. popularity: paper, code (both S-LoRA's) or zipf.

    alpha: exponent of the popularity. cv: coefficient of variation between arrivals. lengths: of prompts and
    answers, both inclusive. swaps: new revisions a second. flood: whether one tenant floods.
    """

    name: str
    adapters: int
    rate: float
    seconds: float
    popularity: Literal["paper", "code", "zipf"] = "paper"
    alpha: float = 1.0
    cv: float = 1.0
    lengths: tuple[int, int] = (8, 512)
    swaps: float = 0.0
    flood: bool = False


def traces(adapters: int, rate: float, seconds: float, longest: int) -> list[Trace]:
    """All traces at this size. longest: tokens of a prompt and of an answer."""
    few = max(min(adapters, int(rate * seconds / PER_ADAPTER)), 1)
    sizes = {"rate": rate, "seconds": seconds, "lengths": (min(8, longest), longest)}

    def make(name: str, count: int, **options: object) -> Trace:
        return msgspec.convert({"name": name, "adapters": count, **sizes, **options}, Trace)

    return [
        make("slora", adapters),
        make("slora-cv4", adapters, cv=4.0),
        make("slora-code", adapters, popularity="code", alpha=0.3),
        make("zipf", few, popularity="zipf"),
        make("churn", few, popularity="zipf", swaps=1.0),
        make("flood", few, popularity="zipf", flood=True),
    ]


class Arrival(msgspec.Struct, frozen=True):
    """A request that comes `at` seconds after the start."""

    at: float
    adapter: int
    prompt: int
    new: int
    tenant: str


def arrivals(trace: Trace, seed: int) -> list[Arrival]:
    """Everything that comes within the trace's seconds, in order."""
    rng = np.random.default_rng(seed)
    low, high = trace.lengths
    out = []
    for at, adapter in sorted(_times(trace, rng)):
        prompt, new = rng.integers(low, high + 1, 2).tolist()
        out.append(Arrival(at, adapter, prompt, new, _tenant(trace, rng)))
    return out


def _times(trace: Trace, rng: np.random.Generator) -> list[tuple[float, int]]:
    count = trace.adapters
    if trace.popularity == "paper":
        shares = 1.0 / np.arange(1, count + 1) ** trace.alpha
        rates = trace.rate * shares / shares.sum()
        return [(at, index) for index, rate in enumerate(rates.tolist()) for at in _gamma(trace, rate, rng)]
    times = _gamma(trace, trace.rate, rng)
    if trace.popularity == "code":
        chosen = np.minimum((rng.power(trace.alpha, len(times)) * count).astype(np.int64), count - 1)
    else:
        shares = 1.0 / np.arange(1, count + 1) ** trace.alpha
        chosen = rng.choice(count, len(times), p=shares / shares.sum())
    return list(zip(times, chosen.tolist(), strict=True))


def _gamma(trace: Trace, rate: float, rng: np.random.Generator) -> list[float]:
    """Times of a Gamma process within the trace's seconds."""
    out: list[float] = []
    at = 0.0
    while True:
        at += float(rng.gamma(1 / trace.cv**2, trace.cv**2 / rate))
        if at >= trace.seconds:
            return out
        out.append(at)


def _tenant(trace: Trace, rng: np.random.Generator) -> str:
    if not trace.flood:
        return "default"
    place = int(rng.integers(len(LIGHT) + FLOOD_SHARE))
    return LIGHT[place] if place < len(LIGHT) else FLOOD


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request. ttft: seconds, below 0 where it was refused. gaps: seconds between its
    tokens. code: of the refusal, empty for none.
    """

    tenant: str
    ttft: float
    gaps: list[float]
    tokens: int
    code: str = ""


class Seen(msgspec.Struct):
    """What one client process saw. ended: when its last answer ended, seconds after the start. wrong: answers
    that no overload explains, with a first message.
    """

    outcomes: list[Outcome] = []
    ended: float = 0.0
    wrong: int = 0
    message: str = ""


class Row(msgspec.Struct, frozen=True):
    """Figures of a trace under a policy. seconds: until the last answer. throughput: completed requests a
    second of them.

    attainment, satisfaction: over everybody offered, refused ones included. ttft, gap: seconds at the median
    and the 99th percentile. light, flood: ttft of those tenants. swaps: revisions published meanwhile.
    """

    trace: str
    policy: str
    offered: int
    completed: int
    refused: dict[str, int]
    seconds: float
    throughput: float
    tokens_per_s: float
    attainment: float
    satisfaction: float
    ttft: tuple[float, float]
    gap: tuple[float, float]
    light: tuple[float, float] | None
    flood: tuple[float, float] | None
    swaps: int


def satisfaction(ttft: float) -> float:
    """S-LoRA's reward of a first token; 0 at the objective and later, and for who was refused."""
    return max(1 - (ttft / SLO_S) ** 2, 0.0) if ttft >= 0 else 0.0


def row(trace: Trace, policy: str, outcomes: Sequence[Outcome], ended: float, swaps: int) -> Row:
    """The figures of a run. ended: seconds from the start to the last answer."""
    done = [one for one in outcomes if not one.code]
    refused: dict[str, int] = {}
    for one in outcomes:
        if one.code:
            refused[one.code] = refused.get(one.code, 0) + 1
    everybody, wall = max(len(outcomes), 1), max(ended, 1e-9)
    light = [one.ttft for one in done if one.tenant in LIGHT]
    flood = [one.ttft for one in done if one.tenant == FLOOD]
    return Row(
        trace=trace.name,
        policy=policy,
        offered=len(outcomes),
        completed=len(done),
        refused=refused,
        seconds=round(ended, 2),
        throughput=len(done) / wall,
        tokens_per_s=sum(one.tokens for one in done) / wall,
        attainment=sum(0 <= one.ttft < SLO_S for one in outcomes) / everybody,
        satisfaction=sum(satisfaction(one.ttft) for one in outcomes) / everybody,
        ttft=_middle([one.ttft for one in done]),
        gap=_middle([gap for one in done for gap in one.gaps]),
        light=_middle(light) if trace.flood else None,
        flood=_middle(flood) if trace.flood else None,
        swaps=swaps,
    )


def _middle(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    return round(float(np.percentile(values, 50)), 4), round(float(np.percentile(values, 99)), 4)


def waits(values: Sequence[float]) -> list[tuple[float, float]]:
    """How many of `values` are at least so large, for a plot: a point each, 200 at most."""
    ordered = sorted(value for value in values if value > 0)
    step = max(len(ordered) // 200, 1)
    return [(value, float(len(ordered) - at)) for at, value in enumerate(ordered) if at % step == 0]


HEAD: Final = (
    f"{'trace':11} {'policy':16} {'offered':>7} {'done':>5} {'req/s':>6} {'tok/s':>7} {'attain':>6} "
    f"{'satisf':>6} {'TTFT s':>13} {'between ms':>13} {'light TTFT':>13} {'swaps':>5}"
)


def line(figures: Row) -> str:
    """A row of the printed table."""

    def pair(values: tuple[float, float] | None, unit: float) -> str:
        return "-" if values is None else "/".join(f"{unit * value:.2f}" for value in values)

    return (
        f"{figures.trace:11} {figures.policy:16} {figures.offered:7} {figures.completed:5} "
        f"{figures.throughput:6.2f} {figures.tokens_per_s:7.1f} {figures.attainment:6.3f} "
        f"{figures.satisfaction:6.3f} {pair(figures.ttft, 1):>13} {pair(figures.gap, 1e3):>13} "
        f"{pair(figures.light, 1):>13} {figures.swaps:5}"
    )
